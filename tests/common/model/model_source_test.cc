#include "common/model/model_source.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include <nlohmann/json.hpp>

#include "common/model/model_file.h"
#include "common/model/random_model_source.h"
#include "common/model/safetensors.h"
#include "common/model/weight_codecs.h"
#include "common/model/weight_encoders.h"
#include "tests/common/model/loaded_model.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/tiny_model.h"

namespace tandem {
namespace {

using testing::TemporaryDirectory;

void ExpectEqualRows(const LoadedModel& model, const TensorPlace& place, std::vector<std::vector<float>> parts) {
  std::vector<float> expected;
  for (const std::vector<float>& part : parts) expected.insert(expected.end(), part.begin(), part.end());
  ASSERT_EQ(place.size_bytes, expected.size() * sizeof(float)) << place.name;
  EXPECT_EQ(std::memcmp(model.Values(place), expected.data(), place.size_bytes), 0) << place.name;
}

void ExpectHoldsDirectory(const LoadedModel& model, const std::string& directory) {
  const auto in_files = [&](const std::string& name) { return ValuesInFiles(directory, name); };
  ExpectEqualRows(model, model.layout.embedding, {in_files("model.embed_tokens.weight")});
  for (std::size_t i = 0; i < model.layout.layers.size(); ++i) {
    const LayerPlaces& places = model.layout.layers[i];
    const std::string prefix = absl::StrCat("model.layers.", i, ".");
    ExpectEqualRows(model, places.input_norm, {in_files(prefix + "input_layernorm.weight")});
    ExpectEqualRows(model, places.qkv,
                    {in_files(prefix + "self_attn.q_proj.weight"), in_files(prefix + "self_attn.k_proj.weight"),
                     in_files(prefix + "self_attn.v_proj.weight")});
    ExpectEqualRows(model, places.o, {in_files(prefix + "self_attn.o_proj.weight")});
    ExpectEqualRows(model, places.post_norm, {in_files(prefix + "post_attention_layernorm.weight")});
    ExpectEqualRows(model, places.gate_up, {in_files(prefix + "mlp.gate_proj.weight"), in_files(prefix + "mlp.up_proj.weight")});
    ExpectEqualRows(model, places.down, {in_files(prefix + "mlp.down_proj.weight")});
  }
  ExpectEqualRows(model, model.layout.final_norm, {in_files("model.norm.weight")});
  if (!model.description.config.is_embedding_tied) ExpectEqualRows(model, model.layout.head, {in_files("lm_head.weight")});
}

TEST(HuggingFaceSourceTest, EveryDtypeAndShardingLoadsFused) {
  for (const char* dtype : {"F32", "F16", "BF16"}) {
    for (const int num_shards : {1, 3}) {
      for (const bool tie_embeddings : {true, false}) {
        SCOPED_TRACE(absl::StrCat(dtype, " shards ", num_shards, " tied ", tie_embeddings));
        const TemporaryDirectory directory;
        TinyModelOptions options;
        options.dtype = dtype;
        options.num_shards = num_shards;
        options.tie_embeddings = tie_embeddings;
        ASSERT_TRUE(WriteTinyModel(directory.path(), options).ok());
        const LoadedModel model = Load(directory.path());
        ExpectHoldsDirectory(model, directory.path());
      }
    }
  }
}

// CASES C16
TEST(HuggingFaceSourceTest, TiedHeadIsTheEmbeddingOnce) {
  const TemporaryDirectory directory;
  ASSERT_TRUE(WriteTinyModel(directory.path(), {}).ok());
  const LoadedModel model = Load(directory.path());
  EXPECT_TRUE(model.description.config.is_embedding_tied);
  EXPECT_EQ(model.layout.head.begin_bytes, model.layout.embedding.begin_bytes);
  int num_embeddings = 0;
  std::uint64_t end_bytes = 0;
  for (const TensorPlace* place : model.layout.Tensors()) {
    EXPECT_GE(place->begin_bytes, end_bytes) << place->name;
    EXPECT_EQ(place->begin_bytes % 64, 0u) << place->name;
    end_bytes = place->begin_bytes + place->size_bytes;
    num_embeddings += place->shape == model.layout.embedding.shape ? 1 : 0;
  }
  EXPECT_EQ(num_embeddings, 1);
  EXPECT_LE(end_bytes, model.layout.total_bytes);
}

TEST(HuggingFaceSourceTest, Bf16RegionHoldsRoundedValues) {
  const TemporaryDirectory directory;
  ASSERT_TRUE(WriteTinyModel(directory.path(), {}).ok());
  const LoadedModel wide = Load(directory.path());
  const LoadedModel narrow = Load(directory.path(), StorageFormat::kBf16);
  const std::vector<const TensorPlace*> wide_places = wide.layout.Tensors();
  const std::vector<const TensorPlace*> narrow_places = narrow.layout.Tensors();
  ASSERT_EQ(wide_places.size(), narrow_places.size());
  for (std::size_t i = 0; i < wide_places.size(); ++i) {
    const float* values = wide.Values(*wide_places[i]);
    const auto* rounded = reinterpret_cast<const std::uint16_t*>(narrow.region.data() + narrow_places[i]->begin_bytes);
    ASSERT_EQ(narrow_places[i]->size_bytes * 2, wide_places[i]->size_bytes);
    for (std::size_t j = 0; j < narrow_places[i]->size_bytes / 2; ++j) {
      ASSERT_EQ(rounded[j], FloatToBf16(values[j])) << narrow_places[i]->name << " value " << j;
    }
  }
}

const float* FloatsAt(const LoadedModel& model, const std::optional<TensorPlace>& place) { return model.Values(place.value()); }
const std::uint8_t* CodesAt(const LoadedModel& model, const TensorPlace& place) {
  return reinterpret_cast<const std::uint8_t*>(model.region.data() + place.begin_bytes);
}

// Every linear layer of a quantised model, given its values in fp32.
void ForEachLinear(const LoadedModel& wide, const LoadedModel& narrow,
                   const std::function<void(const LinearPlace& place, std::span<const float> values)>& check) {
  for (std::size_t i = 0; i < narrow.layout.layers.size(); ++i) {
    const LayerPlaces &from = wide.layout.layers[i], &to = narrow.layout.layers[i];
    for (const auto& [source, place] : {std::pair{&from.qkv, &to.qkv}, std::pair{&from.o, &to.o},
                                        std::pair{&from.gate_up, &to.gate_up}, std::pair{&from.down, &to.down}}) {
      SCOPED_TRACE(place->name);
      check(*place, {wide.Values(*source), source->size_bytes / sizeof(float)});
    }
  }
}

// A model whose parts of qkv have no whole number of nested blocks, and whose qkv is read in more than one stripe.
TinyModelOptions QuantisableModel() {
  TinyModelOptions options;
  options.hidden_size = 1088;
  options.num_heads = 68;
  options.num_kv_heads = 34;
  options.num_layers = 1;
  return options;
}

TEST(HuggingFaceSourceTest, Fp8RegionHoldsEncodedRowsAndTheRestInBf16) {
  const TemporaryDirectory directory;
  ASSERT_TRUE(WriteTinyModel(directory.path(), QuantisableModel()).ok());
  const LoadedModel wide = Load(directory.path()), narrow = Load(directory.path(), StorageFormat::kFp8Row);
  ForEachLinear(wide, narrow, [&](const LinearPlace& place, std::span<const float> values) {
    const auto columns = static_cast<std::size_t>(place.shape[1]);
    std::vector<std::uint8_t> codes(columns);
    for (std::size_t row = 0; row < values.size() / columns; ++row) {
      EXPECT_EQ(EncodeFp8Row(values.subspan(row * columns, columns), codes), FloatsAt(narrow, place.scales)[row]) << row;
      ASSERT_EQ(std::memcmp(codes.data(), CodesAt(narrow, place) + row * columns, columns), 0) << row;
    }
  });
  for (const auto& [from, to] : {std::pair{&wide.layout.embedding, &narrow.layout.embedding},
                                 std::pair{&wide.layout.final_norm, &narrow.layout.final_norm},
                                 std::pair{&wide.layout.layers[0].post_norm, &narrow.layout.layers[0].post_norm}}) {
    ASSERT_EQ(to->size_bytes * 2, from->size_bytes);
    const auto* rounded = reinterpret_cast<const std::uint16_t*>(narrow.region.data() + to->begin_bytes);
    for (std::size_t i = 0; i < to->size_bytes / 2; ++i) ASSERT_EQ(rounded[i], FloatToBf16(wide.Values(*from)[i])) << to->name;
  }
}

// The places, read as weight_layout.h says, give for each tensor of the file what it gives when it is encoded on its own.
TEST(HuggingFaceSourceTest, Nf4RegionHoldsEachPartUnderScalesOfItsOwn) {
  const TemporaryDirectory directory;
  ASSERT_TRUE(WriteTinyModel(directory.path(), QuantisableModel()).ok());
  const LoadedModel wide = Load(directory.path()), narrow = Load(directory.path(), StorageFormat::kNf4);
  const float* map = FloatsAt(narrow, narrow.layout.nested_map);
  EXPECT_TRUE(std::equal(map, map + 256, Nf4NestedMap().begin()));
  ForEachLinear(wide, narrow, [&](const LinearPlace& place, std::span<const float> values) {
    const auto columns = static_cast<std::size_t>(place.shape[1]), blocks_per_row = columns / kNf4BlockValues;
    EXPECT_EQ(place.parts.back().row_end, place.shape[0]);
    for (std::size_t p = 0; p < place.parts.size(); ++p) {
      const LinearPart& part = place.parts[p];
      const auto begin = static_cast<std::size_t>(part.row_begin), rows = static_cast<std::size_t>(part.row_end) - begin;
      std::vector<std::uint8_t> packed(rows * columns / 2), codes(rows * blocks_per_row);
      std::vector<float> absmax(codes.size()), nested((codes.size() + kNf4NestedBlocks - 1) / kNf4NestedBlocks);
      EncodeNf4(values.subspan(begin * columns, rows * columns), packed, absmax);
      EXPECT_EQ(EncodeNestedAbsmax(absmax, codes, nested), FloatsAt(narrow, place.nested_offset)[p]) << "part " << p;
      ASSERT_EQ(std::memcmp(packed.data(), CodesAt(narrow, place) + begin * columns / 2, packed.size()), 0) << "part " << p;
      ASSERT_EQ(std::memcmp(codes.data(), CodesAt(narrow, *place.scales) + begin * blocks_per_row, codes.size()), 0)
          << "part " << p;
      EXPECT_TRUE(std::equal(nested.begin(), nested.end(), FloatsAt(narrow, place.nested_absmax) + part.nested_begin))
          << "part " << p;
    }
  });
  const LinearPlace& qkv = narrow.layout.layers[0].qkv;
  ASSERT_EQ(qkv.parts.size(), 3u);
  EXPECT_NE(FloatsAt(narrow, qkv.nested_offset)[0], FloatsAt(narrow, qkv.nested_offset)[1]);
  for (const TensorPlace* place : narrow.layout.Tensors()) EXPECT_EQ(place->begin_bytes % 256, 0u) << place->name;
}

TEST(HuggingFaceSourceTest, SizesThatAFormatCannotHoldAreNamed) {
  ModelConfig config;
  config.name = "odd";
  config.hidden_size = 64;
  config.intermediate_size = 96;
  config.num_heads = config.num_kv_heads = 4;
  config.head_dim = 18;
  EXPECT_TRUE(CheckStorageFormat(config, StorageFormat::kBf16).ok());
  const absl::Status fp8 = CheckStorageFormat(config, StorageFormat::kFp8Row);
  EXPECT_EQ(fp8.message(), "weights in fp8: o_proj of odd has 72 inputs, no multiple of 16");
  config.head_dim = 16;
  EXPECT_TRUE(CheckStorageFormat(config, StorageFormat::kFp8Row).ok());
  EXPECT_EQ(CheckStorageFormat(config, StorageFormat::kNf4).message(),
            "weights in nf4: down_proj of odd has 96 inputs, no multiple of 64");
}

TEST(HuggingFaceSourceTest, ConfigIsRead) {
  const TemporaryDirectory directory;
  TinyModelOptions options;
  options.use_llama3_rope_scaling = true;
  options.tie_embeddings = false;
  const std::string path = directory.File("tiny-llama");
  ASSERT_TRUE(WriteTinyModel(path, options).ok());
  WriteFileAtomically(path + "/generation_config.json", R"({"eos_token_id": [0, 2]})").IgnoreError();
  const auto source = ModelSource::Open(path + "/");
  ASSERT_TRUE(source.ok()) << source.status();
  const ModelConfig& config = (*source)->description().config;
  EXPECT_EQ(config.family, "llama");
  EXPECT_EQ(config.name, "tiny-llama");
  EXPECT_EQ(config.num_layers, 2);
  EXPECT_EQ(config.q_size(), 64);
  EXPECT_EQ(config.kv_size(), 32);
  EXPECT_EQ(config.vocab_size, 280);
  EXPECT_EQ(config.max_positions, 1024);
  EXPECT_FALSE(config.is_embedding_tied);
  EXPECT_EQ(config.end_token_ids, (std::vector<std::uint32_t>{2, 0}));
  ASSERT_TRUE(config.rope_scaling.has_value());
  EXPECT_EQ(config.rope_scaling->factor, 8.0);
  EXPECT_EQ(config.rope_scaling->original_max_positions, 64);
  EXPECT_EQ((*source)->description().tokenizer.tokens.size(), 280u);
}

// Opens a tiny model whose config.json was changed.
absl::Status OpenWithConfig(const std::function<void(nlohmann::json*)>& change) {
  const TemporaryDirectory directory;
  EXPECT_TRUE(WriteTinyModel(directory.path(), {}).ok());
  nlohmann::json config = ReadJson(directory.File("config.json"));
  change(&config);
  EXPECT_TRUE(WriteFileAtomically(directory.File("config.json"), config.dump()).ok());
  return ModelSource::Open(directory.path()).status();
}

TEST(HuggingFaceSourceTest, WhatWouldComputeSomethingElseIsRefused) {
  const std::map<std::string, nlohmann::json> unsupported = {{"architectures", {"OtherForCausalLM"}},
                                                             {"hidden_act", "gelu"},
                                                             {"attention_bias", true},
                                                             {"mlp_bias", true},
                                                             {"quantization_config", {{"bits", 4}}},
                                                             {"layer_types", {"full_attention", "sliding_attention"}},
                                                             {"rope_scaling", {{"rope_type", "yarn"}, {"factor", 2.0}}}};
  for (const auto& [field, value] : unsupported) {
    const absl::Status status =
        OpenWithConfig([&, &field = field, &value = value](nlohmann::json* config) { (*config)[field] = value; });
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << field << ": " << status;
  }
  const std::multimap<std::string, nlohmann::json> wrong = {{"hidden_size", 65},
                                                            {"hidden_size", -64},
                                                            {"hidden_size", 1e300},
                                                            {"num_attention_heads", 0},
                                                            {"num_hidden_layers", 1 << 29},
                                                            {"num_hidden_layers", 3},
                                                            {"num_key_value_heads", 3},
                                                            {"head_dim", 15},
                                                            {"vocab_size", 281},
                                                            {"vocab_size", 0},
                                                            {"max_position_embeddings", "many"},
                                                            {"rms_norm_eps", 0},
                                                            {"rope_theta", -1},
                                                            {"eos_token_id", 280},
                                                            {"eos_token_id", "x"},
                                                            {"tie_word_embeddings", 1},
                                                            {"architectures", "LlamaForCausalLM"}};
  for (const auto& [field, value] : wrong) {
    const absl::Status status =
        OpenWithConfig([&, &field = field, &value = value](nlohmann::json* config) { (*config)[field] = value; });
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << field << " = " << value << ": " << status;
  }
  // Half as many layers as the file has: computing with them would be another model.
  EXPECT_EQ(OpenWithConfig([](nlohmann::json* config) { (*config)["num_hidden_layers"] = 1; }).code(),
            absl::StatusCode::kUnimplemented);
}

TEST(HuggingFaceSourceTest, NewerRopeParametersAreRead) {
  const TemporaryDirectory directory;
  ASSERT_TRUE(WriteTinyModel(directory.path(), {}).ok());
  nlohmann::json config = ReadJson(directory.File("config.json"));
  config.erase("rope_theta");
  config.erase("rope_scaling");
  config["rope_parameters"] = {{"rope_theta", 500000.0}, {"rope_type", "default"}};
  ASSERT_TRUE(WriteFileAtomically(directory.File("config.json"), config.dump()).ok());
  const auto source = ModelSource::Open(directory.path());
  ASSERT_TRUE(source.ok()) << source.status();
  EXPECT_EQ((*source)->description().config.rope_theta, 500000.0);
  EXPECT_FALSE((*source)->description().config.rope_scaling.has_value());
}

TEST(HuggingFaceSourceTest, MissingFilesAreNamed) {
  const TemporaryDirectory directory;
  EXPECT_TRUE(absl::IsNotFound(ModelSource::Open(directory.File("nowhere")).status()));
  EXPECT_TRUE(absl::IsNotFound(ModelSource::Open(directory.path()).status()));
  ASSERT_TRUE(WriteTinyModel(directory.path(), {}).ok());
  std::filesystem::remove(directory.File("model.safetensors"));
  const absl::Status status = ModelSource::Open(directory.path()).status();
  EXPECT_TRUE(absl::IsNotFound(status));
  EXPECT_NE(status.message().find("neither model.safetensors nor model.safetensors.index.json"), absl::string_view::npos)
      << status;
}

TEST(HuggingFaceSourceTest, IndexCannotLeaveTheDirectoryOrDisagreeWithItsShards) {
  const TemporaryDirectory directory;
  TinyModelOptions options;
  options.num_shards = 2;
  const std::string model = directory.File("m");
  ASSERT_TRUE(WriteTinyModel(model, options).ok());
  const std::string index_file = model + "/model.safetensors.index.json";
  const nlohmann::json good = ReadJson(index_file);
  std::filesystem::copy_file(model + "/model-00001-of-00002.safetensors", directory.File("outside.safetensors"));
  const auto open_with = [&](const std::function<void(nlohmann::json*)>& change) {
    nlohmann::json index = good;
    change(&index["weight_map"]);
    EXPECT_TRUE(WriteFileAtomically(index_file, index.dump()).ok());
    return ModelSource::Open(model).status();
  };
  EXPECT_TRUE(open_with([](nlohmann::json*) {}).ok());
  for (const std::string& shard : {std::string("../outside.safetensors"), directory.File("outside.safetensors"),
                                   std::string(".."), std::string(""), std::string("a\0b", 3)}) {
    const absl::Status status = open_with([&](nlohmann::json* map) { (*map)["model.norm.weight"] = shard; });
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << shard << ": " << status;
    EXPECT_NE(status.message().find("is not the name of a file in the directory"), absl::string_view::npos) << status;
  }
  EXPECT_EQ(open_with([](nlohmann::json* map) { (*map)["ghost"] = "model-00001-of-00002.safetensors"; }).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(open_with([](nlohmann::json* map) { map->erase("model.norm.weight"); }).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::IsNotFound(open_with([](nlohmann::json* map) { (*map)["ghost"] = "none.safetensors"; })));
}

TEST(HuggingFaceSourceTest, TensorsOfTheFamilyAreAllThereAndNoOthers) {
  const TemporaryDirectory directory;
  ASSERT_TRUE(WriteTinyModel(directory.path(), {}).ok());
  const auto good = SafetensorsFile::Open(directory.File("model.safetensors"));
  ASSERT_TRUE(good.ok());
  std::map<std::string, std::vector<std::byte>> values;
  std::vector<SafetensorsOutput> outputs;
  for (const SafetensorsTensor& tensor : good->tensors()) {
    std::vector<std::byte>& bytes = values[tensor.name];
    bytes.resize(tensor.size_bytes);
    ASSERT_TRUE(good->file().ReadAt(tensor.begin_bytes, bytes).ok());
    outputs.push_back({tensor.name, tensor.dtype, tensor.shape, {bytes}});
  }
  const auto open_with = [&](const std::vector<SafetensorsOutput>& tensors) {
    EXPECT_TRUE(WriteSafetensors(directory.File("model.safetensors"), tensors, {}).ok());
    return ModelSource::Open(directory.path()).status();
  };
  EXPECT_TRUE(open_with(outputs).ok());
  const std::vector<std::byte> zeros(280 * 64 * 4);
  const auto with = [&](const SafetensorsOutput& tensor) {
    std::vector<SafetensorsOutput> more = outputs;
    more.push_back(tensor);
    return more;
  };
  EXPECT_TRUE(open_with(with({"lm_head.weight", "F32", {280, 64}, {zeros}})).ok()) << "a copy of the tied head";
  EXPECT_EQ(open_with(with({"model.layers.0.self_attn.q_proj.bias", "F32", {64}, {std::span(zeros).first(256)}})).code(),
            absl::StatusCode::kUnimplemented);
  std::vector<SafetensorsOutput> fewer(outputs.begin() + 1, outputs.end());
  const absl::Status missing = open_with(fewer);
  EXPECT_EQ(missing.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(missing.message().find(ToAbsl(outputs[0].name)), absl::string_view::npos) << missing;
  std::vector<SafetensorsOutput> integers = outputs;
  integers[0].dtype = "I32";
  EXPECT_EQ(open_with(integers).code(), absl::StatusCode::kUnimplemented);
}

TEST(HuggingFaceSourceTest, DigestFollowsContentNotPath) {
  const TemporaryDirectory directory;
  ASSERT_TRUE(WriteTinyModel(directory.File("a"), {}).ok());
  ASSERT_TRUE(WriteTinyModel(directory.File("b"), {}).ok());
  TinyModelOptions half;
  half.dtype = "F16";
  ASSERT_TRUE(WriteTinyModel(directory.File("c"), half).ok());
  const std::string a = Load(directory.File("a")).digest;
  EXPECT_EQ(a.size(), 64u);
  EXPECT_EQ(a, Load(directory.File("b")).digest);
  EXPECT_NE(a, Load(directory.File("c")).digest);
  nlohmann::json config = ReadJson(directory.File("b/config.json"));
  config["rope_theta"] = 10001.0;
  ASSERT_TRUE(WriteFileAtomically(directory.File("b/config.json"), config.dump()).ok());
  EXPECT_NE(a, Load(directory.File("b")).digest);
}

TEST(HuggingFaceSourceTest, FileCutAfterOpeningIsAnError) {
  const TemporaryDirectory directory;
  ASSERT_TRUE(WriteTinyModel(directory.path(), {}).ok());
  const auto source = ModelSource::Open(directory.path());
  ASSERT_TRUE(source.ok());
  std::filesystem::resize_file(directory.File("model.safetensors"), 20000);
  const WeightLayout layout = WeightLayout::Create((*source)->description().config, StorageFormat::kFp32);
  std::vector<std::byte> region(layout.total_bytes);
  const absl::Status status = (*source)->LoadWeights(layout, Device::kCpu, region, nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("cut short"), absl::string_view::npos) << status;
  region.pop_back();
  EXPECT_EQ((*source)->LoadWeights(layout, Device::kCpu, region, nullptr).code(), absl::StatusCode::kInvalidArgument);
}

TEST(ModelDescriptionTest, SurvivesSerialisation) {
  const TemporaryDirectory directory;
  TinyModelOptions options;
  options.use_llama3_rope_scaling = true;
  ASSERT_TRUE(WriteTinyModel(directory.path(), options).ok());
  const auto source = ModelSource::Open(directory.path());
  ASSERT_TRUE(source.ok());
  ModelDescription description = (*source)->description();
  description.config.rms_norm_epsilon = 9.999999747378752e-06F;
  description.format = StorageFormat::kFp8Block;
  description.config.has_qkv_bias = true;
  const std::string bytes = SerializeModelDescription(description);
  const auto parsed = ParseModelDescription(bytes);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(SerializeModelDescription(*parsed), bytes);
  EXPECT_EQ(parsed->config.name, description.config.name);
  EXPECT_EQ(parsed->format, StorageFormat::kFp8Block);
  EXPECT_TRUE(parsed->config.has_qkv_bias);
  EXPECT_FALSE(parsed->config.has_qk_norm);
  EXPECT_EQ(parsed->config.rms_norm_epsilon, description.config.rms_norm_epsilon);
  EXPECT_EQ(parsed->tokenizer.tokens, description.tokenizer.tokens);
  EXPECT_EQ(parsed->tokenizer.chat_template, description.tokenizer.chat_template);
  EXPECT_EQ(WeightLayout::Create(parsed->config, parsed->format).digest,
            WeightLayout::Create(description.config, parsed->format).digest);
  for (std::size_t size = 0; size < bytes.size(); size += size < 1000 ? 1 : 97) {
    EXPECT_FALSE(ParseModelDescription(bytes.substr(0, size)).ok()) << size << " of " << bytes.size();
  }
  for (std::size_t place = 0; place < 1200; ++place) {
    std::string damaged = bytes;
    damaged[place] = static_cast<char>(damaged[place] ^ 0x11);
    ParseModelDescription(damaged).status().IgnoreError();  // an error or not, never a crash
  }
}

// Weights without a file are the same bits in every process, at the scale that keeps activations of order one.
TEST(RandomModel, ShapesAreNamedAndMayHaveOtherPositions) {
  for (const auto& [shape, layers, positions] :
       {std::tuple{"smollm2-135m", 30, 8192}, std::tuple{"qwen2.5-1.5b", 28, 131072},
        std::tuple{"llama-3.1-8b:300000", 32, 300000}, std::tuple{"qwen3-8b:409600", 36, 409600}}) {
    const auto config = ConfigOfShape(shape);
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->num_layers, layers);
    EXPECT_EQ(config->max_positions, positions);
  }
  for (const char* shape : {"qwen3-8b:", "qwen3-8b:0", "qwen3-8b:x", "qwen3-8b:99999999999"}) {
    EXPECT_NE(ConfigOfShape(shape).status().message().find("must be 1 to 16777216"), std::string::npos) << shape;
  }
  EXPECT_NE(ConfigOfShape("gpt:5").status().message().find("no shape is named 'gpt'; there are smollm2-135m"), std::string::npos);
}

TEST(RandomModel, IsTheSameEveryTimeAndItsTokenizerReadsAnyText) {
  const auto source = ModelSource::Open("random:smollm2-135m"), again = ModelSource::Open("random:smollm2-135m");
  ASSERT_TRUE(source.ok() && again.ok()) << source.status();
  EXPECT_EQ((*source)->digest(), (*again)->digest());
  const ModelDescription& description = (*source)->description();
  const WeightLayout layout = WeightLayout::Create(description.config, StorageFormat::kFp32);
  std::vector<float> weights(layout.total_bytes / sizeof(float));
  const absl::Status loaded = (*source)->LoadWeights(layout, Device::kCpu, std::as_writable_bytes(std::span(weights)), nullptr);
  ASSERT_TRUE(loaded.ok()) << loaded;
  std::vector<float> other(weights.size());
  ASSERT_TRUE((*again)->LoadWeights(layout, Device::kCpu, std::as_writable_bytes(std::span(other)), nullptr).ok());
  EXPECT_TRUE(weights == other);
  double sum = 0, squares = 0;
  const TensorPlace& down = layout.layers[3].down;
  const std::size_t begin = down.begin_bytes / sizeof(float), count = down.size_bytes / sizeof(float);
  for (std::size_t i = begin; i < begin + count; ++i) {
    sum += weights[i];
    squares += double{weights[i]} * weights[i];
  }
  EXPECT_NEAR(sum / static_cast<double>(count), 0, 1e-4);
  EXPECT_NEAR(squares / static_cast<double>(count) * 1536, 1, 0.01);
  EXPECT_EQ(weights[layout.final_norm.begin_bytes / sizeof(float)], 1.0F);

  const auto tokenizer = Tokenizer::Create(description.tokenizer);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const std::string text = "any \xc3\xa9 text #300";
  const std::vector<TokenId> ids = (*tokenizer)->Encode(text, ControlTokens::kLiteral);
  EXPECT_EQ(ids.size(), text.size());
  EXPECT_EQ((*tokenizer)->Decode(ids, true), text);
  EXPECT_EQ((*tokenizer)->vocab_size(), 49152u);
  EXPECT_TRUE(ParseModelDescription(SerializeModelDescription(description)).ok());

  const absl::Status unknown = ModelSource::Open("random:gpt-9").status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(unknown.message()).find("llama-3.1-8b"), std::string::npos) << unknown;
}

}  // namespace
}  // namespace tandem

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
#include <vector>

#include <nlohmann/json.hpp>

#include "common/model/gguf.h"
#include "common/model/model_file.h"
#include "common/model/safetensors.h"
#include "common/model/weight_codecs.h"
#include "common/model/weight_encoders.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/tiny_model.h"

namespace tandem {
namespace {

using testing::GgufWriter;
using testing::TemporaryDirectory;

nlohmann::json ReadJson(const std::string& path) {
  std::ifstream file(path);
  return nlohmann::json::parse(file);
}

// A model loaded into memory of its own.
struct LoadedModel {
  ModelDescription description;
  std::string digest;
  WeightLayout layout;
  std::vector<std::byte> region;

  const float* Values(const TensorPlace& place) const {
    return reinterpret_cast<const float*>(region.data() + place.begin_bytes);
  }
};

LoadedModel Load(const std::string& path, StorageFormat format = StorageFormat::kFp32) {
  LoadedModel model;
  const auto source = ModelSource::Open(path);
  EXPECT_TRUE(source.ok()) << source.status();
  if (!source.ok()) return model;
  model.description = (*source)->description();
  model.digest = (*source)->digest();
  model.layout = WeightLayout::Create(model.description.config, format);
  model.region.resize(model.layout.total_bytes);
  std::uint64_t last_progress = 0;
  const absl::Status status = (*source)->LoadWeights(model.layout, Device::kCpu, model.region, [&](std::uint64_t bytes) {
    EXPECT_GE(bytes, last_progress);
    last_progress = bytes;
  });
  EXPECT_TRUE(status.ok()) << status;
  std::uint64_t tensor_bytes = 0;
  for (const TensorPlace* place : model.layout.Tensors()) {
    if (place->name != "nested_map") tensor_bytes += place->size_bytes;  // which is not the model's
  }
  EXPECT_EQ(last_progress, tensor_bytes);
  return model;
}

// The values of a tensor in the files of a directory, as fp32.
std::vector<float> ValuesInFiles(const std::string& directory, const std::string& name) {
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    if (entry.path().extension() != ".safetensors") continue;
    const auto file = SafetensorsFile::Open(entry.path());
    EXPECT_TRUE(file.ok()) << file.status();
    const SafetensorsTensor* tensor = file->Find(name);
    if (tensor == nullptr) continue;
    std::vector<std::byte> bytes(tensor->size_bytes);
    EXPECT_TRUE(file->file().ReadAt(tensor->begin_bytes, bytes).ok());
    const WeightCodec codec = *ParseCodec(tensor->dtype);
    std::vector<float> values(bytes.size() / BlockOf(codec).size_bytes);
    Decode(codec, bytes, values);
    return values;
  }
  ADD_FAILURE() << "no tensor " << name << " in " << directory;
  return {};
}

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
  description.format = StorageFormat::kNf4;
  description.config.has_qkv_bias = true;
  const std::string bytes = SerializeModelDescription(description);
  const auto parsed = ParseModelDescription(bytes);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(SerializeModelDescription(*parsed), bytes);
  EXPECT_EQ(parsed->config.name, description.config.name);
  EXPECT_EQ(parsed->format, StorageFormat::kNf4);
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

// The rows of a head in the order in which llama.cpp's converter writes them: first of each half, second of each half, ...
std::string Interleave(const std::string& rows, std::size_t row_bytes, int head_dim) {
  std::string interleaved;
  const auto dim = static_cast<std::size_t>(head_dim);
  for (std::size_t head = 0; head * dim * row_bytes < rows.size(); ++head) {
    for (std::size_t i = 0; i < dim; ++i) {
      const std::size_t row = head * dim + i / 2 + (i % 2) * (dim / 2);
      interleaved += rows.substr(row * row_bytes, row_bytes);
    }
  }
  return interleaved;
}

// The tiny model of `directory` as a GGUF file of F32 tensors; `rope_divisors` may be empty.
std::string AsGguf(const std::string& directory, const ModelDescription& description, const std::vector<float>& rope_divisors) {
  const ModelConfig& config = description.config;
  GgufWriter writer;
  const auto integer = [](int value) { return static_cast<std::uint32_t>(value); };
  const std::string& prefix = config.family;
  writer.AddString("general.architecture", config.family);
  writer.AddUint32(prefix + ".block_count", integer(config.num_layers));
  writer.AddUint32(prefix + ".context_length", integer(config.max_positions));
  writer.AddUint32(prefix + ".embedding_length", integer(config.hidden_size));
  writer.AddUint32(prefix + ".feed_forward_length", integer(config.intermediate_size));
  writer.AddUint32(prefix + ".attention.head_count", integer(config.num_heads));
  writer.AddUint32(prefix + ".attention.head_count_kv", integer(config.num_kv_heads));
  writer.AddFloat32(prefix + ".attention.layer_norm_rms_epsilon", config.rms_norm_epsilon);
  writer.AddFloat32(prefix + ".rope.freq_base", static_cast<float>(config.rope_theta));
  for (const char* key : {"rope.dimension_count", "attention.key_length", "attention.value_length"}) {
    writer.AddUint32(prefix + "." + key, integer(config.head_dim));
  }
  writer.AddString("tokenizer.ggml.model", "gpt2");
  writer.AddString("tokenizer.ggml.pre", "smollm");
  writer.AddStrings("tokenizer.ggml.tokens", description.tokenizer.tokens);
  std::vector<std::int32_t> types(description.tokenizer.tokens.size(), 1);
  for (const AddedToken& token : description.tokenizer.added_tokens) types[token.id] = 3;
  writer.AddInt32s("tokenizer.ggml.token_type", types);
  std::vector<std::string> merges;
  for (const auto& [left, right] : description.tokenizer.merges) merges.push_back(absl::StrCat(left, " ", right));
  writer.AddStrings("tokenizer.ggml.merges", merges);
  writer.AddUint32("tokenizer.ggml.eos_token_id", config.end_token_ids.front());

  const auto add = [&](const std::string& gguf_name, const std::string& name, std::uint64_t rows, bool is_interleaved) {
    const std::vector<float> values = ValuesInFiles(directory, name);
    std::string bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
    const std::uint64_t columns = values.size() / rows;
    if (is_interleaved) bytes = Interleave(bytes, columns * sizeof(float), config.head_dim);
    writer.AddTensor(gguf_name, rows == 1 ? std::vector<std::uint64_t>{columns} : std::vector<std::uint64_t>{columns, rows}, 0,
                     bytes);
  };
  const bool is_llama = config.family == "llama";  // whose converter interleaves the rows of a head
  const auto d = static_cast<std::uint64_t>(config.hidden_size);
  const auto f = static_cast<std::uint64_t>(config.intermediate_size);
  const auto q = static_cast<std::uint64_t>(config.q_size());
  const auto kv = static_cast<std::uint64_t>(config.kv_size());
  const auto vocab = static_cast<std::uint64_t>(config.vocab_size);
  add("token_embd.weight", "model.embed_tokens.weight", vocab, false);
  for (int i = 0; i < config.num_layers; ++i) {
    const std::string to = absl::StrCat("blk.", i, ".");
    const std::string from = absl::StrCat("model.layers.", i, ".");
    add(to + "attn_norm.weight", from + "input_layernorm.weight", 1, false);
    add(to + "attn_q.weight", from + "self_attn.q_proj.weight", q, is_llama);
    add(to + "attn_k.weight", from + "self_attn.k_proj.weight", kv, is_llama);
    add(to + "attn_v.weight", from + "self_attn.v_proj.weight", kv, false);
    for (const char* part : {"q", "k", "v"}) {
      if (config.has_qkv_bias) add(to + "attn_" + part + ".bias", from + "self_attn." + part + "_proj.bias", 1, false);
    }
    for (const char* part : {"q", "k"}) {
      if (config.has_qk_norm) add(to + "attn_" + part + "_norm.weight", from + "self_attn." + part + "_norm.weight", 1, false);
    }
    add(to + "attn_output.weight", from + "self_attn.o_proj.weight", d, false);
    add(to + "ffn_norm.weight", from + "post_attention_layernorm.weight", 1, false);
    add(to + "ffn_gate.weight", from + "mlp.gate_proj.weight", f, false);
    add(to + "ffn_up.weight", from + "mlp.up_proj.weight", f, false);
    add(to + "ffn_down.weight", from + "mlp.down_proj.weight", d, false);
  }
  add("output_norm.weight", "model.norm.weight", 1, false);
  if (!config.is_embedding_tied) add("output.weight", "lm_head.weight", vocab, false);
  if (!rope_divisors.empty()) {
    writer.AddTensor("rope_freqs.weight", {rope_divisors.size()}, 0,
                     std::string(reinterpret_cast<const char*>(rope_divisors.data()), rope_divisors.size() * sizeof(float)));
  }
  return writer.Finish();
}

TEST(GgufSourceTest, HoldsTheModelThatItWasConvertedFrom) {
  for (const bool tie_embeddings : {true, false}) {
    const TemporaryDirectory directory;
    TinyModelOptions options;
    options.tie_embeddings = tie_embeddings;
    ASSERT_TRUE(WriteTinyModel(directory.path(), options).ok());
    const LoadedModel original = Load(directory.path());
    ASSERT_TRUE(WriteFileAtomically(directory.File("tiny.gguf"), AsGguf(directory.path(), original.description, {})).ok());
    const LoadedModel converted = Load(directory.File("tiny.gguf"));
    EXPECT_EQ(converted.description.config.name, "tiny");
    EXPECT_EQ(converted.description.config.is_embedding_tied, tie_embeddings);
    EXPECT_EQ(converted.description.config.end_token_ids, original.description.config.end_token_ids);
    EXPECT_EQ(converted.layout.digest, original.layout.digest);
    EXPECT_EQ(converted.region, original.region);
  }
}

TEST(GgufSourceTest, BiasAndHeadNormsOfTheFamiliesAreRead) {
  for (const char* family : {"qwen2", "qwen3"}) {
    SCOPED_TRACE(family);
    const TemporaryDirectory directory;
    const std::string golden = std::string(TANDEM_GOLDEN_DIR "/families/") + family;
    const LoadedModel original = Load(golden);
    EXPECT_EQ(original.description.config.family, family);
    EXPECT_EQ(original.description.config.has_qkv_bias, family == std::string("qwen2"));
    EXPECT_EQ(original.description.config.has_qk_norm, family == std::string("qwen3"));
    const std::string gguf = AsGguf(golden, original.description, {});
    ASSERT_TRUE(WriteFileAtomically(directory.File("tiny.gguf"), gguf).ok());
    const LoadedModel converted = Load(directory.File("tiny.gguf"));
    EXPECT_EQ(converted.layout.digest, original.layout.digest);
    EXPECT_EQ(converted.region, original.region);

    // The same tensors under Llama's name have no place there.
    std::string renamed = gguf;
    for (std::size_t at = renamed.find(family); at != std::string::npos; at = renamed.find(family))
      renamed.replace(at, 5, "llama");
    ASSERT_TRUE(WriteFileAtomically(directory.File("llama.gguf"), renamed).ok());
    EXPECT_EQ(ModelSource::Open(directory.File("llama.gguf")).status().code(), absl::StatusCode::kUnimplemented);
  }
}

TEST(GgufSourceTest, Llama3ScalingIsReadFromItsDivisors) {
  const TemporaryDirectory directory;
  ASSERT_TRUE(WriteTinyModel(directory.path(), {}).ok());
  const auto original = ModelSource::Open(directory.path());
  ASSERT_TRUE(original.ok());
  // Factor 32 (Llama 3.2), theta 10000, head of 16, by the formula in the report: wave lengths 2 pi 10000^(i / 8)
  // are 6.3, 19.9, 62.8, 199, 628 (below 8192 / 4: as they are), 1987 (as well), 6283 (between), 19869 (above 8192: divided by
  // 32).
  const double smooth = (8192 / (2 * 3.14159265358979 * 1000) - 1) / 3;
  std::vector<float> divisors(8, 1.0F);
  divisors[6] = static_cast<float>(1 / ((1 - smooth) / 32 + smooth));
  divisors[7] = 32.0F;
  const std::string path = directory.File("tiny.gguf");
  ASSERT_TRUE(WriteFileAtomically(path, AsGguf(directory.path(), (*original)->description(), divisors)).ok());
  const auto scaled = ModelSource::Open(path);
  ASSERT_TRUE(scaled.ok()) << scaled.status();
  ASSERT_TRUE((*scaled)->description().config.rope_scaling.has_value());
  EXPECT_EQ((*scaled)->description().config.rope_scaling->factor, 32.0);
  EXPECT_EQ((*scaled)->description().config.rope_scaling->original_max_positions, 8192);
  divisors[2] = 1.5F;
  ASSERT_TRUE(WriteFileAtomically(path, AsGguf(directory.path(), (*original)->description(), divisors)).ok());
  EXPECT_EQ(ModelSource::Open(path).status().code(), absl::StatusCode::kUnimplemented);
}

TEST(GgufSourceTest, OtherArchitecturesAreRefusedByName) {
  const TemporaryDirectory directory;
  GgufWriter writer;
  writer.AddString("general.architecture", "mamba");
  ASSERT_TRUE(WriteFileAtomically(directory.File("m.gguf"), writer.Finish()).ok());
  const absl::Status status = ModelSource::Open(directory.File("m.gguf")).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_NE(status.message().find("'mamba'"), absl::string_view::npos) << status;
}

// The real model, against values that the Python package `gguf` decoded.
class SmolLm2Test : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = std::string(TANDEM_MODELS_DIR) + "/SmolLM2-135M-Instruct.Q4_1.gguf";
    if (!std::filesystem::exists(path_)) GTEST_SKIP() << "no " << path_ << ": run deploy/install_dependencies.sh";
    golden_ = ReadJson(TANDEM_GOLDEN_DIR "/smollm2/dequant.json");
  }

  std::string path_;
  nlohmann::json golden_;
};

TEST_F(SmolLm2Test, MetadataAndTensorTableAreTheGoldenOnes) {
  const auto gguf = GgufFile::Open(path_);
  ASSERT_TRUE(gguf.ok()) << gguf.status();
  for (const auto& [key, value] : golden_.at("metadata").items()) {
    SCOPED_TRACE(key);
    if (value.is_boolean()) {
      EXPECT_EQ(*gguf->GetBool(key), value.get<bool>());
    } else if (value.is_number_integer()) {
      EXPECT_EQ(*gguf->GetInteger(key), value.get<std::int64_t>());
    } else if (value.is_number_float()) {
      EXPECT_EQ(*gguf->GetNumber(key), value.get<double>());
    } else if (value.is_string()) {
      EXPECT_EQ(*gguf->GetString(key), value.get<std::string>());
    } else {
      EXPECT_EQ(*gguf->GetStrings(key), value.get<std::vector<std::string>>());
    }
  }
  std::map<std::string, int> counts;
  for (const GgufTensor& tensor : gguf->tensors()) ++counts[tensor.type_name];
  EXPECT_EQ(counts, (golden_.at("tensor_counts").get<std::map<std::string, int>>()));
  for (const nlohmann::json& golden : golden_.at("tensors_outside_blocks_and_of_block_0")) {
    const GgufTensor* tensor = gguf->Find(golden.at("name"));
    ASSERT_NE(tensor, nullptr) << golden;
    EXPECT_EQ(tensor->dimensions, golden.at("ggml_dims").get<std::vector<std::uint64_t>>());
    EXPECT_EQ(tensor->type_name, golden.at("type").get<std::string>());
    EXPECT_EQ(tensor->size_bytes, golden.at("bytes").get<std::uint64_t>());
    EXPECT_EQ(tensor->begin_bytes, golden.at("file_offset").get<std::uint64_t>());
  }
}

TEST_F(SmolLm2Test, LoadedValuesAreTheGoldenOnes) {
  const LoadedModel model = Load(path_);
  ASSERT_FALSE(model.region.empty());
  const ModelConfig& config = model.description.config;
  EXPECT_EQ(config.num_layers, 30);
  EXPECT_EQ(config.rope_theta, 100000.0);
  EXPECT_EQ(config.vocab_size, 49152);
  EXPECT_TRUE(config.is_embedding_tied);
  EXPECT_EQ(config.end_token_ids, (std::vector<std::uint32_t>{2}));
  const std::size_t d = 576;
  const std::map<std::string, const float*> begins = {
      {"token_embd.weight", model.Values(model.layout.embedding)},
      {"blk.0.attn_q.weight", model.Values(model.layout.layers[0].qkv)},
      {"blk.15.ffn_down.weight", model.Values(model.layout.layers[15].down)},
      {"blk.29.attn_k.weight", model.Values(model.layout.layers[29].qkv) + static_cast<std::size_t>(config.q_size()) * d},
      {"output_norm.weight", model.Values(model.layout.final_norm)}};
  // Hugging Face's row for a row of the file: the file interleaves the halves of a head.
  const auto layout_row = [&](const std::string& name, std::size_t file_row) {
    if (name.find("attn_q") == std::string::npos && name.find("attn_k") == std::string::npos) return file_row;
    const std::size_t row = file_row % 64;
    return file_row - row + row / 2 + (row % 2) * 32;
  };
  const auto expect_near = [](double value, double expected, const std::string& what) {
    EXPECT_NEAR(value, expected, 1e-9 * std::max(1.0, std::abs(expected))) << what;
  };
  for (const nlohmann::json& golden : golden_.at("tensors")) {
    const std::string name = golden.at("name");
    SCOPED_TRACE(name);
    const float* const values = begins.at(name);
    const std::size_t rows = golden.at("rows");
    const std::size_t columns = golden.at("columns");
    const auto first = golden.at("first_32").get<std::vector<double>>();
    for (std::size_t i = 0; i < first.size(); ++i)
      expect_near(static_cast<double>(values[i]), first[i], absl::StrCat("value ", i));
    const auto last = golden.at("last_8").get<std::vector<double>>();
    const float* const last_values = values + rows * columns - last.size();
    for (std::size_t i = 0; i < last.size(); ++i)
      expect_near(static_cast<double>(last_values[i]), last[i], absl::StrCat("last ", i));
    double sum = 0;
    double sum_of_squares = 0;
    double least = values[0];
    double most = values[0];
    for (std::size_t i = 0; i < rows * columns; ++i) {
      const auto value = static_cast<double>(values[i]);
      sum += value;
      sum_of_squares += value * value;
      least = std::min(least, value);
      most = std::max(most, value);
    }
    expect_near(sum, golden.at("sum"), "sum");
    expect_near(sum_of_squares, golden.at("sum_of_squares"), "sum of squares");
    expect_near(least, golden.at("min"), "min");
    expect_near(most, golden.at("max"), "max");
    for (const auto& [row, expected] : golden.at("row_sums").items()) {
      double row_sum = 0;
      const float* const row_values = values + layout_row(name, std::stoul(row)) * columns;
      for (std::size_t i = 0; i < columns; ++i) row_sum += static_cast<double>(row_values[i]);
      expect_near(row_sum, expected, "sum of row " + row);
    }
  }
  for (const nlohmann::json& golden : golden_.at("qk_row_order")) {
    const auto expected = golden.at("hf_row_1_first_8").get<std::vector<double>>();
    const float* const row = begins.at(golden.at("name")) + d;
    for (std::size_t i = 0; i < expected.size(); ++i)
      expect_near(static_cast<double>(row[i]), expected[i], absl::StrCat("row 1 value ", i));
  }
}

// Weights without a file are the same bits in every process, at the scale that keeps activations of order one.
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

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "common/base/random.h"
#include "common/model/gguf.h"
#include "common/model/merged_model.h"
#include "common/model/model_file.h"
#include "common/model/model_source.h"
#include "common/model/weight_codecs.h"
#include "tests/common/model/loaded_model.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/tiny_model.h"

namespace tandem {
namespace {

using testing::GgufWriter;
using testing::TemporaryDirectory;

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

// A quantised type of GGML, and where a block of it has its fp16 numbers.
struct BlockType {
  std::uint32_t id;
  WeightCodec codec;
  std::vector<std::size_t> halves;
};
const std::array<BlockType, 8>& BlockTypes() {
  static const std::array<BlockType, 8> types = {{{2, WeightCodec::kQ4_0, {0}},
                                                  {3, WeightCodec::kQ4_1, {0, 2}},
                                                  {6, WeightCodec::kQ5_0, {0}},
                                                  {7, WeightCodec::kQ5_1, {0, 2}},
                                                  {8, WeightCodec::kQ8_0, {0}},
                                                  {12, WeightCodec::kQ4_K, {0, 2}},
                                                  {13, WeightCodec::kQ5_K, {0, 2}},
                                                  {14, WeightCodec::kQ6_K, {208}}}};
  return types;
}

// A tensor's blocks, row after row, in Hugging Face's order of rows.
struct CodedTensor {
  std::uint32_t type_id;
  std::string bytes;
};

// Blocks of random codes, with fp16 numbers from 2^-9 to 2^-8.
CodedTensor RandomBlocks(const BlockType& type, std::size_t num_values, std::uint64_t seed) {
  const CodecBlock block = BlockOf(type.codec);
  CodedTensor tensor{type.id, std::string(num_values / block.num_values * block.size_bytes, '\0')};
  for (std::size_t i = 0; i < tensor.bytes.size(); ++i) tensor.bytes[i] = static_cast<char>(RandomBits(seed, i));
  for (std::size_t begin = 0; begin < tensor.bytes.size(); begin += block.size_bytes) {
    for (const std::size_t half : type.halves) {
      char& high_byte = tensor.bytes[begin + half + 1];
      high_byte = static_cast<char>(0x18 | (high_byte & 0x03));
    }
  }
  return tensor;
}

// The tiny model of `directory` as a GGUF file of F32 tensors, but for those that `coded` has by their Hugging Face name;
// `rope_divisors` may be empty.
std::string AsGguf(const std::string& directory, const ModelDescription& description, const std::vector<float>& rope_divisors,
                   const std::map<std::string, CodedTensor>& coded = {}) {
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
    std::uint32_t type_id = 0;
    if (const auto found = coded.find(name); found != coded.end()) {
      type_id = found->second.type_id;
      bytes = found->second.bytes;
    }
    if (is_interleaved) bytes = Interleave(bytes, bytes.size() / rows, config.head_dim);
    writer.AddTensor(gguf_name, rows == 1 ? std::vector<std::uint64_t>{columns} : std::vector<std::uint64_t>{columns, rows},
                     type_id, bytes);
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

// With an adapter of zeros: the directory holds the GGUF file's weights in Hugging Face's order of rows, and its tokenizer.
TEST(GgufSourceTest, MergedModelOfAGgufFileIsADirectoryOfTheSameModel) {
  const TemporaryDirectory directory, gguf_directory, merged;
  TinyModelOptions options;
  options.dtype = "BF16";
  ASSERT_TRUE(WriteTinyModel(directory.path(), options).ok());
  const LoadedModel original = Load(directory.path());
  const std::string path = gguf_directory.File("tiny.gguf");
  ASSERT_TRUE(WriteFileAtomically(path, AsGguf(directory.path(), original.description, {})).ok());
  const auto source = ModelSource::Open(path);
  ASSERT_TRUE(source.ok()) << source.status();
  const AdapterLayout layout = AdapterLayout::Create(original.description.config, 2, {LinearKind::kQProj});
  const std::vector<std::byte> zeros(layout.total_bytes);
  const absl::Status status =
      StreamMergedModel(**source, path, layout, 1, zeros, {}, [&](const std::string& file, std::string_view piece, bool) {
        std::ofstream(merged.File(file), std::ios::binary | std::ios::app) << piece;
        return true;
      });
  ASSERT_TRUE(status.ok()) << status;
  const LoadedModel loaded = Load(merged.path());
  EXPECT_EQ(loaded.region, original.region);
  EXPECT_EQ(SerializeTokenizerSpec(loaded.description.tokenizer), SerializeTokenizerSpec((*source)->description().tokenizer));
}

// Matrix n of the model (q, k, v, o, gate, up, down of each layer, embedding, head) is of types[(n + first) % types.size()].
void ExpectBlocksInTheirRows(const std::string& directory, const ModelDescription& description, std::span<const BlockType> types,
                             std::size_t first) {
  const auto config = description.config;
  const auto d = static_cast<std::size_t>(config.hidden_size), f = static_cast<std::size_t>(config.intermediate_size),
             q = static_cast<std::size_t>(config.q_size()), kv = static_cast<std::size_t>(config.kv_size()),
             vocab = static_cast<std::size_t>(config.vocab_size);
  std::map<std::string, CodedTensor> coded;
  std::map<std::string, std::vector<float>> values;
  const auto add = [&](const std::string& name, std::size_t rows, std::size_t columns) {
    const BlockType& type = types[(coded.size() + first) % types.size()];
    CodedTensor tensor = RandomBlocks(type, rows * columns, coded.size());
    values[name].resize(rows * columns);
    Decode(type.codec, std::as_bytes(std::span(tensor.bytes)), values[name]);
    coded[name] = std::move(tensor);
  };
  const auto name_of = [](int layer, const char* part) {
    return absl::StrCat("model.layers.", layer, ".", part, "_proj.weight");
  };
  for (int i = 0; i < config.num_layers; ++i) {
    add(name_of(i, "self_attn.q"), q, d);
    add(name_of(i, "self_attn.k"), kv, d);
    add(name_of(i, "self_attn.v"), kv, d);
    add(name_of(i, "self_attn.o"), d, q);
    add(name_of(i, "mlp.gate"), f, d);
    add(name_of(i, "mlp.up"), f, d);
    add(name_of(i, "mlp.down"), d, f);
  }
  add("model.embed_tokens.weight", vocab, d);
  add("lm_head.weight", vocab, d);

  const TemporaryDirectory converted_directory;
  const std::string path = converted_directory.File("blocks.gguf");
  ASSERT_TRUE(WriteFileAtomically(path, AsGguf(directory, description, {}, coded)).ok());
  const LoadedModel loaded = Load(path);
  ASSERT_FALSE(loaded.region.empty());
  const auto expect = [&](const TensorPlace& place, const std::vector<std::string>& names) {
    const float* begin = loaded.Values(place);
    for (const std::string& name : names) {
      const std::vector<float>& expected = values.at(name);
      for (std::size_t i = 0; i < expected.size(); ++i) ASSERT_EQ(begin[i], expected[i]) << name << ", value " << i;
      begin += expected.size();
    }
  };
  for (int i = 0; i < config.num_layers; ++i) {
    const LayerPlaces& places = loaded.layout.layers[static_cast<std::size_t>(i)];
    expect(places.qkv, {name_of(i, "self_attn.q"), name_of(i, "self_attn.k"), name_of(i, "self_attn.v")});
    expect(places.o, {name_of(i, "self_attn.o")});
    expect(places.gate_up, {name_of(i, "mlp.gate"), name_of(i, "mlp.up")});
    expect(places.down, {name_of(i, "mlp.down")});
  }
  expect(loaded.layout.embedding, {"model.embed_tokens.weight"});
  expect(loaded.layout.head, {"lm_head.weight"});
}

TEST(GgufSourceTest, BlocksOfEachTypeComeToTheirRowsInEachMatrix) {
  const TemporaryDirectory directory;
  ASSERT_TRUE(WriteTinyModel(directory.path(), {.num_layers = 1,
                                                .hidden_size = 256,
                                                .intermediate_size = 512,
                                                .num_heads = 4,
                                                .num_kv_heads = 2,
                                                .head_dim = 64,
                                                .tie_embeddings = false})
                  .ok());
  const auto source = ModelSource::Open(directory.path());
  ASSERT_TRUE(source.ok()) << source.status();
  for (std::size_t first = 0; first < BlockTypes().size(); ++first) {
    SCOPED_TRACE(CodecName(BlockTypes()[first].codec));
    ExpectBlocksInTheirRows(directory.path(), (*source)->description(), BlockTypes(), first);
  }
}

TEST(GgufSourceTest, SuperBlocksComeToTheirRowsInEachStripe) {
  const TemporaryDirectory directory;
  // q is read in two stripes (of 4 MiB at most), a row is five blocks of 256.
  ASSERT_TRUE(WriteTinyModel(directory.path(), {.num_layers = 1,
                                                .hidden_size = 1280,
                                                .intermediate_size = 256,
                                                .num_heads = 80,
                                                .num_kv_heads = 16,
                                                .head_dim = 16,
                                                .tie_embeddings = false})
                  .ok());
  const auto source = ModelSource::Open(directory.path());
  ASSERT_TRUE(source.ok()) << source.status();
  for (const BlockType& type : BlockTypes()) {
    if (BlockOf(type.codec).num_values != 256) continue;
    SCOPED_TRACE(CodecName(type.codec));
    ExpectBlocksInTheirRows(directory.path(), (*source)->description(), std::span(&type, 1), 0);
  }
}

TEST(GgufSourceTest, RowsThatAreNoWholeBlocksAreRefusedByTensorWidthAndType) {
  const TemporaryDirectory directory;
  const std::string path = directory.File("row.gguf");
  for (const BlockType& type : BlockTypes()) {
    const CodecBlock block = BlockOf(type.codec);
    const std::string name = CodecName(type.codec);
    const auto open = [&](std::uint64_t columns) {
      GgufWriter writer;
      writer.AddTensor("blk.0.attn_q.weight", {columns, 6}, type.id, std::string(12 * block.size_bytes, '\0'));
      EXPECT_TRUE(WriteFileAtomically(path, writer.Finish()).ok());
      return GgufFile::Open(path);
    };
    const auto whole = open(2 * block.num_values);
    ASSERT_TRUE(whole.ok()) << whole.status();
    EXPECT_EQ(whole->tensors()[0].type_name, name);
    EXPECT_EQ(whole->tensors()[0].size_bytes, 12 * block.size_bytes);
    // Six rows of one and a half blocks are nine blocks, but a row cannot begin within one.
    const absl::Status status = open(block.num_values * 3 / 2).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    for (const std::string& part :
         {path, std::string("tensor 'blk.0.attn_q.weight'"),
          absl::StrCat(block.num_values * 3 / 2, " values, ", block.num_values, " a block of ", name)}) {
      EXPECT_NE(status.message().find(part), absl::string_view::npos) << part << " in " << status;
    }
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

}  // namespace
}  // namespace tandem

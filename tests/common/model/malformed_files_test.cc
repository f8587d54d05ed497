// Files that lie about themselves: each is refused with a reason, none costs more memory than its own size justifies.
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "common/base/allocation_budget.h"
#include "common/base/random.h"
#include "common/model/bounded_json.h"
#include "common/model/gguf.h"
#include "common/model/model_source.h"
#include "common/model/peft_adapter.h"
#include "common/model/safetensors.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/tiny_model.h"

namespace tandem {
namespace {

using testing::GgufWriter;
using testing::TemporaryDirectory;

constexpr std::size_t kUnbounded = SIZE_MAX;

std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void WriteAll(const std::string& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

absl::Status OpenAny(const std::string& path) {
  return path.ends_with(".gguf") ? GgufFile::Open(path).status() : SafetensorsFile::Open(path).status();
}

// CASES C46
TEST(MalformedFilesTest, EveryFileGetsItsVerdict) {
  const std::string folder = TANDEM_GOLDEN_DIR "/malformed/";
  const nlohmann::json verdicts = nlohmann::json::parse(ReadAll(folder + "verdicts.json"));
  ASSERT_EQ(verdicts.size(), 34u);
  int num_accepted = 0;
  for (const auto& [name, verdict] : verdicts.items()) {
    SCOPED_TRACE(name);
    const std::string path = folder + name;
    const AllocationBudget budget(kUnbounded, kUnbounded);
    const absl::Status status = OpenAny(path);
    EXPECT_LE(budget.largest_bytes(), 8192 + 4 * std::filesystem::file_size(path));
    if (verdict == "accept") {
      EXPECT_TRUE(status.ok()) << status;
      ++num_accepted;
      continue;
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    const std::string message(status.message());
    EXPECT_NE(message.find(path), std::string::npos) << message;
    // A repeated JSON key is found before anyone knows that it names a tensor.
    const std::string reason = verdict == "tensor named twice" ? "has the key 'w' twice" : verdict.get<std::string>();
    EXPECT_NE(message.find(reason), std::string::npos) << message;
  }
  EXPECT_EQ(num_accepted, 6);
}

// CASES C46
TEST(MalformedFilesTest, MessagesNameTensorValueAndLimit) {
  const auto message = [](const std::string& name) {
    return std::string(OpenAny(TANDEM_GOLDEN_DIR "/malformed/" + name).message());
  };
  EXPECT_NE(message("end_past_file.safetensors").find("tensor 'w': data past the end of the file: ends at "), std::string::npos);
  EXPECT_NE(message("offset_not_aligned.gguf").find("tensor 'w': offset is not a multiple of the alignment: 8 and 32"),
            std::string::npos);
  EXPECT_NE(message("tensor_count_huge.gguf").find("1152921504606846976 in 136 bytes"), std::string::npos)
      << message("tensor_count_huge.gguf");
}

// CASES C46
TEST(MalformedFilesTest, GoodFilesGiveTheirTensors) {
  const auto safetensors = SafetensorsFile::Open(TANDEM_GOLDEN_DIR "/malformed/good.safetensors");
  ASSERT_TRUE(safetensors.ok()) << safetensors.status();
  const SafetensorsTensor* tensor = safetensors->Find("w");
  ASSERT_NE(tensor, nullptr);
  EXPECT_EQ(tensor->shape, (std::vector<std::uint64_t>{2, 2}));
  EXPECT_EQ(tensor->begin_bytes + tensor->size_bytes, safetensors->file().size_bytes());
  const auto scalar = SafetensorsFile::Open(TANDEM_GOLDEN_DIR "/malformed/good_scalar.safetensors");
  ASSERT_TRUE(scalar.ok());
  EXPECT_TRUE(scalar->tensors()[0].shape.empty());
  EXPECT_EQ(scalar->tensors()[0].size_bytes, 4u);
  const auto gguf = GgufFile::Open(TANDEM_GOLDEN_DIR "/malformed/good_alignment_64.gguf");
  ASSERT_TRUE(gguf.ok()) << gguf.status();
  EXPECT_EQ(gguf->Find("w")->begin_bytes % 64, 0u);
  EXPECT_EQ(gguf->Find("w")->type_name, "F32");
}

TEST(MalformedFilesTest, JsonIsBoundedInDepthAndKeysAreUnique) {
  EXPECT_TRUE(ParseBoundedJson(R"({"a": [1, {"a": 2}]})", "f", "it").ok());
  EXPECT_TRUE(ParseBoundedJson(std::string(64, '[') + std::string(64, ']'), "f", "it").ok());
  EXPECT_EQ(ParseBoundedJson(std::string(65, '[') + std::string(65, ']'), "f", "it").status().message(),
            "f: it is nested deeper than 64 levels at byte 64");
  EXPECT_FALSE(ParseBoundedJson(std::string(1 << 20, '['), "f", "it").ok());
  EXPECT_TRUE(ParseBoundedJson(R"(["\"[[[", "]"])", "f", "it").ok());
  for (const char* text :
       {R"({"a": 1, "a": 1})", R"({"": 1, "": 1})", R"([{"b": {"a": 1, "a": 1}}])", "", "{", "{} {}", "\"\xff\""}) {
    EXPECT_EQ(ParseBoundedJson(text, "f", "it").status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

TEST(MalformedFilesTest, GgufMetadataIsBoundedByTheFile) {
  const TemporaryDirectory directory;
  const std::string path = directory.File("m.gguf");
  const auto open = [&](const std::string& bytes) {
    WriteAll(path, bytes);
    return GgufFile::Open(path).status();
  };
  GgufWriter good;
  good.AddStrings("k", {"a", "b"});
  EXPECT_TRUE(open(good.Finish()).ok());

  std::string huge_array = good.Finish();
  const std::size_t count_at = 24 + 8 + 1 + 4 + 4;  // header, key "k", type, element type
  huge_array.replace(count_at, 8, std::string("\0\0\0\0\0\0\0\x40", 8));
  const AllocationBudget budget(kUnbounded, kUnbounded);
  EXPECT_NE(open(huge_array).message().find("array past the end of the file"), absl::string_view::npos);
  EXPECT_LE(budget.largest_bytes(), 8192u + 4 * huge_array.size());

  std::string nested = good.Finish();
  nested.replace(count_at - 4, 4, std::string("\x09\0\0\0", 4));
  EXPECT_NE(open(nested).message().find("array of arrays"), absl::string_view::npos);

  std::string unknown_type = good.Finish();
  unknown_type.replace(count_at - 8, 4, std::string("\x0d\0\0\0", 4));
  EXPECT_NE(open(unknown_type).message().find("unknown value type 13"), absl::string_view::npos);

  GgufWriter twice;
  twice.AddUint32("k", 1);
  twice.AddUint32("k", 1);
  EXPECT_NE(open(twice.Finish()).message().find("'k' appears twice"), absl::string_view::npos);

  GgufWriter same_tensor;
  same_tensor.AddTensor("w", {8}, 0, std::string(32, '\0'));
  same_tensor.AddTensor("w", {8}, 0, std::string(32, '\0'));
  EXPECT_NE(open(same_tensor.Finish()).message().find("tensor named twice"), absl::string_view::npos);
}

TEST(MalformedFilesTest, GgufValuesHaveTypes) {
  const TemporaryDirectory directory;
  GgufWriter writer;
  writer.AddUint32("u", 7);
  writer.AddFloat32("f", 0.5F);
  writer.AddBool("b", true);
  writer.AddString("s", "text");
  writer.AddStrings("ss", {"x", ""});
  writer.AddInt32s("is", {-1, 2});
  WriteAll(directory.File("m.gguf"), writer.Finish());
  const auto gguf = GgufFile::Open(directory.File("m.gguf"));
  ASSERT_TRUE(gguf.ok()) << gguf.status();
  EXPECT_EQ(*gguf->GetInteger("u"), 7);
  EXPECT_EQ(*gguf->GetNumber("u"), 7.0);
  EXPECT_EQ(*gguf->GetNumber("f"), 0.5);
  EXPECT_EQ(*gguf->GetBool("b"), true);
  EXPECT_EQ(*gguf->GetString("s"), "text");
  EXPECT_EQ(*gguf->GetStrings("ss"), (std::vector<std::string>{"x", ""}));
  EXPECT_EQ(*gguf->GetIntegers("is"), (std::vector<std::int64_t>{-1, 2}));
  EXPECT_TRUE(absl::IsNotFound(gguf->GetString("missing").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(gguf->GetInteger("f").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(gguf->GetString("ss").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(gguf->GetStrings("is").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(gguf->GetIntegers("ss").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(gguf->GetBool("u").status()));
}

// Opens and, where that passes, loads. False when the model is refused.
bool UseModel(const std::string& path) {
  const auto source = ModelSource::Open(path);
  if (!source.ok()) return false;
  const WeightLayout layout = WeightLayout::Create((*source)->description().config, StorageFormat::kFp32);
  EXPECT_LE(layout.total_bytes, 1u << 20) << "a damaged size passed: the files hold no more";
  if (layout.total_bytes > 1u << 20) return true;
  std::vector<std::byte> region(layout.total_bytes);
  EXPECT_TRUE((*source)->LoadWeights(layout, Device::kCpu, region, nullptr).ok());
  return true;
}

// Changes `bytes` in a few places, most of them in the first `header_bytes`.
std::string Damage(std::string bytes, std::uint64_t seed, std::size_t header_bytes) {
  auto below = [&, counter = std::uint64_t{0}](std::uint64_t bound) mutable { return RandomBelow(seed, counter++, bound); };
  if (below(8) == 0) bytes.resize(below(bytes.size()));
  const std::uint64_t num_changes = 1 + below(4);
  for (std::uint64_t i = 0; i < num_changes && !bytes.empty(); ++i) {
    const std::size_t place = below(below(8) == 0 ? bytes.size() : std::min(bytes.size(), header_bytes));
    switch (below(4)) {
      case 0:
        bytes[place] = static_cast<char>(bytes[place] ^ (1 << below(8)));
        break;
      case 1:
        bytes[place] = static_cast<char>(below(256));
        break;
      case 2:
        bytes.erase(place, 1 + below(8));
        break;
      default:
        bytes.insert(place, 1, static_cast<char>(below(2) == 0 ? '0' + below(10) : below(256)));
        break;
    }
  }
  return bytes;
}

TinyModelOptions Smallest() {
  TinyModelOptions options;
  options.num_layers = 1;
  options.hidden_size = 8;
  options.intermediate_size = 8;
  options.num_heads = 2;
  options.num_kv_heads = 1;
  options.head_dim = 4;
  return options;
}

// CASES C46
TEST(MalformedFilesTest, DamagedDirectoriesNeverCrash) {
  const TemporaryDirectory directory;
  const std::string model = directory.File("m");
  TinyModelOptions options = Smallest();
  options.num_shards = 2;
  ASSERT_TRUE(WriteTinyModel(model, options).ok());
  ASSERT_TRUE(UseModel(model));
  for (const char* name :
       {"config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors", "tokenizer_config.json"}) {
    const std::string path = model + "/" + name;
    const std::string good = ReadAll(path);
    for (std::uint64_t seed = 0; seed < 150; ++seed) {
      SCOPED_TRACE(absl::StrCat(name, " seed ", seed));
      WriteAll(path, Damage(good, seed, 1024));
      UseModel(model);
    }
    WriteAll(path, good);
  }
}

std::string SmallGguf() {
  GgufWriter writer;
  writer.AddString("general.architecture", "llama");
  writer.AddUint32("llama.block_count", 1);
  writer.AddUint32("llama.context_length", 64);
  writer.AddUint32("llama.embedding_length", 32);
  writer.AddUint32("llama.feed_forward_length", 32);
  writer.AddUint32("llama.attention.head_count", 2);
  writer.AddFloat32("llama.attention.layer_norm_rms_epsilon", 1e-5F);
  writer.AddString("tokenizer.ggml.model", "gpt2");
  writer.AddString("tokenizer.ggml.pre", "smollm");
  writer.AddStrings("tokenizer.ggml.tokens", {"a", "b", "ab", "<e>"});
  writer.AddInt32s("tokenizer.ggml.token_type", {1, 1, 1, 3});
  writer.AddStrings("tokenizer.ggml.merges", {"a b"});
  writer.AddUint32("tokenizer.ggml.eos_token_id", 3);
  const auto add = [&](const std::string& name, const std::vector<std::uint64_t>& dimensions, std::uint32_t type,
                       std::size_t size) { writer.AddTensor(name, dimensions, type, std::string(size, '\x11')); };
  add("token_embd.weight", {32, 4}, 8, 4 * 34);
  add("output_norm.weight", {32}, 0, 128);
  for (const char* name : {"attn_norm", "ffn_norm"}) add(absl::StrCat("blk.0.", name, ".weight"), {32}, 0, 128);
  for (const char* name : {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"}) {
    add(absl::StrCat("blk.0.", name, ".weight"), {32, 32}, 3, 32 * 20);
  }
  return writer.Finish();
}

// CASES C46
TEST(MalformedFilesTest, DamagedGgufFilesNeverCrash) {
  const TemporaryDirectory directory;
  const std::string path = directory.File("m.gguf");
  const std::string good = SmallGguf();
  WriteAll(path, good);
  ASSERT_TRUE(UseModel(path)) << ModelSource::Open(path).status();
  int num_refused = 0;
  for (std::uint64_t seed = 0; seed < 600; ++seed) {
    SCOPED_TRACE(seed);
    WriteAll(path, Damage(good, seed, 1500));
    num_refused += UseModel(path) ? 0 : 1;
  }
  EXPECT_GT(num_refused, 200);
}

}  // namespace
}  // namespace tandem

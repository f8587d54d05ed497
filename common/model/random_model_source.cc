#include "common/model/random_model_source.h"

#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/numbers.h"
#include "common/base/hash.h"
#include "common/base/random.h"
#include "common/model/byte_pair_merges.h"
#include "common/model/file_model_source.h"

namespace tandem {
namespace {

constexpr std::uint64_t kSeed = 0x7a4d;

ModelConfig SmolLm2() {
  ModelConfig config;
  config.family = "llama";
  config.num_layers = 30;
  config.hidden_size = 576;
  config.intermediate_size = 1536;
  config.num_heads = 9;
  config.num_kv_heads = 3;
  config.head_dim = 64;
  config.vocab_size = 49152;
  config.max_positions = 8192;
  config.rope_theta = 100000;
  config.is_embedding_tied = true;
  return config;
}

ModelConfig Llama31() {
  ModelConfig config;
  config.family = "llama";
  config.num_layers = 32;
  config.hidden_size = 4096;
  config.intermediate_size = 14336;
  config.num_heads = 32;
  config.num_kv_heads = 8;
  config.head_dim = 128;
  config.vocab_size = 128256;
  config.max_positions = 131072;
  config.rope_theta = 500000;
  config.rope_scaling = RopeScaling{.factor = 8};
  return config;
}

ModelConfig Qwen25() {
  ModelConfig config;
  config.family = "qwen2";
  config.num_layers = 28;
  config.hidden_size = 1536;
  config.intermediate_size = 8960;
  config.num_heads = 12;
  config.num_kv_heads = 2;
  config.head_dim = 128;
  config.vocab_size = 151936;
  config.max_positions = 131072;
  config.rms_norm_epsilon = 1e-6F;
  config.rope_theta = 1000000;
  config.has_qkv_bias = true;
  config.is_embedding_tied = true;
  return config;
}

ModelConfig Qwen3() {
  ModelConfig config;
  config.family = "qwen3";
  config.num_layers = 36;
  config.hidden_size = 4096;
  config.intermediate_size = 12288;
  config.num_heads = 32;
  config.num_kv_heads = 8;
  config.head_dim = 128;
  config.vocab_size = 151936;
  config.max_positions = 40960;
  config.rms_norm_epsilon = 1e-6F;
  config.rope_theta = 1000000;
  config.has_qk_norm = true;
  return config;
}

struct Shape {
  const char* name;
  ModelConfig (*config)();
};
constexpr std::array<Shape, 4> kShapes = {
    {{"smollm2-135m", SmolLm2}, {"qwen2.5-1.5b", Qwen25}, {"llama-3.1-8b", Llama31}, {"qwen3-8b", Qwen3}}};
constexpr int kMostPositions = 1 << 24;

// The values of one tensor as a file of fp32 would hold them: value i is offset + half_width * u, u the i-th draw of [-1, 1).
class RandomTensor final : public ByteSource {
 public:
  RandomTensor(std::uint64_t seed, float half_width, float offset) : seed_(seed), half_width_(half_width), offset_(offset) {}

  absl::Status ReadAt(std::uint64_t begin_bytes, std::span<std::byte> bytes) const override {
    if (begin_bytes % sizeof(float) != 0 || bytes.size() % sizeof(float) != 0)
      return absl::InvalidArgumentError(
          absl::StrCat("random tensor: ", bytes.size(), " bytes at ", begin_bytes, " are no values"));
    const std::uint64_t begin = begin_bytes / sizeof(float), count = bytes.size() / sizeof(float);
    for (std::uint64_t i = 0; i < count; ++i) {
      const float value = ValueAt(begin + i);
      std::memcpy(bytes.data() + i * sizeof(float), &value, sizeof value);
    }
    return absl::OkStatus();
  }

 private:
  float ValueAt(std::uint64_t i) const {
    // 24 bits are exact in fp32, so nothing here depends on a machine's rounding but the last two operations, which IEEE fixes.
    const auto draw = static_cast<std::int32_t>(MixBits(seed_ + i) >> 40) - (1 << 23);
    const float scaled = static_cast<float>(draw) * 0x1p-23F * half_width_;
    return scaled + offset_;
  }

  const std::uint64_t seed_;
  const float half_width_;
  const float offset_;
};

TokenizerSpec ByteTokenizer(int vocab_size) {
  TokenizerSpec spec;
  spec.tokens.reserve(static_cast<std::size_t>(vocab_size));
  for (int i = 0; i < vocab_size; ++i)
    spec.tokens.push_back(i < 256 ? ByteLetters(std::string(1, static_cast<char>(i))) : absl::StrCat("#", i));
  return spec;
}

class RandomModelSource final : public ModelSource {
 public:
  explicit RandomModelSource(ModelDescription description) : description_(std::move(description)) {
    const ModelConfig& config = description_.config;
    const WeightLayout layout = WeightLayout::Create(config, StorageFormat::kFp32);
    std::uint64_t index = 0;
    for (const WeightTarget& target : WeightTargets(config, layout, ModelFileKind::kHuggingFace)) {
      const bool is_bias = target.name.ends_with("bias");
      const bool is_norm = !is_bias && target.rows == 1;
      const float half_width = is_bias || is_norm ? 0.0F : std::sqrt(3.0F / static_cast<float>(target.columns));
      tensors_.emplace(target.name, RandomTensor(DeriveSeed(kSeed, index++), half_width, is_norm ? 1.0F : 0.0F));
    }
    digest_ = Sha256Hex(absl::StrCat("random ", kSeed, " ", layout.digest));
  }

  const ModelDescription& description() const override { return description_; }
  const std::string& digest() const override { return digest_; }
  bool holds_fp8_blocks() const override { return false; }
  absl::Status LoadWeights(const WeightLayout& layout, Device device, std::span<std::byte> region,
                           const std::function<void(std::uint64_t)>& progress) const override {
    const auto load_of = [this](WeightTarget target) { return LoadOf(std::move(target)); };
    return LoadTargets(description_.config, ModelFileKind::kHuggingFace, layout, device, region, load_of, progress);
  }
  absl::Status ReadRows(std::size_t tensor_index, std::uint64_t row_begin, std::uint64_t row_end,
                        std::span<float> values) const override {
    const auto load_of = [this](WeightTarget target) { return LoadOf(std::move(target)); };
    return ReadTargetRows(description_.config, ModelFileKind::kHuggingFace, tensor_index, row_begin, row_end, values, load_of);
  }

 private:
  TensorLoad LoadOf(WeightTarget target) const {
    const RandomTensor& tensor = tensors_.at(target.name);
    return {&tensor, WeightCodec::kF32, 0, std::move(target)};
  }

  const ModelDescription description_;
  std::map<std::string, RandomTensor> tensors_;
  std::string digest_;
};

}  // namespace

absl::StatusOr<ModelConfig> ConfigOfShape(const std::string& shape) {
  const std::size_t colon = shape.find(':');
  const std::string name = shape.substr(0, colon);
  std::string names;
  for (const Shape& known : kShapes) {
    if (name != known.name) {
      absl::StrAppend(&names, names.empty() ? "" : ", ", known.name);
      continue;
    }
    ModelConfig config = known.config();
    config.name = absl::StrCat("random in the shape of ", name);
    if (colon != std::string::npos) {
      const std::string positions = shape.substr(colon + 1);
      if (!absl::SimpleAtoi(positions, &config.max_positions) || config.max_positions < 1 ||
          config.max_positions > kMostPositions) {
        return absl::InvalidArgumentError(
            absl::StrCat("random weights: positions '", positions, "' after '", name, ":'; must be 1 to ", kMostPositions));
      }
    }
    TANDEM_RETURN_IF_ERROR(ValidateModelConfig(config));
    return config;
  }
  return absl::InvalidArgumentError(absl::StrCat("random weights: no shape is named '", name, "'; there are ", names));
}

absl::StatusOr<std::unique_ptr<ModelSource>> OpenRandomModel(const std::string& shape) {
  ModelDescription description;
  TANDEM_ASSIGN_OR_RETURN(description.config, ConfigOfShape(shape));
  description.tokenizer = ByteTokenizer(description.config.vocab_size);
  return std::make_unique<RandomModelSource>(std::move(description));
}

}  // namespace tandem

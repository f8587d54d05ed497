#include "trainer_server/policy/policy_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "common/base/random.h"
#include "common/torch/run_torch.h"
#include "trainer_server/policy/policy_network.h"

namespace tandem {
namespace {

const float* FloatsAt(const std::byte* base, std::uint64_t begin_bytes) {
  return reinterpret_cast<const float*>(base + begin_bytes);
}
float* FloatsAt(std::span<std::byte> memory, std::uint64_t begin_bytes) {
  return reinterpret_cast<float*>(memory.data() + begin_bytes);
}

NetworkWeights<float> WeightsAt(const WeightLayout& layout, const std::byte* base) {
  NetworkWeights<float> weights;
  weights.embedding = FloatsAt(base, layout.embedding.begin_bytes);
  const auto optional = [base](const std::optional<TensorPlace>& place) {
    return place.has_value() ? FloatsAt(base, place->begin_bytes) : nullptr;
  };
  for (const LayerPlaces& places : layout.layers) {
    weights.layers.push_back({.input_norm = FloatsAt(base, places.input_norm.begin_bytes),
                              .qkv = FloatsAt(base, places.qkv.begin_bytes),
                              .qkv_bias = optional(places.qkv_bias),
                              .q_norm = optional(places.q_norm),
                              .k_norm = optional(places.k_norm),
                              .o = FloatsAt(base, places.o.begin_bytes),
                              .post_norm = FloatsAt(base, places.post_norm.begin_bytes),
                              .gate_up = FloatsAt(base, places.gate_up.begin_bytes),
                              .down = FloatsAt(base, places.down.begin_bytes)});
  }
  weights.final_norm = FloatsAt(base, layout.final_norm.begin_bytes);
  weights.head = FloatsAt(base, layout.head.begin_bytes);
  return weights;
}

// `gradients` empty: none are wanted.
LoraSet<float> LoraAt(const AdapterLayout& layout, int num_layers, double scale, const std::byte* values,
                      std::span<std::byte> gradients) {
  LoraSet<float> lora;
  lora.rank = layout.rank;
  lora.scale = scale;
  lora.layers.resize(static_cast<std::size_t>(num_layers));
  for (const AdapterPlace& place : layout.places) {
    LoraPair<float>& pair = lora.layers[static_cast<std::size_t>(place.layer)][static_cast<std::size_t>(place.kind)];
    pair.a = FloatsAt(values, place.a_begin_bytes);
    pair.b = FloatsAt(values, place.b_begin_bytes);
    if (gradients.empty()) continue;
    pair.grad_a = FloatsAt(gradients, place.a_begin_bytes);
    pair.grad_b = FloatsAt(gradients, place.b_begin_bytes);
  }
  return lora;
}

LinearHead<float> HeadAt(const ModelConfig& config, const float* weight, const PolicyOptions& options) {
  LinearHead<float> head;
  head.weight = weight;
  head.vocab_size = config.vocab_size;
  head.width = config.hidden_size;
  head.temperature = options.temperature;
  if (options.logit_chunk > 0) head.row_tile = options.logit_chunk;
  return head;
}

HeadScores ToScores(LinearLogprobs logprobs) {
  return {.logprobs = std::move(logprobs.logprobs), .entropies = std::move(logprobs.entropies)};
}

class CpuPolicyModel : public PolicyModel {
 public:
  CpuPolicyModel(const ModelConfig& config, const WeightLayout& layout, const std::byte* weights, const AdapterMemory& memory,
                 const PolicyOptions& options, AdapterLayout adapter_layout)
      : config_(config),
        options_(options),
        memory_(memory),
        adapter_layout_(std::move(adapter_layout)),
        lora_(LoraAt(adapter_layout_, config.num_layers, static_cast<double>(options.scale), memory.masters.data(),
                     memory.gradients)),
        network_(config, WeightsAt(layout, weights), HeadAt(config, FloatsAt(weights, layout.head.begin_bytes), options)) {}

  void InitializeAdapters(std::uint64_t seed) override {
    std::fill(memory_.masters.begin(), memory_.masters.end(), std::byte{0});
    for (std::size_t i = 0; i < adapter_layout_.places.size(); ++i) {
      const AdapterPlace& place = adapter_layout_.places[i];
      const double bound = 1 / std::sqrt(static_cast<double>(place.shape.inputs));
      float* a = FloatsAt(memory_.masters, place.a_begin_bytes);
      const std::uint64_t place_seed = DeriveSeed(seed, i);
      for (std::int64_t j = 0; j < static_cast<std::int64_t>(adapter_layout_.rank) * place.shape.inputs; ++j) {
        a[j] = static_cast<float>((2 * RandomUniform(place_seed, static_cast<std::uint64_t>(j)) - 1) * bound);
      }
    }
  }

  absl::Status SetReference(std::span<const std::byte> slot, const AdapterLayout& layout, float scale) override {
    if (slot.size() < layout.total_bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("reference adapter: a slot of ", slot.size(), " bytes, its layout needs ", layout.total_bytes));
    }
    if (layout.places.size() != layout.targets.size() * static_cast<std::size_t>(config_.num_layers)) {
      return absl::InvalidArgumentError(absl::StrCat("reference adapter: ", layout.places.size(), " places for ",
                                                     layout.targets.size(), " targets in ", config_.num_layers, " layers"));
    }
    reference_bytes_.resize(layout.total_bytes / sizeof(float));
    std::memcpy(reference_bytes_.data(), slot.data(), reference_bytes_.size() * sizeof(float));
    reference_ = LoraAt(layout, config_.num_layers, static_cast<double>(scale),
                        reinterpret_cast<const std::byte*>(reference_bytes_.data()), {});
    return absl::OkStatus();
  }

  absl::StatusOr<HeadScores> Score(const MicroBatch& batch, PolicyKind kind) override {
    TANDEM_RETURN_IF_ERROR(CheckMicroBatch(batch));
    const LoraSet<float>* lora = kind == PolicyKind::kPolicy ? &lora_ : reference_.has_value() ? &*reference_ : nullptr;
    HeadScores scores;
    TANDEM_RETURN_IF_ERROR(RunTorch(Describe("scoring", batch), [&] {
      scores = ToScores(network_.Score(batch, lora));
      return absl::OkStatus();
    }));
    return scores;
  }

  absl::StatusOr<HeadScores> Forward(const MicroBatch& batch, bool needs_entropy_gradient,
                                     std::uint64_t dropout_stream) override {
    network_.DropKept();
    TANDEM_RETURN_IF_ERROR(CheckMicroBatch(batch));
    const LoraDropout dropout{.probability = options_.dropout, .stream = DeriveSeed(options_.seed, dropout_stream)};
    HeadScores scores;
    TANDEM_RETURN_IF_ERROR(RunTorch(Describe("forward pass", batch), [&] {
      scores = ToScores(network_.Forward(batch, lora_, dropout, needs_entropy_gradient));
      return absl::OkStatus();
    }));
    return scores;
  }

  absl::Status Backward(std::span<const double> grad_logprobs, std::span<const double> grad_entropies) override {
    if (!network_.has_kept()) return absl::FailedPreconditionError("backward pass: no forward pass is waiting for it");
    const std::size_t rows = network_.num_kept_head_rows();
    if (grad_logprobs.size() != rows || (!grad_entropies.empty() && grad_entropies.size() != rows)) {
      return absl::InvalidArgumentError(absl::StrCat("backward pass: ", grad_logprobs.size(), " log-prob and ",
                                                     grad_entropies.size(), " entropy gradients for ", rows, " head rows"));
    }
    if (!grad_entropies.empty() && !network_.keeps_entropy_gradient()) {
      return absl::FailedPreconditionError("backward pass: entropy gradients, but the forward pass was not asked to allow them");
    }
    return RunTorch("backward pass", [&] {
      network_.Backward(grad_logprobs, grad_entropies);
      return absl::OkStatus();
    });
  }

  void ZeroGradients() override { std::fill(memory_.gradients.begin(), memory_.gradients.end(), std::byte{0}); }
  const AdapterLayout& adapter_layout() const override { return adapter_layout_; }

 private:
  static std::string Describe(const char* what, const MicroBatch& batch) {
    return absl::StrCat(what, " of ", batch.token_ids.size(), " tokens");
  }
  absl::Status CheckMicroBatch(const MicroBatch& batch) const;

  const ModelConfig config_;
  const PolicyOptions options_;
  const AdapterMemory memory_;
  const AdapterLayout adapter_layout_;
  const LoraSet<float> lora_;
  std::vector<float> reference_bytes_;
  std::optional<LoraSet<float>> reference_;
  PolicyNetwork<float> network_;
};

absl::Status CpuPolicyModel::CheckMicroBatch(const MicroBatch& batch) const {
  const auto fault = [](const auto&... parts) { return absl::InvalidArgumentError(absl::StrCat("micro-batch: ", parts...)); };
  const std::int64_t num_tokens = static_cast<std::int64_t>(batch.token_ids.size());
  if (num_tokens == 0) return fault("no tokens");
  if (batch.positions.size() != batch.token_ids.size())
    return fault(num_tokens, " tokens, ", batch.positions.size(), " positions");
  if (batch.head_rows.size() != batch.head_targets.size()) {
    return fault(batch.head_rows.size(), " head rows, ", batch.head_targets.size(), " targets");
  }
  for (std::size_t i = 0; i < batch.token_ids.size(); ++i) {
    if (batch.token_ids[i] < 0 || batch.token_ids[i] >= config_.vocab_size) {
      return fault("token id ", batch.token_ids[i], " of row ", i, ", vocabulary ", config_.vocab_size);
    }
    if (batch.positions[i] < 0 || batch.positions[i] >= config_.max_positions) {
      return fault("position ", batch.positions[i], " of row ", i, ", limit ", config_.max_positions);
    }
  }
  for (std::size_t n = 0; n < batch.head_rows.size(); ++n) {
    if (batch.head_rows[n] < 0 || batch.head_rows[n] >= num_tokens)
      return fault("head row ", batch.head_rows[n], " of ", num_tokens);
    if (batch.head_targets[n] < 0 || batch.head_targets[n] >= config_.vocab_size) {
      return fault("target ", batch.head_targets[n], " of head row ", n, ", vocabulary ", config_.vocab_size);
    }
  }
  for (const PackedCompletion& c : batch.completions) {
    if (c.prompt_begin < 0 || c.prompt_begin >= c.prompt_end || c.prompt_end > num_tokens || c.begin < 0 || c.begin > c.end ||
        c.end > num_tokens) {
      return fault("sequence ", c.sequence_index, ": prompt rows [", c.prompt_begin, ", ", c.prompt_end, "), completion rows [",
                   c.begin, ", ", c.end, ") of ", num_tokens);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckOptions(const ModelConfig& config, const WeightLayout& layout, const PolicyOptions& options) {
  const auto fault = [](const auto&... parts) { return absl::InvalidArgumentError(absl::StrCat("policy: ", parts...)); };
  if (layout.format != StorageFormat::kFp32) return fault("the CPU computes with fp32 weights only");
  if (options.rank < 1) return fault("rank ", options.rank, ", at least 1");
  if (!std::isfinite(options.scale)) return fault("scale ", options.scale);
  if (options.targets.empty()) return fault("no target layers");
  if (!(options.dropout >= 0 && options.dropout < 1)) return fault("dropout ", options.dropout, ", in [0, 1)");
  if (!(options.temperature > 0 && std::isfinite(options.temperature)))
    return fault("temperature ", options.temperature, ", above 0");
  if (options.logit_chunk < 0) return fault("logit_chunk ", options.logit_chunk, ", at least 0");
  if (config.num_kv_heads < 1 || config.num_heads % config.num_kv_heads != 0 ||
      config.num_heads / config.num_kv_heads > kAttentionTileRows) {
    return fault(config.num_heads, " heads over ", config.num_kv_heads, " KV heads; the quotient must be whole and at most ",
                 kAttentionTileRows);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<PolicyModel>> PolicyModel::Create(const ModelConfig& config, const WeightLayout& layout,
                                                                 const std::byte* weights, const AdapterMemory& memory,
                                                                 const PolicyOptions& options) {
  TANDEM_RETURN_IF_ERROR(CheckOptions(config, layout, options));
  AdapterLayout adapter_layout = AdapterLayout::Create(config, options.rank, options.targets);
  for (const std::span<std::byte> part : {memory.masters, memory.gradients}) {
    if (part.size() != adapter_layout.total_bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("policy: adapter memory of ", part.size(), " bytes, the layout has ", adapter_layout.total_bytes));
    }
  }
  return std::make_unique<CpuPolicyModel>(config, layout, weights, memory, options, std::move(adapter_layout));
}

}  // namespace tandem

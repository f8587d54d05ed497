#include "trainer_server/policy/policy_model.h"

#include <cmath>
#include <utility>

#include "common/model/kv_scale_table.h"
#include "trainer_server/policy/cpu_backend.h"
#include "trainer_server/policy/cuda_policy_model.h"
#include "trainer_server/policy/network_policy_model.h"

namespace tandem {

absl::Status CheckMicroBatch(const ModelConfig& config, const MicroBatch& batch) {
  const auto fault = [](const auto&... parts) { return absl::InvalidArgumentError(absl::StrCat("micro-batch: ", parts...)); };
  const std::int64_t num_tokens = static_cast<std::int64_t>(batch.token_ids.size());
  if (num_tokens == 0) return fault("no tokens");
  if (batch.positions.size() != batch.token_ids.size())
    return fault(num_tokens, " tokens, ", batch.positions.size(), " positions");
  if (batch.head_rows.size() != batch.head_targets.size()) {
    return fault(batch.head_rows.size(), " head rows, ", batch.head_targets.size(), " targets");
  }
  for (std::size_t i = 0; i < batch.token_ids.size(); ++i) {
    if (batch.token_ids[i] < 0 || batch.token_ids[i] >= config.vocab_size) {
      return fault("token id ", batch.token_ids[i], " of row ", i, ", vocabulary ", config.vocab_size);
    }
    if (batch.positions[i] < 0 || batch.positions[i] >= config.max_positions) {
      return fault("position ", batch.positions[i], " of row ", i, ", limit ", config.max_positions);
    }
  }
  for (std::size_t n = 0; n < batch.head_rows.size(); ++n) {
    if (batch.head_rows[n] < 0 || batch.head_rows[n] >= num_tokens)
      return fault("head row ", batch.head_rows[n], " of ", num_tokens);
    if (batch.head_targets[n] < 0 || batch.head_targets[n] >= config.vocab_size) {
      return fault("target ", batch.head_targets[n], " of head row ", n, ", vocabulary ", config.vocab_size);
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

namespace {

absl::Status CheckOptions(const ModelConfig& config, const WeightLayout& layout, const PolicyOptions& options, Device device) {
  const auto fault = [](const auto&... parts) { return absl::InvalidArgumentError(absl::StrCat("policy: ", parts...)); };
  if (device == Device::kCpu && layout.format != StorageFormat::kFp32) return fault("the CPU computes with fp32 weights only");
  if (options.rank < 1) return fault("rank ", options.rank, ", at least 1");
  if (!std::isfinite(options.scale)) return fault("scale ", options.scale);
  if (options.targets.empty()) return fault("no target layers");
  if (!(options.dropout >= 0 && options.dropout < 1)) return fault("dropout ", options.dropout, ", in [0, 1)");
  if (!(options.temperature > 0 && std::isfinite(options.temperature)))
    return fault("temperature ", options.temperature, ", above 0");
  if (options.logit_chunk < 0) return fault("logit_chunk ", options.logit_chunk, ", at least 0");
  if (config.num_kv_heads < 1 || config.num_heads % config.num_kv_heads != 0 ||
      (device == Device::kCpu && config.num_heads / config.num_kv_heads > kAttentionTileRows)) {
    return fault(config.num_heads, " heads over ", config.num_kv_heads, " KV heads; the quotient must be whole and at most ",
                 kAttentionTileRows);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<PolicyModel>> PolicyModel::Create(const ModelConfig& config, const WeightLayout& layout,
                                                                 const std::byte* weights, const AdapterMemory& memory,
                                                                 const PolicyOptions& options, const PolicyDevice& device) {
  TANDEM_RETURN_IF_ERROR(CheckOptions(config, layout, options, device.device));
  AdapterLayout adapter_layout = AdapterLayout::Create(config, options.rank, options.targets);
  for (const std::span<std::byte> part : {memory.masters, memory.gradients}) {
    if (part.size() != adapter_layout.total_bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("policy: adapter memory of ", part.size(), " bytes, the layout has ", adapter_layout.total_bytes));
    }
  }
  if (device.device == Device::kCuda) {
    return CreateCudaPolicyModel(config, layout, weights, memory, options, device, std::move(adapter_layout));
  }
  if (!device.kv_scales.empty()) {
    TANDEM_ASSIGN_OR_RETURN(const bool is_kv_fp8, KvScaleTable(config, layout.digest, device.device, device.kv_scales).AreSet());
    if (is_kv_fp8) {
      return absl::FailedPreconditionError(
          "policy: the rollout server's KV cache is in fp8, which the CPU's forward pass cannot follow");
    }
  }
  NetworkWeights<float> views = WeightsAt<float>(layout, weights);
  CpuBackend<float> backend(config, HeadAt(config, views.head, options), device.clock);
  return std::make_unique<NetworkPolicyModel<CpuBackend<float>>>(config, std::move(views), std::move(backend), Device::kCpu,
                                                                 memory, options, std::move(adapter_layout));
}

}  // namespace tandem

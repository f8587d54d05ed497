// The policy: the shared frozen base with trainable adapters. Confined to the trainer thread. No torch type crosses this
// interface.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "common/gpu/stage_clock.h"
#include "common/gpu/stream.h"
#include "common/model/model_config.h"
#include "common/model/weight_layout.h"
#include "kernels/gemm/gemm.h"
#include "trainer_server/batch/micro_batch.h"
#include "trainer_server/policy/fused_attention.h"

namespace tandem {

struct PolicyOptions {
  int rank = 8;
  float scale = 2;  // alpha / rank, or alpha / sqrt(rank)
  std::vector<LinearKind> targets;
  double dropout = 0;
  double temperature = 1;  // logits are divided by it, as the sampler did
  int logit_chunk = 0;     // rows of one head tile; 0: default
  std::uint64_t seed = 0;  // dropout masks
};

// What the policy computes with on a GPU; stream and gemm are used by nobody else while one of its functions runs.
struct PolicyDevice {
  Device device = Device::kCpu;
  Stream* stream = nullptr;
  Gemm* gemm = nullptr;
  // The memory of KvScaleTable, on the device: where the rollout server's KV cache has scales, forward passes round keys and
  // values as it does. Empty: there is no such cache. Outlives the policy.
  std::span<std::byte> kv_scales = {};
  AttentionOptions attention = {};
  // Page-locked host memory that a pass may take for what it keeps of layers. Inputs that need more are an error.
  std::uint64_t host_limit_bytes = std::numeric_limits<std::uint64_t>::max();
  StageClock* clock = nullptr;  // times the stages of passes; null: nobody wants to know
};

// Fp32 arrays in AdapterLayout order, kept in the trainer's standing region, on the policy's device.
struct AdapterMemory {
  std::span<std::byte> masters;  // AdapterLayout.total_bytes
  std::span<std::byte> gradients;
};

// Of the last Forward, on a GPU.
struct PassMemory {
  std::int64_t layers_on_device = 0;  // whose input stays there
  bool keeps_attention = false;       // and does not compute its output again in the backward pass
  std::uint64_t offloaded_bytes = 0;  // of the other layers, to the host, and back in the backward pass
};

enum class PolicyKind { kPolicy, kReference };  // kReference: adapters off, or the starting adapter

struct HeadScores {
  std::vector<double> logprobs;  // one a head row, nats, at the sampling temperature
  std::vector<double> entropies;
};

// On a GPU all memory below is device memory; functions return when their work there is done.
class PolicyModel {
 public:
  // Errors: INVALID_ARGUMENT (options, sizes, weights), FAILED_PRECONDITION (the CPU beside a KV cache in fp8, which it has no
  // rounding for), UNIMPLEMENTED (no device code).
  static absl::StatusOr<std::unique_ptr<PolicyModel>> Create(const ModelConfig& config, const WeightLayout& layout,
                                                             const std::byte* weights, const AdapterMemory& memory,
                                                             const PolicyOptions& options, const PolicyDevice& device = {});
  virtual ~PolicyModel() = default;
  // A uniform in +-1/sqrt(inputs) (or as given), B zero; deterministic in the seed.
  virtual absl::Status InitializeAdapters(std::uint64_t seed) = 0;
  // The starting adapter becomes the reference: `slot` is read as long as the policy lives. Without it the reference is the base.
  virtual absl::Status SetReference(std::span<const std::byte> slot, const AdapterLayout& layout, float scale) = 0;
  // Forward only, no dropout.
  virtual absl::StatusOr<HeadScores> Score(const MicroBatch& batch, PolicyKind kind) = 0;
  // Forward that keeps layer inputs and unit gradients for one Backward. `needs_entropy_gradient`: the two-pass head.
  virtual absl::StatusOr<HeadScores> Forward(const MicroBatch& batch, bool needs_entropy_gradient,
                                             std::uint64_t dropout_stream) = 0;
  // dL/dlogprob and dL/dentropy (empty: zero) of each head row of the last Forward; adds to the gradients.
  virtual absl::Status Backward(std::span<const double> grad_logprobs, std::span<const double> grad_entropies) = 0;
  virtual absl::Status ZeroGradients() = 0;
  virtual const AdapterLayout& adapter_layout() const = 0;
  virtual PassMemory last_pass() const { return {}; }
};

}  // namespace tandem

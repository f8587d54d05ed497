// Draws one token from each row of a step's logits, on the device where they lie. Order of the transformations: repetition
// penalty, presence penalty, temperature, top-k, top-p (of what top-k left, renormalised), min-p; then inverse CDF with
// RandomUniform(seed, position). A draw is a pure function of its row and input: it can be repeated after a preemption or a
// restart. A token can be drawn for a step that is put into the stream before the host has seen it. The scratch makes a sampler
// confined to one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "common/base/status.h"
#include "rollout_server/model/decoder_model.h"
#include "rollout_server/request/rollout_request.h"

namespace tandem {

struct DrawInput {
  const SamplingParams* params = nullptr;
  std::uint64_t seed = 0;      // of the member
  std::uint32_t position = 0;  // of the token in the completion
  std::span<const std::uint32_t> prompt = {};
  std::span<const std::uint32_t> completion = {};
};

struct DrawnToken {
  std::uint32_t id = 0;
  float rollout_logprob = 0;  // of the distribution drawn from: penalties, temperature, truncation, renormalised. Greedy: 0
  float raw_logprob = 0;      // of the raw policy at temperature 1
  float kept_mass = 1;        // that truncation kept, before renormalisation
};

// A draw that was started and not collected.
struct PendingDraw {
  int slot = 0;                        // the sampler's
  const std::uint32_t* ids = nullptr;  // on the sampler's device
  std::int64_t id_stride = 0;          // in elements
  // Where the id of the row will lie when the logits' stream has come so far: for steps that are put into it before Collect.
  const std::uint32_t* place(std::int64_t row) const { return ids + row * id_stride; }
};

struct SamplerOptions {
  Device device = Device::kCpu;
  int vocab_size = 0;
  int max_rows = 256;  // of one Draw, on the GPU
  // On the GPU, WorkspaceBytes of device memory; outlives the sampler. Unused on the CPU.
  std::span<std::byte> workspace = {};
};

class Sampler {
 public:
  // A step under way and the next one, in each of two lanes.
  static constexpr int kMaxPendingDraws = 4;

  static std::uint64_t WorkspaceBytes(const SamplerOptions& options);
  // Errors: INVALID_ARGUMENT (workspace), RESOURCE_EXHAUSTED (pinned memory), UNIMPLEMENTED (no device code).
  static absl::StatusOr<std::unique_ptr<Sampler>> Create(const SamplerOptions& options);
  virtual ~Sampler() = default;
  // Row i of `logits`, which are of the raw policy, with inputs[i]. On the GPU it only enqueues, behind the logits. Errors:
  // INTERNAL (shape, launch), FAILED_PRECONDITION (kMaxPendingDraws are under way). Requires: inputs.size() == logits.num_rows;
  // token ids below the vocabulary's size.
  virtual absl::StatusOr<PendingDraw> Start(const Logits& logits, std::span<const DrawInput> inputs) = 0;
  // The tokens of a draw, once. On the GPU it waits until the stream is past the draw: when it returns, the step is done. Errors
  // of a row: INTERNAL naming position and what is wrong with its logits (NaN, +inf, or nothing above -inf; CASES C06); its id on
  // the device is then 0. INTERNAL of all rows when a kernel failed; see ContextHealth.
  virtual std::vector<absl::StatusOr<DrawnToken>> Collect(const PendingDraw& draw) = 0;
  // Start and Collect; an error of Start is one of each row.
  std::vector<absl::StatusOr<DrawnToken>> Draw(const Logits& logits, std::span<const DrawInput> inputs);
};

}  // namespace tandem

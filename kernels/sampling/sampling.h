// One token from each row of logits, without sorting the vocabulary. Order: repetition penalty (Keskar et al., 2019, arXiv
// 1909.05858, section 4.1), presence penalty, temperature, top-k, top-p (of what top-k left, renormalised), min-p; then inverse
// CDF in order of ids.
//
// Device only: the CPU's sampler is rollout_server/sample/cpu_sampler. A row's outcome is a pure function of its logits and
// parameters: weights exp((logit - maximum) / temperature) become integers of 2^-40, so that sums are exact in any order. What is
// lighter than 2^-41 of the likeliest token is never drawn.
#pragma once

#include <cstdint>

#include "common/gpu/device.h"

namespace tandem {

inline constexpr std::int64_t kMaxSampledVocab = 1 << 22;

struct SampleRow {
  float inverse_temperature = 1;  // 0: greedy, the first largest
  std::uint32_t top_k = 0;        // 0: off
  double top_p = 1;
  double min_p = 0;
  float repetition_penalty = 1;
  float presence_penalty = 0;
  double uniform = 0;      // in [0, 1)
  std::int32_t seen = -1;  // which pair of `seen` maps is this row's; -1: no penalties
};

enum class SampleFault : std::uint32_t { kNone, kNan, kInfinite, kNanAfterPenalties, kInfiniteAfterPenalties };

struct SampledToken {
  std::uint32_t id = 0;
  float rollout_logprob = 0;  // of the distribution drawn from; greedy: 0
  float raw_logprob = 0;      // of the logits as they came, at temperature 1
  float kept_mass = 1;        // that truncation kept, before renormalisation
  SampleFault fault = SampleFault::kNone;
  float maximum = 0;  // of the row where the fault is
};

struct SampleParams {
  const float* logits = nullptr;    // [num_rows, vocab_size]
  const SampleRow* rows = nullptr;  // [num_rows]
  // [*, 2, seen_words]: bit i of the first map: token i is in prompt or completion; of the second: in the completion.
  const std::uint32_t* seen = nullptr;
  SampledToken* tokens = nullptr;  // [num_rows]
  std::int64_t num_rows = 0;
  std::int64_t vocab_size = 0;  // 1 to 2^22

  static std::int64_t SeenWords(std::int64_t vocab_size) { return (vocab_size + 31) / 32; }
};
// Errors: INVALID_ARGUMENT (shape), UNIMPLEMENTED (the CPU, no device code in this build), INTERNAL (launch).
absl::Status Sample(const SampleParams& params, Device device, void* stream);

namespace internal {
absl::Status SampleCuda(const SampleParams& params, void* stream);
}  // namespace internal

}  // namespace tandem

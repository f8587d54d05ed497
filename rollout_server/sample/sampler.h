// Draws one token from one row of logits. Order of the transformations: repetition penalty, presence penalty, temperature, top-k,
// top-p (of what top-k left, renormalised), min-p; then inverse CDF with RandomUniform(seed, position). A pure function of its
// input: a draw can be repeated after a preemption or a restart. The scratch makes it confined to one thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/base/status.h"
#include "rollout_server/request/rollout_request.h"

namespace tandem {

struct DrawInput {
  std::span<const float> logits = {};  // [vocab_size] fp32, of the raw policy
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

class Sampler {
 public:
  // Errors: INTERNAL naming position and what is wrong with the logits (NaN, +inf, or nothing above -inf). CASES C06
  absl::StatusOr<DrawnToken> Draw(const DrawInput& input);

 private:
  struct Candidate {
    float logit = 0;
    std::uint32_t id = 0;
  };
  std::span<const float> Penalise(const DrawInput& input);
  // Fills candidates_ with what truncation keeps, largest first, and returns its mass.
  double Truncate(std::span<const float> logits, const SamplingParams& params, double total);

  std::vector<float> penalised_;
  std::vector<std::uint8_t> is_seen_;
  std::vector<float> exponentials_;
  std::vector<double> tile_sums_;
  std::vector<Candidate> candidates_;
};

}  // namespace tandem

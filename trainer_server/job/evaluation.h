// Held-out scores: pass@k, which evaluation was best, and when a job has stopped to rise. Pure; thread-compatible.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "proto/job.pb.h"
#include "trainer_server/checkpoint/checkpoint_store.h"
#include "trainer_server/reward/reward_set.h"

namespace tandem {

// The chance that at least one of k samples passes, estimated without bias from `passed` of `samples`: 1 - C(n-c, k) / C(n, k)
// (Chen et al. 2021, 2107.03374, equation 1). Requires: 1 <= k <= samples, passed <= samples.
double PassAtK(std::uint32_t samples, std::uint32_t passed, std::uint32_t k);

// The samples of an evaluation's prompts, one prompt after the other.
class PassCounter {
 public:
  // `function`: index of the reward that decides.
  PassCounter(std::size_t function, double at_least) : function_(function), at_least_(at_least) {}
  // Samples that the function did not apply to are not counted.
  void Add(const RewardTable& samples);
  // Mean over the prompts with at least k counted samples; nullopt where there is none.
  std::optional<double> Mean(std::uint32_t k) const;

 private:
  struct Prompt {
    std::uint32_t samples = 0;
    std::uint32_t passed = 0;
  };
  const std::size_t function_;
  const double at_least_;
  std::vector<Prompt> prompts_;
};

// Fills defaults and collects faults: field, value, limit. `spec.rewards` are named.
void CheckEvaluation(v1::JobSpec* spec, std::vector<std::string>* faults);
// The job's sampling with what the evaluation sets in its place.
v1::SamplingParams EvaluationSampling(const v1::JobSpec& spec);

// Takes the evaluation of `step` into account. nullopt: the metric had no value, which is no rise. True: the best so far.
bool RecordEvaluation(const v1::EvaluationConfig& config, std::uint64_t step, std::optional<double> value,
                      EvaluationProgress* progress);
bool HasStoppedRising(const v1::EvaluationConfig& config, const EvaluationProgress& progress);

}  // namespace tandem

// The loss cases of tests/golden/grpo_cases.json as options and inputs of the loss and advantage rooms.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "trainer_server/advantage/advantage.h"
#include "trainer_server/loss/loss.h"

namespace tandem {

using Rows = std::vector<std::vector<double>>;

// One optimizer step; owns what LossSequence views. Empty Rows: absent.
struct LossStep {
  LossOptions loss;
  AdvantageOptions advantage;
  std::optional<Rows> given_advantages;
  int group_size = 1;
  std::vector<std::vector<std::optional<double>>> rewards;
  Rows policy_logprobs, old_logprobs, ref_logprobs, rollout_logprobs, entropies, kept_mass;
  std::vector<std::vector<std::uint8_t>> loss_mask;
  std::vector<bool> is_truncated;
  std::vector<std::vector<std::size_t>> micro_batches;
};

struct GoldenCase {
  std::string name;
  LossStep step;
  nlohmann::json expected;
};
const std::vector<GoldenCase>& GoldenCases();
const nlohmann::json& GoldenDocument();

absl::StatusOr<AdvantageResult> Advantages(const LossStep& step);
// Views into `step` and `advantages`.
std::vector<LossSequence> Sequences(const LossStep& step, const Rows& advantages);

struct StepResult {
  std::vector<double> micro_batch_losses;
  double loss = 0;
  Rows grad_logprobs;  // by sequence
  Rows grad_entropies;
  LossMetrics metrics;
};
// Evaluates every micro-batch with step-wide totals and adds them up, as the trainer does.
absl::StatusOr<StepResult> EvaluateStep(const LossStep& step, const Rows& advantages);

}  // namespace tandem

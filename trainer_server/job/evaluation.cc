#include "trainer_server/job/evaluation.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_join.h"
#include "common/base/check.h"

namespace tandem {
namespace {

constexpr std::uint32_t kMaxSamples = 1024;
constexpr std::uint32_t kMaxPatience = 1000;
constexpr int kMaxPassAt = 16;

void CheckPass(v1::JobSpec* spec, std::vector<std::string>* faults) {
  v1::EvaluationConfig* const evaluation = spec->mutable_evaluation();
  const std::uint32_t samples = evaluation->samples_per_prompt();
  if (evaluation->pass_at().empty()) {
    evaluation->add_pass_at(1);
    if (samples > 1) evaluation->add_pass_at(samples);
  }
  if (evaluation->pass_at_size() > kMaxPassAt) {
    faults->push_back(absl::StrCat("evaluation.pass_at: ", evaluation->pass_at_size(), " values; must be at most ", kMaxPassAt));
  }
  for (const std::uint32_t k : evaluation->pass_at()) {
    if (k >= 1 && k <= samples) continue;
    faults->push_back(
        absl::StrCat("evaluation.pass_at: ", k, "; must be 1 to samples_per_prompt, ", std::min(samples, kMaxSamples)));
  }
  std::vector<std::string> names;
  for (const v1::RewardConfig& reward : spec->rewards()) names.push_back(reward.name());
  if (evaluation->pass_reward().empty() && !names.empty()) evaluation->set_pass_reward(names[0]);
  if (std::ranges::find(names, evaluation->pass_reward()) == names.end()) {
    faults->push_back(absl::StrCat("evaluation.pass_reward: '", evaluation->pass_reward(),
                                   "'; must be one of the rewards: ", absl::StrJoin(names, ", ")));
  }
  if (!evaluation->has_pass_at_least()) evaluation->set_pass_at_least(1);
  if (!std::isfinite(evaluation->pass_at_least())) {
    faults->push_back(absl::StrCat("evaluation.pass_at_least: ", evaluation->pass_at_least(), "; must be finite"));
  }
}

void CheckMetric(v1::JobSpec* spec, std::vector<std::string>* faults) {
  v1::EvaluationConfig* const evaluation = spec->mutable_evaluation();
  if (evaluation->metric().empty()) evaluation->set_metric("reward");
  std::vector<std::string> metrics = {"reward"};
  for (const v1::RewardConfig& reward : spec->rewards()) metrics.push_back("rewards/" + reward.name() + "/mean");
  for (const std::uint32_t k : evaluation->pass_at()) metrics.push_back(absl::StrCat("pass_at_", k));
  if (std::ranges::find(metrics, evaluation->metric()) == metrics.end()) {
    faults->push_back(
        absl::StrCat("evaluation.metric: '", evaluation->metric(), "'; must be one of ", absl::StrJoin(metrics, ", ")));
  }
  if (!evaluation->has_early_stop()) return;
  const v1::EarlyStop& stop = evaluation->early_stop();
  if (stop.patience() < 1 || stop.patience() > kMaxPatience) {
    faults->push_back(absl::StrCat("evaluation.early_stop.patience: ", stop.patience(), "; must be 1 to ", kMaxPatience));
  }
  if (!std::isfinite(stop.min_increase()) || stop.min_increase() < 0) {
    faults->push_back(absl::StrCat("evaluation.early_stop.min_increase: ", stop.min_increase(), "; must be finite and >= 0"));
  }
  if (evaluation->interval_steps() == 0) {
    faults->push_back("evaluation.interval_steps: 0; must be at least 1 with early_stop, which looks at evaluations in between");
  }
}

}  // namespace

double PassAtK(std::uint32_t samples, std::uint32_t passed, std::uint32_t k) {
  TANDEM_CHECK(k >= 1 && k <= samples && passed <= samples, "pass@", k, " of ", passed, " in ", samples);
  if (samples - passed < k) return 1;
  double none = 1;  // C(n-c, k) / C(n, k) = prod over i in (n-c, n] of 1 - k/i
  for (std::uint32_t i = samples - passed + 1; i <= samples; ++i) none *= 1 - static_cast<double>(k) / i;
  return 1 - none;
}

void PassCounter::Add(const RewardTable& samples) {
  Prompt prompt;
  for (const auto& row : samples) {
    if (!row[function_].has_value()) continue;
    ++prompt.samples;
    if (*row[function_] >= at_least_) ++prompt.passed;
  }
  prompts_.push_back(prompt);
}

std::optional<double> PassCounter::Mean(std::uint32_t k) const {
  double sum = 0;
  std::size_t count = 0;
  for (const Prompt& prompt : prompts_) {
    if (prompt.samples < k) continue;
    sum += PassAtK(prompt.samples, prompt.passed, k);
    ++count;
  }
  if (count == 0) return std::nullopt;
  return sum / static_cast<double>(count);
}

void CheckEvaluation(v1::JobSpec* spec, std::vector<std::string>* faults) {
  if (!spec->has_evaluation()) return;
  v1::EvaluationConfig* const evaluation = spec->mutable_evaluation();
  if (evaluation->samples_per_prompt() == 0) evaluation->set_samples_per_prompt(1);
  if (evaluation->samples_per_prompt() > kMaxSamples) {
    faults->push_back(
        absl::StrCat("evaluation.samples_per_prompt: ", evaluation->samples_per_prompt(), "; must be 1 to ", kMaxSamples));
  }
  if (evaluation->sampling().seed() != 0) {
    faults->push_back(absl::StrCat("evaluation.sampling.seed: ", evaluation->sampling().seed(),
                                   "; must not be set: seeds are derived from the job's"));
  }
  CheckPass(spec, faults);
  CheckMetric(spec, faults);
}

v1::SamplingParams EvaluationSampling(const v1::JobSpec& spec) {
  v1::SamplingParams sampling = spec.rollout().sampling();
  const v1::SamplingParams& own = spec.evaluation().sampling();
  if (own.stop_token_ids_size() > 0) sampling.clear_stop_token_ids();
  if (own.stop_strings_size() > 0) sampling.clear_stop_strings();
  sampling.MergeFrom(own);
  if (spec.evaluation().greedy()) sampling.set_temperature(0);
  return sampling;
}

bool RecordEvaluation(const v1::EvaluationConfig& config, std::uint64_t step, std::optional<double> value,
                      EvaluationProgress* progress) {
  progress->evaluated_step = step;
  if (!value.has_value() || !std::isfinite(*value)) {
    ++progress->evaluations_without_rise;
    return false;
  }
  const bool is_first = !progress->best_step.has_value();
  if (is_first || *value > progress->risen_value + config.early_stop().min_increase()) {
    progress->risen_value = *value;
    progress->evaluations_without_rise = 0;
  } else {
    ++progress->evaluations_without_rise;
  }
  if (!is_first && *value <= progress->best_value) return false;
  progress->best_step = step;
  progress->best_value = *value;
  return true;
}

bool HasStoppedRising(const v1::EvaluationConfig& config, const EvaluationProgress& progress) {
  return config.has_early_stop() && progress.evaluations_without_rise >= config.early_stop().patience();
}

}  // namespace tandem

#include "client/progress.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"

namespace tandem {
namespace {

constexpr std::size_t kRecentSteps = 5;
constexpr int kBarCells = 20;

// A bar of eighth blocks over [0, 1].
std::string Bar(double share) {
  static constexpr const char* kEighths[] = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  const int eighths = static_cast<int>(std::lround(std::clamp(share, 0.0, 1.0) * kBarCells * 8));
  std::string bar;
  for (int i = 0; i < eighths / 8; ++i) bar += "█";
  bar += kEighths[eighths % 8];
  const int used = eighths / 8 + (eighths % 8 != 0 ? 1 : 0);
  bar.append(static_cast<std::size_t>(kBarCells - used), ' ');
  return bar;
}

// "  rollout 34% forward 18% backward 41%": the stages' shares of the step's time, those of a hundredth or more.
std::string StageShares(const v1::StepMetrics& metrics) {
  std::string shares;
  const double whole = ValueOf(metrics, "step_time").value_or(0);
  if (whole <= 0) return shares;
  for (const char* stage : {"rollout", "reward", "score", "forward", "backward", "optimizer", "publish"}) {
    const double share = ValueOf(metrics, absl::StrCat(stage, "_seconds")).value_or(0) / whole;
    if (share >= 0.01) absl::StrAppendFormat(&shares, "%s%s %.0f%%", shares.empty() ? "  " : " ", stage, 100 * share);
  }
  return shares;
}

}  // namespace

std::string FormatDuration(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "?";
  const auto whole = static_cast<std::int64_t>(std::llround(seconds));
  if (whole >= 3600) return absl::StrFormat("%dh %02dm", whole / 3600, whole / 60 % 60);
  if (whole >= 60) return absl::StrFormat("%dm %02ds", whole / 60, whole % 60);
  return absl::StrFormat("%ds", whole);
}

std::optional<double> ValueOf(const v1::StepMetrics& metrics, const std::string& name) {
  for (const v1::NamedValue& value : metrics.values()) {
    if (value.name() == name) return value.value();
  }
  return std::nullopt;
}

std::string ProgressPrinter::StepLine(const v1::StepMetrics& metrics, std::uint32_t num_steps) {
  const double reward = ValueOf(metrics, "reward").value_or(std::nan(""));
  if (std::isfinite(reward)) recent_rewards_.push_back(reward);
  if (recent_rewards_.size() > kRecentSteps) recent_rewards_.pop_front();
  const double mean = recent_rewards_.empty() ? 0.0
                                              : std::accumulate(recent_rewards_.begin(), recent_rewards_.end(), 0.0) /
                                                    static_cast<double>(recent_rewards_.size());
  std::string line =
      absl::StrFormat("step %*d/%d  reward %6.3f  mean %6.3f |%s|", static_cast<int>(absl::StrCat(num_steps).size()),
                      metrics.step(), num_steps, reward, mean, Bar(mean));
  for (const v1::NamedValue& value : metrics.values()) {
    absl::string_view name = value.name();
    if (absl::ConsumePrefix(&name, "rewards/") && absl::ConsumeSuffix(&name, "/mean")) {
      absl::StrAppendFormat(&line, "  %s %.3f", name, value.value());
    }
  }
  if (const auto length = ValueOf(metrics, "completions/mean_length")) absl::StrAppendFormat(&line, "  length %.1f", *length);
  if (const auto kl = ValueOf(metrics, "kl")) absl::StrAppendFormat(&line, "  kl %.4f", *kl);
  if (const auto speed = ValueOf(metrics, "rollout_tokens_per_second")) absl::StrAppendFormat(&line, "  %.0f tok/s", *speed);
  absl::StrAppend(&line, StageShares(metrics), "  left ", FormatDuration(metrics.seconds_left()));
  return line;
}

std::string ProgressPrinter::EvaluationLine(const v1::EvaluationMetrics& metrics) {
  std::string line = absl::StrFormat("held-out after step %d: reward %.3f", metrics.step(), metrics.reward());
  for (const v1::NamedValue& value : metrics.rewards()) absl::StrAppendFormat(&line, "  %s %.3f", value.name(), value.value());
  for (const v1::NamedValue& value : metrics.values()) {
    absl::string_view name = value.name();
    if (absl::ConsumePrefix(&name, "pass_at_")) absl::StrAppendFormat(&line, "  pass@%s %.3f", name, value.value());
  }
  absl::StrAppendFormat(&line, "  (%d prompts)", metrics.num_prompts());
  if (!metrics.metric().empty() && metrics.step() > 0) {
    absl::StrAppendFormat(&line, "  best %s %.3f after step %d", metrics.metric(), metrics.best_value(), metrics.best_step());
  }
  if (metrics.stops_job()) absl::StrAppend(&line, "; it does not rise any more: the job ends here");
  return line;
}

}  // namespace tandem

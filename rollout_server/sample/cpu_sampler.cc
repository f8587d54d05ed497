// The sampler on the CPU, row by row.
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <utility>

#include "common/base/random.h"
#include "rollout_server/sample/sampler_backends.h"
#include "rollout_server/sample/softmax.h"

namespace tandem {
namespace {

// The first index whose running sum passes `target`, by tiles and then within one. Zeros are never drawn.
std::size_t InvertCdf(std::span<const float> weights, const std::vector<double>& tile_sums, double target) {
  double before = 0;
  for (std::size_t tile = 0; tile < tile_sums.size(); ++tile) {
    const bool is_last = tile + 1 == tile_sums.size();
    if (!is_last && before + tile_sums[tile] <= target) {
      before += tile_sums[tile];
      continue;
    }
    const std::size_t begin = tile * kSoftmaxTile;
    const std::size_t end = std::min(begin + kSoftmaxTile, weights.size());
    double sum = before;
    for (std::size_t i = begin; i < end; ++i) {
      sum += double{weights[i]};
      if (sum > target && weights[i] > 0) return i;
    }
    before += tile_sums[tile];
    if (!is_last && before > target) {  // rounding left the target just past the tile's last weight
      for (std::size_t i = end; i > begin; --i) {
        if (weights[i - 1] > 0) return i - 1;
      }
    }
  }
  // The target lies past the last positive weight, by rounding.
  std::size_t last = weights.size() - 1;
  while (last > 0 && weights[last] == 0) --last;
  return last;
}

class CpuSampler : public Sampler {
 public:
  absl::StatusOr<PendingDraw> Start(const Logits& logits, std::span<const DrawInput> inputs) override {
    TANDEM_ASSIGN_OR_RETURN(const int slot, slots_.Take());
    Outcome& outcome = outcomes_[static_cast<std::size_t>(slot)];
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      outcome.tokens.push_back(DrawRow(logits.row(static_cast<std::int64_t>(i)), inputs[i]));
      outcome.ids.push_back(outcome.tokens.back().ok() ? outcome.tokens.back()->id : 0);
    }
    return PendingDraw{.slot = slot, .ids = outcome.ids.data(), .id_stride = 1};
  }

  std::vector<absl::StatusOr<DrawnToken>> Collect(const PendingDraw& draw) override {
    slots_.GiveBack(draw.slot);
    return std::exchange(outcomes_[static_cast<std::size_t>(draw.slot)], {}).tokens;
  }

 private:
  struct Outcome {
    std::vector<absl::StatusOr<DrawnToken>> tokens;
    std::vector<std::uint32_t> ids;
  };
  struct Candidate {
    float logit = 0;
    std::uint32_t id = 0;
  };
  absl::StatusOr<DrawnToken> DrawRow(std::span<const float> raw_logits, const DrawInput& input);
  std::span<const float> Penalise(std::span<const float> raw_logits, const DrawInput& input);
  // Fills candidates_ with what truncation keeps, largest first, and returns its mass.
  double Truncate(std::span<const float> logits, const SamplingParams& params, double total);

  DrawSlots slots_;
  std::array<Outcome, kMaxPendingDraws> outcomes_;
  std::vector<float> penalised_;
  std::vector<std::uint8_t> is_seen_;
  std::vector<float> exponentials_;
  std::vector<double> tile_sums_;
  std::vector<Candidate> candidates_;
};

absl::StatusOr<DrawnToken> CpuSampler::DrawRow(std::span<const float> raw_logits, const DrawInput& input) {
  const SamplingParams& params = *input.params;
  const RowMaximum raw = FindMaximum(raw_logits);
  if (raw.has_nan || !std::isfinite(raw.value)) return BadLogits(raw.has_nan, raw.value, input.position, false);
  exponentials_.resize(raw_logits.size());
  const double raw_total = Exponentiate(raw_logits, raw.value, 1.0f, exponentials_, &tile_sums_);
  const double raw_log_total = std::log(raw_total) + double{raw.value};
  const auto raw_logprob = [&](std::uint32_t id) { return static_cast<float>(double{raw_logits[id]} - raw_log_total); };

  std::span<const float> logits = raw_logits;
  float maximum = raw.value;
  if (params.penalises()) {
    logits = Penalise(raw_logits, input);
    const RowMaximum penalised = FindMaximum(logits);
    if (penalised.has_nan || !std::isfinite(penalised.value)) {
      return BadLogits(penalised.has_nan, penalised.value, input.position, true);
    }
    maximum = penalised.value;
  }
  DrawnToken drawn;
  if (params.temperature == 0) {
    drawn.id = static_cast<std::uint32_t>(std::find(logits.begin(), logits.end(), maximum) - logits.begin());
    drawn.raw_logprob = raw_logprob(drawn.id);
    return drawn;
  }
  const auto inverse_temperature = static_cast<float>(1.0 / params.temperature);
  double total = raw_total;
  if (params.temperature != 1 || params.penalises()) {
    total = Exponentiate(logits, maximum, inverse_temperature, exponentials_, &tile_sums_);
  }
  const double uniform = RandomUniform(input.seed, input.position);
  double mass = 1;
  if (params.truncates()) {
    mass = Truncate(logits, params, total);
    double target = uniform * mass * total;
    std::size_t chosen = 0;
    for (; chosen + 1 < candidates_.size(); ++chosen) {
      target -= double{exponentials_[candidates_[chosen].id]};
      if (target < 0) break;
    }
    drawn.id = candidates_[chosen].id;
  } else {
    drawn.id = static_cast<std::uint32_t>(InvertCdf(exponentials_, tile_sums_, uniform * total));
  }
  const double exponent = double{(logits[drawn.id] - maximum) * inverse_temperature};
  drawn.rollout_logprob = static_cast<float>(exponent - std::log(total) - std::log(mass));
  drawn.raw_logprob = raw_logprob(drawn.id);
  drawn.kept_mass = static_cast<float>(mass);
  return drawn;
}

std::span<const float> CpuSampler::Penalise(std::span<const float> raw_logits, const DrawInput& input) {
  penalised_.assign(raw_logits.begin(), raw_logits.end());
  is_seen_.assign(raw_logits.size(), 0);
  const auto repetition = static_cast<float>(input.params->repetition_penalty);
  const auto presence = static_cast<float>(input.params->presence_penalty);
  constexpr std::uint8_t kInText = 1;
  constexpr std::uint8_t kInCompletion = 2;
  for (std::uint32_t id : input.prompt) is_seen_[id] |= kInText;
  for (std::uint32_t id : input.completion) is_seen_[id] |= kInText | kInCompletion;
  const auto penalise = [&](std::uint32_t id) {
    if (is_seen_[id] == 0) return;
    float& logit = penalised_[id];
    logit = logit > 0 ? logit / repetition : logit * repetition;  // Keskar et al. 2019 (1909.05858), section 4.1
    if ((is_seen_[id] & kInCompletion) != 0) logit -= presence;
    is_seen_[id] = 0;  // once a token, however often it stands there
  };
  for (std::uint32_t id : input.prompt) penalise(id);
  for (std::uint32_t id : input.completion) penalise(id);
  return penalised_;
}

double CpuSampler::Truncate(std::span<const float> logits, const SamplingParams& params, double total) {
  const std::size_t vocab_size = logits.size();
  const std::size_t top_k = params.top_k == 0 ? vocab_size : std::min<std::size_t>(params.top_k, vocab_size);
  const auto weight = [&](const Candidate& candidate) { return double{exponentials_[candidate.id]}; };
  const auto sum = [&] {
    return std::accumulate(candidates_.begin(), candidates_.end(), 0.0,
                           [&](double before, const Candidate& candidate) { return before + weight(candidate); });
  };
  // Leave out early what cannot stay, to sort little. The largest weight is 1; weights below (1 - top_p) total / V are together
  // lighter than what top-p drops. With top-k and top-p both on, top-p needs the mass of all that top-k keeps.
  double least = 0;
  if (params.top_p == 1 || top_k == vocab_size) {
    least = std::max(params.min_p, (1 - params.top_p) * total / static_cast<double>(vocab_size));
  }
  candidates_.clear();
  for (std::size_t i = 0; i < vocab_size; ++i) {
    if (double{exponentials_[i]} >= least) candidates_.push_back({.logit = logits[i], .id = static_cast<std::uint32_t>(i)});
  }
  const auto is_before = [](const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
  };
  if (top_k < candidates_.size()) {
    std::nth_element(candidates_.begin(), candidates_.begin() + top_k, candidates_.end(), is_before);
    candidates_.resize(top_k);
  }
  std::sort(candidates_.begin(), candidates_.end(), is_before);
  if (params.top_p < 1) {
    // A token stays while what stands before it is lighter than top_p; the first always stays.
    const double limit = params.top_p * (top_k < vocab_size ? sum() : total);
    double before = 0;
    std::size_t kept = 0;
    while (kept < candidates_.size() && (kept == 0 || before < limit)) before += weight(candidates_[kept++]);
    candidates_.resize(kept);
  }
  while (candidates_.size() > 1 && weight(candidates_.back()) < params.min_p) candidates_.pop_back();
  return std::min(1.0, sum() / total);
}

}  // namespace

std::unique_ptr<Sampler> CreateCpuSampler() { return std::make_unique<CpuSampler>(); }

}  // namespace tandem

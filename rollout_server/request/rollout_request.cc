#include "rollout_server/request/rollout_request.h"

#include <cmath>

namespace tandem {
namespace {

constexpr int kMaxStopTokenIds = 64;
constexpr int kMaxStopStrings = 16;
constexpr std::size_t kMaxStopStringBytes = 256;
constexpr double kMinTemperature = 1e-4;

absl::Status Refuse(std::string_view field, const std::string& value, std::string_view limit) {
  return absl::InvalidArgumentError(absl::StrCat("sampling.", ToAbsl(field), ": ", value, " is not ", ToAbsl(limit)));
}

}  // namespace

absl::StatusOr<SamplingParams> ParseSamplingParams(const v1::SamplingParams& message, int vocab_size) {
  SamplingParams params;
  params.temperature = message.temperature();
  // Below the limit 1 / temperature times a logit is no number any more.
  if (params.temperature != 0 && !(params.temperature >= kMinTemperature && params.temperature <= 100)) {
    return Refuse("temperature", absl::StrCat(params.temperature), "0 (greedy) or in [1e-4, 100]");
  }
  params.top_k = message.top_k();
  params.top_p = message.top_p() == 0 ? 1 : message.top_p();
  if (!(params.top_p > 0 && params.top_p <= 1)) return Refuse("top_p", absl::StrCat(message.top_p()), "in (0, 1] (0: off)");
  params.min_p = message.min_p();
  if (!(params.min_p >= 0 && params.min_p < 1)) return Refuse("min_p", absl::StrCat(params.min_p), "in [0, 1)");
  params.repetition_penalty = message.repetition_penalty() == 0 ? 1 : message.repetition_penalty();
  if (!(params.repetition_penalty >= 0.01 && params.repetition_penalty <= 100)) {
    return Refuse("repetition_penalty", absl::StrCat(message.repetition_penalty()), "in [0.01, 100] (0: off)");
  }
  params.presence_penalty = message.presence_penalty();
  if (!(params.presence_penalty >= -2 && params.presence_penalty <= 2)) {
    return Refuse("presence_penalty", absl::StrCat(params.presence_penalty), "in [-2, 2]");
  }
  params.seed = message.seed();
  params.max_tokens = message.max_tokens();
  if (params.max_tokens < 1) return Refuse("max_tokens", absl::StrCat(params.max_tokens), "at least 1");
  if (message.stop_token_ids_size() > kMaxStopTokenIds) {
    return Refuse("stop_token_ids", absl::StrCat(message.stop_token_ids_size(), " ids"),
                  absl::StrCat("at most ", kMaxStopTokenIds));
  }
  for (std::uint32_t id : message.stop_token_ids()) {
    if (id >= static_cast<std::uint32_t>(vocab_size)) {
      return Refuse("stop_token_ids", absl::StrCat(id), absl::StrCat("below the vocabulary's ", vocab_size));
    }
    params.stop_token_ids.push_back(id);
  }
  if (message.stop_strings_size() > kMaxStopStrings) {
    return Refuse("stop_strings", absl::StrCat(message.stop_strings_size(), " strings"),
                  absl::StrCat("at most ", kMaxStopStrings));
  }
  for (const std::string& text : message.stop_strings()) {
    if (text.empty() || text.size() > kMaxStopStringBytes) {
      return Refuse("stop_strings", absl::StrCat("a string of ", text.size(), " bytes"),
                    absl::StrCat("1 to ", kMaxStopStringBytes, " bytes long"));
    }
    params.stop_strings.push_back(text);
  }
  params.ignore_end_tokens = message.ignore_end_tokens();
  return params;
}

absl::Status CheckLength(std::uint64_t prompt_tokens, std::uint64_t max_tokens, const RequestLimits& limits) {
  const std::uint64_t total_tokens = prompt_tokens + max_tokens;
  if (total_tokens > static_cast<std::uint64_t>(limits.max_positions)) {
    return absl::InvalidArgumentError(absl::StrCat("prompt of ", prompt_tokens, " tokens and max_tokens ", max_tokens, " make ",
                                                   total_tokens, ", above the model's ", limits.max_positions, " positions"));
  }
  if (total_tokens > limits.pool_tokens) {
    return absl::ResourceExhaustedError(absl::StrCat("prompt of ", prompt_tokens, " tokens and max_tokens ", max_tokens, " make ",
                                                     total_tokens, ", above the KV cache's ", limits.pool_tokens, " tokens"));
  }
  return absl::OkStatus();
}

}  // namespace tandem

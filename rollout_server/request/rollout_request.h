// A generation request as plain, checked values: first in the rollout server's loop. Made once by BatchReader, moved to the
// engine, not edited later. Immutable; thread-compatible.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "proto/rollout.pb.h"

namespace tandem {

struct SamplingParams {
  double temperature = 1;   // 0: greedy
  std::uint32_t top_k = 0;  // 0: off
  double top_p = 1;
  double min_p = 0;
  double repetition_penalty = 1;
  double presence_penalty = 0;
  std::uint64_t seed = 0;  // members draw with DeriveSeed(seed, member_index)
  std::uint32_t max_tokens = 0;
  std::vector<std::uint32_t> stop_token_ids = {};
  std::vector<std::string> stop_strings = {};
  bool ignore_end_tokens = false;

  bool truncates() const { return top_k > 0 || top_p < 1 || min_p > 0; }
  bool penalises() const { return repetition_penalty != 1 || presence_penalty != 0; }
};

struct GroupRequest {
  std::uint32_t group_index = 0;
  std::uint32_t group_size = 0;
  SamplingParams sampling;
  std::shared_ptr<const std::vector<std::uint32_t>> prompt;  // never empty
  std::string prompt_kind;  // "ids", "text" or "messages": how the ids were made, a part of the cache key
};

struct BatchRequest {
  std::string job;                   // empty: the base model
  std::uint64_t weight_version = 0;  // 0: whichever is active
  v1::ScheduleMode mode = v1::SCHEDULE_MODE_UNSPECIFIED;
  bool return_text = false;
  std::vector<GroupRequest> groups;
};

// What this server can serve, by model, cache and flags.
struct RequestLimits {
  int vocab_size = 0;
  int max_positions = 0;
  std::uint64_t pool_tokens = 0;    // KV blocks x tokens a block
  std::uint64_t max_sequences = 0;  // of one batch: what the waiting queue can hold
};

// Errors: INVALID_ARGUMENT naming field, value and limit.
absl::StatusOr<SamplingParams> ParseSamplingParams(const v1::SamplingParams& message, int vocab_size);

// A prompt and the longest completion must fit the model and, alone, the cache (CASES C07 a).
// Errors: INVALID_ARGUMENT (positions), RESOURCE_EXHAUSTED (KV cache), both naming sum and limit.
absl::Status CheckLength(std::uint64_t prompt_tokens, std::uint64_t max_tokens, const RequestLimits& limits);

}  // namespace tandem

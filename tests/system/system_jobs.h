// The small job that the system tests run: a tiny random model learns to end its completions.
#pragma once

#include <string>

#include "absl/strings/str_cat.h"
#include "tests/support/tiny_model.h"
#include "tests/system/daemon_pair.h"

namespace tandem {

// The tiny model, with heads of a size that the device's attention has.
inline TinyModelOptions SystemModel() {
  TinyModelOptions options;
  if (TestDevice() == Device::kCuda) options.head_dim = 64;
  return options;
}

// Rows of the data set: short prompts, all different.
inline std::string TinyRows(int count) {
  std::string rows;
  for (int i = 0; i < count; ++i) absl::StrAppend(&rows, "{\"prompt\": \"say ", i, "\", \"answer\": ", i, "}\n");
  return rows;
}

inline std::string TinyJob(int num_steps, int seed, int checkpoint_interval = 1) {
  return absl::StrCat("name: \"tiny\" seed: ", seed, " num_steps: ", num_steps, R"(
    rollout { prompts_per_step: 4 group_size: 8 sampling { temperature: 1 max_tokens: 12 } }
    rewards { name: "ended" weight: 1 ended_by_itself {} }
    loss { preset: LOSS_PRESET_DR_GRPO }
    adapter { rank: 4 alpha: 8 }
    optimizer { learning_rate: 2e-2 }
    checkpoint { interval_steps: )",
                      checkpoint_interval, " }");
}

}  // namespace tandem

// Reward functions from text, and their scores.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "google/protobuf/text_format.h"
#include "gtest/gtest.h"
#include "trainer_server/reward/reward.h"

namespace tandem {

using Json = nlohmann::json;

inline v1::RewardConfig Config(const std::string& text) {
  v1::RewardConfig config;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &config)) << text;
  return config;
}

inline std::unique_ptr<RewardFunction> Make(const std::string& text) {
  auto function = MakeRewardFunction(Config("weight: 1 " + text), "rewards[0].");
  EXPECT_TRUE(function.ok()) << text << ": " << function.status();
  return function.ok() ? *std::move(function) : nullptr;
}

// The fault lines of a config.
inline std::string Faults(const std::string& text) {
  const auto function = MakeRewardFunction(Config(text), "rewards[2].");
  EXPECT_EQ(function.status().code(), absl::StatusCode::kInvalidArgument) << text;
  return std::string(function.status().message());
}

inline absl::StatusOr<std::optional<double>> ScoreRow(const RewardFunction& function, const Json& row,
                                                      const std::string& completion, bool is_truncated = false) {
  const RewardInput input{.row = &row, .completion = completion, .completion_tokens = 10, .is_truncated = is_truncated};
  TANDEM_ASSIGN_OR_RETURN(const RewardColumn rewards, function.Score({&input, 1}, {}));
  return rewards[0];
}

// Of a completion of so many tokens, where they alone count.
inline double ScoreLength(const RewardFunction& function, int completion_tokens) {
  const RewardInput input{.row = nullptr, .completion = "", .completion_tokens = completion_tokens};
  const auto rewards = function.Score({&input, 1}, {});
  EXPECT_TRUE(rewards.ok() && rewards->at(0).has_value()) << rewards.status();
  return rewards.ok() ? rewards->at(0).value_or(-99) : -99;
}

inline double Score(const RewardFunction& function, const std::string& completion, const Json& row = Json::object()) {
  const auto reward = ScoreRow(function, row, completion);
  EXPECT_TRUE(reward.ok() && reward->has_value()) << reward.status();
  return reward.ok() ? reward->value_or(-99) : -99;
}

}  // namespace tandem

// Remote reward functions against servers that behave, and servers that do not.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <thread>

#include "absl/time/clock.h"
#include "common/base/clock.h"
#include "common/rpc/channel.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "proto/reward.grpc.pb.h"
#include "tests/trainer_server/reward/reward_testing.h"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Received {
  v1::ScoreHeader header;
  std::string row;
  std::vector<std::string> completions;
  std::vector<bool> is_truncated;
  std::size_t largest_piece = 0;
};

// Hands each call, received whole, to `respond`.
class FakeRewards final : public v1::RewardService::Service {
 public:
  using Stream = grpc::ServerReaderWriter<v1::ScoreResponse, v1::ScoreRequest>;
  std::function<grpc::Status(const Received&, Stream*)> respond;
  std::atomic<int> num_calls = 0;
  bool answers_at_once = false;

  grpc::Status Score(grpc::ServerContext*, Stream* stream) override {
    ++num_calls;
    Received received;
    v1::ScoreRequest request;
    while (!answers_at_once && stream->Read(&request)) {
      if (request.has_header()) {
        received.header = request.header();
        received.completions.resize(received.header.num_completions());
        received.is_truncated.resize(received.header.num_completions());
        received.row = received.header.row_json();
        continue;
      }
      if (request.has_row_piece()) {
        received.largest_piece = std::max(received.largest_piece, request.row_piece().size());
        received.row += request.row_piece();
        continue;
      }
      received.largest_piece = std::max(received.largest_piece, request.completion().text().size());
      received.completions.at(request.completion().index()) += request.completion().text();
      received.is_truncated.at(request.completion().index()) = request.completion().is_truncated();
    }
    return respond(received, stream);
  }
};

grpc::Status RespondLengths(const Received& received, FakeRewards::Stream* stream) {
  for (std::size_t i = 0; i < received.completions.size(); ++i) {
    v1::ScoreResponse response;
    response.set_index(static_cast<std::uint32_t>(i));
    if (received.completions[i].empty()) {
      response.set_not_applicable(true);
    } else {
      response.set_reward(static_cast<double>(received.completions[i].size()));
    }
    stream->Write(response);
  }
  return grpc::Status::OK;
}

class RemoteRewardTest : public ::testing::Test {
 protected:
  RemoteRewardTest() { Start("127.0.0.1:0"); }
  ~RemoteRewardTest() override { Stop(); }
  void Start(const std::string& address) {
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&rewards_);
    server_ = builder.BuildAndStart();
    address_ = absl::StrCat("127.0.0.1:", port);
  }
  void Stop() { server_->Shutdown(GrpcDeadline(MonotonicTime::Now() + absl::Seconds(1))); }
  std::unique_ptr<RewardFunction> MakeRemote(const std::string& more = "", const std::string& around = "") const {
    return Make(absl::StrCat(around, " remote { address: '", address_, "' function: 'judge' ", more, " }"));
  }
  static absl::StatusOr<RewardColumn> ScoreTexts(const RewardFunction& function, const std::vector<std::string>& texts,
                                                 const RewardCall& call = {}) {
    static const Json row = {{"prompt", "say"}, {"answer", 4}};
    std::vector<RewardInput> inputs;
    for (const std::string& text : texts) inputs.push_back({.row = &row, .completion = text, .is_truncated = text == "cut"});
    return function.Score(inputs, call);
  }

  FakeRewards rewards_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
};

TEST_F(RemoteRewardTest, AGroupIsSentInPiecesAndScored) {
  Received received;
  rewards_.respond = [&](const Received& whole, FakeRewards::Stream* stream) {
    received = whole;
    return RespondLengths(whole, stream);
  };
  const std::string long_text = std::string(700'000, 'x') + "\xc3\xa4";
  EXPECT_THAT(*ScoreTexts(*MakeRemote(), {"ab", "", long_text, "cut", "\xff!"}),
              ElementsAre(2.0, std::nullopt, 700'002.0, 3.0, 4.0));
  EXPECT_EQ(received.header.function(), "judge");
  EXPECT_EQ(received.completions[2], long_text);
  EXPECT_THAT(received.is_truncated, ElementsAre(false, false, false, true, false));
  EXPECT_EQ(Json::parse(received.row)["answer"], 4);
  const Json long_row = {{"prompt", std::string(700'000, 'p')}};
  const RewardInput of_long_row{.row = &long_row, .completion = "abc"};
  EXPECT_THAT(*MakeRemote()->Score({&of_long_row, 1}, {}), ElementsAre(3.0));
  EXPECT_EQ(Json::parse(received.row), long_row);
  EXPECT_LE(received.largest_piece, 256u << 10);
  EXPECT_EQ(MakeRemote()->name(), "judge");
}

TEST_F(RemoteRewardTest, FailuresThatMayPassAreTriedAgain) {
  std::atomic<int> failures = 3;
  rewards_.respond = [&](const Received& received, FakeRewards::Stream* stream) {
    if (failures-- > 0) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "busy");
    return RespondLengths(received, stream);
  };
  EXPECT_THAT(*ScoreTexts(*MakeRemote(), {"abc"}), ElementsAre(3.0));
  EXPECT_EQ(rewards_.num_calls, 4);
  // A server that is away for a while.
  Stop();
  std::thread restart([&] {
    absl::SleepFor(absl::Milliseconds(500));
    Start(address_);
  });
  EXPECT_THAT(*ScoreTexts(*MakeRemote("max_attempts: 20"), {"abcd"}), ElementsAre(4.0));
  restart.join();
}

TEST_F(RemoteRewardTest, AServerThatCancelsIsNoInterruption) {
  rewards_.respond = [](const Received&, FakeRewards::Stream*) { return grpc::Status(grpc::StatusCode::CANCELLED, "stopping"); };
  const absl::Status failed = ScoreTexts(*MakeRemote("max_attempts: 2"), {"a"}).status();
  EXPECT_TRUE(absl::IsAborted(failed)) << failed;
  EXPECT_THAT(std::string(failed.message()), HasSubstr("the server cancelled: stopping"));
  EXPECT_EQ(rewards_.num_calls, 2);
}

// The calls end before all was sent: what was answered until then counts.
TEST_F(RemoteRewardTest, AServerMayAnswerWithoutReadingAll) {
  rewards_.answers_at_once = true;
  rewards_.respond = [](const Received&, FakeRewards::Stream* stream) {
    Received received;
    received.completions = {"four"};
    return RespondLengths(received, stream);
  };
  EXPECT_THAT(*ScoreTexts(*MakeRemote(), {std::string(20'000'000, 'x')}), ElementsAre(4.0));
}

TEST_F(RemoteRewardTest, WhatFailsForGoodIsNamedOnce) {
  const auto said = [&](const std::string& more = "max_attempts: 2 time_limit_seconds: 0.3") {
    rewards_.num_calls = 0;
    const auto rewards = ScoreTexts(*MakeRemote(more, "name: 'quality'"), {"a", "b"});
    EXPECT_FALSE(rewards.ok());
    return std::string(rewards.status().message());
  };
  rewards_.respond = [](const Received&, FakeRewards::Stream*) {
    return grpc::Status(grpc::StatusCode::NOT_FOUND, "no function 'judge'");
  };
  EXPECT_THAT(said(), HasSubstr("reward function 'quality': judge at " + address_ + ": no function 'judge'"));
  EXPECT_EQ(rewards_.num_calls, 1);
  rewards_.respond = [](const Received& received, FakeRewards::Stream* stream) {
    Received fewer = received;
    fewer.completions.pop_back();
    return RespondLengths(fewer, stream);
  };
  EXPECT_THAT(said(), HasSubstr("answered 1 scores for 2 completions"));
  EXPECT_EQ(rewards_.num_calls, 1);
  rewards_.respond = [](const Received& received, FakeRewards::Stream* stream) {
    Received more = received;
    more.completions.emplace_back("c");
    return RespondLengths(more, stream);
  };
  EXPECT_THAT(said(), HasSubstr("answered a score of completion 2; completion 2 of 2 comes next"));
  rewards_.respond = [](const Received&, FakeRewards::Stream* stream) {
    for (std::uint32_t i = 0; i < 2; ++i) {
      v1::ScoreResponse response;
      response.set_index(i);
      response.set_reward(i == 0 ? 1 : std::numeric_limits<double>::quiet_NaN());
      stream->Write(response);
    }
    return grpc::Status::OK;
  };
  EXPECT_THAT(said(), HasSubstr("reward function 'quality': completion 1: returned nan, must be finite or not applicable"));
  EXPECT_THAT(*ScoreTexts(*MakeRemote("", "on_failure: REWARD_FAILURE_POLICY_COUNT_AS_NONE"), {"a", "b"}),
              ElementsAre(1.0, std::nullopt));
  rewards_.respond = [](const Received&, FakeRewards::Stream*) {
    absl::SleepFor(absl::Seconds(1));
    return grpc::Status::OK;
  };
  EXPECT_THAT(said(), HasSubstr("Deadline Exceeded"));
  EXPECT_EQ(rewards_.num_calls, 2);
  std::vector<std::string> failures;
  const auto counted =
      ScoreTexts(*MakeRemote("max_attempts: 1 time_limit_seconds: 0.2", "on_failure: REWARD_FAILURE_POLICY_COUNT_AS_NONE"),
                 {"a", "b"}, {.on_failure = [&](const RewardFailure& failure) { failures.push_back(failure.function); }});
  EXPECT_EQ(*counted, RewardColumn(2));
  EXPECT_THAT(failures, ElementsAre("judge"));
}

TEST_F(RemoteRewardTest, AnInterruptedCallEndsAtOnce) {
  rewards_.respond = [](const Received&, FakeRewards::Stream*) {
    absl::SleepFor(absl::Seconds(2));
    return grpc::Status::OK;
  };
  const MonotonicTime begin = MonotonicTime::Now();
  const auto rewards = ScoreTexts(*MakeRemote("time_limit_seconds: 3600"), {"a"},
                                  {.is_interrupted = [&] { return MonotonicTime::Now() - begin > absl::Milliseconds(200); }});
  EXPECT_TRUE(absl::IsCancelled(rewards.status())) << rewards.status();
  EXPECT_LT(MonotonicTime::Now() - begin, absl::Seconds(1.5));
}

TEST(RemoteRewardConfigTest, FaultsNameFieldValueAndLimit) {
  EXPECT_EQ(
      Faults("weight: 1 name: 'x' remote { address: 'here' max_attempts: 101 time_limit_seconds: 9999 }"),
      "rewards[2].remote.address: 'here', must be host:port\nrewards[2].remote.function: '', must be 1 to 64 bytes\n"
      "rewards[2].remote.max_attempts: 101, must be 1 to 100\nrewards[2].remote.time_limit_seconds: 9999, must be 0.001 to 3600");
}

}  // namespace
}  // namespace tandem

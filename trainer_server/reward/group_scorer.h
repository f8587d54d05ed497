// Scores groups on threads of its own while others are still being drawn. Between rollout and advantage in the loop. Its public
// functions are confined to one thread.
#pragma once

#include <cstdint>
#include <deque>
#include <thread>
#include <vector>

#include "common/base/mutex.h"
#include "trainer_server/reward/reward_set.h"

namespace tandem {

class GroupScorer {
 public:
  // `rewards` and what `is_interrupted` needs live as long.
  GroupScorer(const RewardSet* rewards, int num_threads, std::function<bool()> is_interrupted);
  ~GroupScorer();  // interrupts what is being scored

  // Of the groups that follow.
  void Begin(std::uint64_t step, std::uint64_t num_steps, std::size_t num_groups);
  // One group's completions, which may be scored from now on. A group that comes again replaces what it was. `place` is of its
  // row, for messages: "data set line 13". Requires: rows live until Finish or Abandon.
  void Add(std::size_t group_index, std::vector<RewardInput> completions, std::string place);
  // Waits for all groups. Errors: the first by group index, with its place; INTERNAL (a group never came). Nothing is being
  // scored afterwards.
  absl::StatusOr<std::vector<RewardTable>> Finish();
  // Drops what waits, interrupts what is being scored and waits for its end.
  void Abandon();
  // Failures that policies counted as None since Begin, with their places.
  std::vector<RewardFailure> TakeFailures();

 private:
  struct Group {
    std::vector<RewardInput> completions;
    std::string place;
    std::uint64_t version = 0;  // rises when the group comes again
    std::optional<absl::StatusOr<RewardTable>> rewards;
  };
  void Run();

  const RewardSet* const rewards_;
  const std::function<bool()> is_interrupted_;
  mutable Mutex mutex_;
  CondVar changed_;
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_abandoned_ ABSL_GUARDED_BY(mutex_) = false;
  std::uint64_t step_ ABSL_GUARDED_BY(mutex_) = 0, num_steps_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Group> groups_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::size_t> waiting_ ABSL_GUARDED_BY(mutex_);  // indices into groups_: bounded by them
  int num_running_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<RewardFailure> failures_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;
};

}  // namespace tandem

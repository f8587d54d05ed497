#include "trainer_server/reward/group_scorer.h"

#include <algorithm>
#include <utility>

namespace tandem {
namespace {

constexpr absl::Duration kTick = absl::Milliseconds(100);
constexpr std::size_t kMaxFailures = 1 << 16;  // kept of a step

}  // namespace

GroupScorer::GroupScorer(const RewardSet* rewards, int num_threads, std::function<bool()> is_interrupted)
    : rewards_(rewards), is_interrupted_(std::move(is_interrupted)) {
  for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { Run(); });
}

GroupScorer::~GroupScorer() {
  {
    MutexLock lock(&mutex_);
    is_stopping_ = true;
    changed_.SignalAll();
  }
  for (std::thread& thread : threads_) thread.join();
}

void GroupScorer::Begin(std::uint64_t step, std::uint64_t num_steps, std::size_t num_groups) {
  Abandon();
  MutexLock lock(&mutex_);
  is_abandoned_ = false;
  step_ = step;
  num_steps_ = num_steps;
  failures_.clear();
  groups_.clear();
  groups_.resize(num_groups);
}

void GroupScorer::Add(std::size_t group_index, std::vector<RewardInput> completions, std::string place) {
  MutexLock lock(&mutex_);
  if (group_index >= groups_.size()) return;
  Group& group = groups_[group_index];
  group.completions = std::move(completions);
  group.place = std::move(place);
  group.rewards.reset();
  ++group.version;
  if (std::ranges::find(waiting_, group_index) == waiting_.end()) waiting_.push_back(group_index);
  changed_.SignalAll();
}

absl::StatusOr<std::vector<RewardTable>> GroupScorer::Finish() {
  std::vector<RewardTable> tables;
  absl::Status first;
  {
    MutexLock lock(&mutex_);
    while (!waiting_.empty() || num_running_ > 0) changed_.WaitFor(&mutex_, kTick);  // functions have limits
    for (std::size_t g = 0; g < groups_.size() && first.ok(); ++g) {
      if (!groups_[g].rewards.has_value()) {
        first = absl::InternalError(absl::StrCat("group ", g, " of ", groups_.size(), " was never scored"));
      } else if (!groups_[g].rewards->ok()) {
        first = groups_[g].rewards->status();
      } else {
        tables.push_back(**std::move(groups_[g].rewards));
      }
    }
    groups_.clear();
  }
  if (!first.ok()) return first;
  return tables;
}

void GroupScorer::Abandon() {
  MutexLock lock(&mutex_);
  is_abandoned_ = true;
  waiting_.clear();
  while (num_running_ > 0) changed_.WaitFor(&mutex_, kTick);
}

std::vector<RewardFailure> GroupScorer::TakeFailures() {
  MutexLock lock(&mutex_);
  return std::exchange(failures_, {});
}

void GroupScorer::Run() {
  RewardCall call;
  call.is_interrupted = [this] {
    MutexLock lock(&mutex_);
    return is_stopping_ || is_abandoned_ || is_interrupted_();
  };
  std::string place;
  call.on_failure = [this, &place](const RewardFailure& failure) {
    MutexLock lock(&mutex_);
    if (failures_.size() < kMaxFailures) failures_.push_back({failure.function, absl::StrCat(place, ": ", failure.text)});
  };
  MutexLock lock(&mutex_);
  while (!is_stopping_) {
    if (waiting_.empty()) {
      changed_.WaitFor(&mutex_, kTick);
      continue;
    }
    const std::size_t index = waiting_.front();
    waiting_.pop_front();
    const std::uint64_t version = groups_[index].version;
    const std::vector<RewardInput> completions = std::move(groups_[index].completions);
    place = groups_[index].place;
    call.step = step_;
    call.num_steps = num_steps_;
    ++num_running_;
    mutex_.Unlock();
    absl::StatusOr<RewardTable> rewards = rewards_->Score(completions, call);
    if (!rewards.ok()) rewards = Annotate(rewards.status(), place);
    mutex_.Lock();
    --num_running_;
    if (index < groups_.size() && groups_[index].version == version) groups_[index].rewards = std::move(rewards);
    changed_.SignalAll();
  }
}

}  // namespace tandem

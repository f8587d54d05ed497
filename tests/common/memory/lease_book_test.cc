#include "common/memory/lease_book.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <optional>

#include "common/base/random.h"

namespace tandem {
namespace {

using Verdict = LeaseBook::Verdict;

v1::ByteRange Range() {
  v1::ByteRange range;
  range.set_begin_bytes(4096);
  range.set_end_bytes(8192);
  return range;
}

// CASES C34
TEST(LeaseBook, MessagesOutOfOrderGetOkOrTypedErrors) {
  LeaseBook book(Range(), v1::ROLE_ROLLOUT);
  EXPECT_EQ(book.Release(v1::ROLE_TRAINER, 1).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(book.Release(v1::ROLE_TRAINER, 1).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(book.CheckAcquire(v1::ROLE_TRAINER, 1).value(), Verdict::kMustYield);
  EXPECT_EQ(book.CheckAcquire(v1::ROLE_TRAINER, 1).value(), Verdict::kMustYield) << "a check changes nothing";
  book.Grant(v1::ROLE_TRAINER);
  EXPECT_EQ(book.epoch(), 2u);
  EXPECT_EQ(book.CheckAcquire(v1::ROLE_TRAINER, 1).value(), Verdict::kAlreadyHeld) << "the same request again";
  EXPECT_EQ(book.CheckAcquire(v1::ROLE_TRAINER, 0).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(book.CheckAcquire(v1::ROLE_TRAINER, 3).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(book.Release(v1::ROLE_TRAINER, 1).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(book.holder(), v1::ROLE_TRAINER) << "no refusal moves the lease";
  EXPECT_TRUE(book.Release(v1::ROLE_TRAINER, 2).value());
  EXPECT_FALSE(book.Release(v1::ROLE_TRAINER, 2).value()) << "the same message again";
  EXPECT_EQ(book.epoch(), 3u);
  EXPECT_EQ(book.CheckAcquire(v1::ROLE_TRAINER, 1).status().code(), absl::StatusCode::kAborted)
      << "a late request of an old epoch";
  EXPECT_EQ(book.Release(v1::ROLE_TRAINER, 3).status().code(), absl::StatusCode::kFailedPrecondition);
}

// CASES C34
TEST(LeaseBook, OnlyTheTrainerBorrows) {
  LeaseBook book(Range(), v1::ROLE_ROLLOUT);
  for (const v1::Role role : {v1::ROLE_UNSPECIFIED, v1::ROLE_ROLLOUT, static_cast<v1::Role>(7)}) {
    EXPECT_EQ(book.CheckAcquire(role, 1).status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(book.Release(role, 1).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

// CASES C34
TEST(LeaseBook, HundredCyclesRaiseTheEpochByTwoHundred) {
  LeaseBook book(Range(), v1::ROLE_ROLLOUT);
  for (std::uint64_t cycle = 0; cycle < 100; ++cycle) {
    ASSERT_EQ(book.CheckAcquire(v1::ROLE_TRAINER, 1 + 2 * cycle).value(), Verdict::kMustYield);
    book.Grant(v1::ROLE_TRAINER);
    ASSERT_TRUE(book.Release(v1::ROLE_TRAINER, 2 + 2 * cycle).value());
  }
  EXPECT_EQ(book.epoch(), 201u);
  EXPECT_EQ(book.holder(), v1::ROLE_ROLLOUT);
}

TEST(LeaseBook, TheDeadLoseWhatTheyHeldAndNothingElse) {
  LeaseBook book(Range(), v1::ROLE_ROLLOUT);
  EXPECT_FALSE(book.EndLeaseOf(v1::ROLE_TRAINER, v1::ROLE_ROLLOUT));
  EXPECT_EQ(book.epoch(), 1u);
  EXPECT_TRUE(book.EndLeaseOf(v1::ROLE_ROLLOUT, v1::ROLE_UNSPECIFIED));
  EXPECT_EQ(book.CheckAcquire(v1::ROLE_TRAINER, 2).status().code(), absl::StatusCode::kFailedPrecondition) << "nobody can yield";
  EXPECT_TRUE(book.TakeIfFree(v1::ROLE_ROLLOUT));
  EXPECT_FALSE(book.TakeIfFree(v1::ROLE_ROLLOUT));
  EXPECT_EQ(book.epoch(), 3u);
}

TEST(LeaseBook, AdoptsNoOlderStateAndNoOtherRange) {
  LeaseBook book(Range(), v1::ROLE_ROLLOUT);
  v1::LeaseState state = book.state();
  state.set_epoch(5);
  state.set_holder(v1::ROLE_TRAINER);
  ASSERT_TRUE(book.Adopt(state).ok());
  EXPECT_EQ(book.holder(), v1::ROLE_TRAINER);
  state.set_epoch(4);
  EXPECT_EQ(book.Adopt(state).code(), absl::StatusCode::kAborted);
  state.set_epoch(6);
  state.mutable_range()->set_end_bytes(9000);
  EXPECT_EQ(book.Adopt(state).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(book.epoch(), 5u);
}

// Two daemons whose messages are lost, repeated and late; either dies and comes back. At no time do both believe that they hold.
TEST(LeaseBook, NeverTwoHoldersUnderRandomOperations) {
  const std::uint64_t seed = static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  LeaseBook rollout(Range(), v1::ROLE_ROLLOUT), trainer(Range(), v1::ROLE_ROLLOUT);
  std::uint64_t highest = 1;
  for (std::uint64_t i = 0; i < 50'000; ++i) {
    const bool is_answer_lost = RandomUniform(seed, 3 * i) < 0.2;
    switch (RandomBelow(seed, 3 * i + 1, 6)) {
      case 0: {  // the trainer asks, at times by an epoch of the past
        const std::uint64_t epoch = trainer.epoch() - (RandomUniform(seed, 3 * i + 2) < 0.2 ? 1 : 0);
        const auto verdict = rollout.CheckAcquire(v1::ROLE_TRAINER, epoch);
        if (!verdict.ok()) break;
        if (*verdict == Verdict::kMustYield) rollout.Grant(v1::ROLE_TRAINER);
        if (is_answer_lost) break;
        ASSERT_TRUE(trainer.Adopt(rollout.state()).ok());
        break;
      }
      case 1: {  // it gives back what it holds; until the answer comes it touches nothing
        if (trainer.holder() != v1::ROLE_TRAINER) break;
        const auto released = rollout.Release(v1::ROLE_TRAINER, trainer.epoch());
        ASSERT_TRUE(released.ok()) << released.status() << " step " << i;
        ASSERT_TRUE(trainer.Adopt(rollout.state()).ok());
        break;
      }
      case 2:  // the release of an epoch that is long gone
        (void)rollout.Release(v1::ROLE_TRAINER, trainer.epoch() / 2);
        break;
      case 3:  // the trainer dies, and its successor learns the book
        rollout.EndLeaseOf(v1::ROLE_TRAINER, v1::ROLE_ROLLOUT);
        trainer = rollout;
        break;
      case 4:  // the rollout server dies; its successor learns the trainer's book, and takes what is free
        trainer.EndLeaseOf(v1::ROLE_ROLLOUT, v1::ROLE_UNSPECIFIED);
        trainer.TakeIfFree(v1::ROLE_ROLLOUT);
        rollout = trainer;
        break;
      default:
        break;
    }
    ASSERT_FALSE(rollout.holder() == v1::ROLE_ROLLOUT && trainer.holder() == v1::ROLE_TRAINER) << "step " << i;
    highest = std::max(highest, rollout.epoch());
  }
  EXPECT_GT(highest, 1000u);
}

}  // namespace
}  // namespace tandem

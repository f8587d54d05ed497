#include "rollout_server/sample/completion_text.h"

#include "gtest/gtest.h"
#include "tests/rollout_server/support/fake_model.h"

namespace tandem {
namespace {

struct Outcome {
  std::string text;
  std::size_t num_tokens = 0;  // pushed until the match, or all
  bool is_stopped = false;
};

Outcome Feed(const std::vector<std::string>& tokens, std::vector<std::string> stops) {
  CompletionText text(std::make_shared<testing::FakeTokenizer>(tokens), std::move(stops));
  Outcome outcome;
  for (std::uint32_t id = 0; id < tokens.size(); ++id) {
    CompletionText::Step step = text.Push(id);
    outcome.text += step.text;
    ++outcome.num_tokens;
    if (step.is_stopped) {
      outcome.is_stopped = true;
      return outcome;
    }
  }
  outcome.text += text.Finish();
  return outcome;
}

// CASES C05
TEST(CompletionTextTest, StopStringMayBeginInsideOneTokenAndEndInsideAnother) {
  const Outcome outcome = Feed({"xE", "N", "Dy", "z"}, {"END"});
  EXPECT_EQ(outcome.text, "x");
  EXPECT_EQ(outcome.num_tokens, 3u);
  EXPECT_TRUE(outcome.is_stopped);
}

// CASES C05
TEST(CompletionTextTest, StopStringOnTheFirstToken) {
  const Outcome outcome = Feed({"END", "y"}, {"END"});
  EXPECT_EQ(outcome.text, "");
  EXPECT_EQ(outcome.num_tokens, 1u);
}

// CASES C05
TEST(CompletionTextTest, FalseStartBeforeTheMatch) {
  const Outcome outcome = Feed({"E", "EN", "D"}, {"END"});
  EXPECT_EQ(outcome.text, "E");
  EXPECT_EQ(outcome.num_tokens, 3u);
  EXPECT_TRUE(outcome.is_stopped);
}

// CASES C05
TEST(CompletionTextTest, PartialMatchAtTheEndIsReleased) {
  const Outcome outcome = Feed({"x", "E", "N"}, {"END", "ENX"});
  EXPECT_EQ(outcome.text, "xEN");
  EXPECT_FALSE(outcome.is_stopped);
}

TEST(CompletionTextTest, TextIsHeldOnlyWhileAMatchIsOpen) {
  CompletionText text(std::make_shared<testing::FakeTokenizer>(std::vector<std::string>{"aE", "b", "\n", "\nU"}),
                      {"END", "\n\nUser"});
  EXPECT_EQ(text.Push(0).text, "a");
  EXPECT_EQ(text.Push(1).text, "Eb");
  EXPECT_EQ(text.Push(2).text, "");
  EXPECT_EQ(text.Push(3).text, "");
  EXPECT_EQ(text.Push(1).text, "\n\nUb");
  EXPECT_EQ(text.Finish(), "");
}

TEST(CompletionTextTest, TheEarliestOfSeveralMatchesCounts) { EXPECT_EQ(Feed({"abcd"}, {"cd", "b"}).text, "a"); }

}  // namespace
}  // namespace tandem

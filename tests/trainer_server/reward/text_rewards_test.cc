// Rewards of the completion alone: patterns, repetition, length, script, e-mail.
#include <chrono>

#include "gmock/gmock.h"
#include "tests/trainer_server/reward/reward_testing.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

TEST(TagCountTest, TrailingTextCosts) {
  const auto function = Make("tag_count { tags: ['<answer>\\n', '\\n</answer>'] trailing_penalty: 0.01 }");
  EXPECT_EQ(Score(*function, "<answer>\n7\n</answer>"), 1);
  EXPECT_NEAR(Score(*function, "<answer>\n7\n</answer>\xc3\xa4hm"), 0.97, 1e-12);
  EXPECT_EQ(Score(*function, "<answer>\n7\n</answer>" + std::string(1000, 'x')), 0);
  EXPECT_EQ(Score(*function, "<answer>\n7 and more"), 0.5);
}

TEST(RegularExpressionTest, SearchesOrMatchesTheWhole) {
  // As docs/rewards.md has it.
  const std::string think = "pattern: '(?s)<think>(?!.*<think>).*?</think>.*' full: true";
  struct Case {
    std::string config, completion;
    double reward;
  };
  const Case cases[] = {
      {"pattern: 'answer: \\\\d+'", "the answer: 42 is", 1},
      {"pattern: 'answer: \\\\d+' full: true", "the answer: 42 is", 0},
      {"pattern: 'answer: \\\\d+' full: true", "answer: 42", 1},
      {"pattern: 'a|ab' full: true", "ab", 1},
      {"pattern: '(?i)ANSWER'", "an answer", 1},
      {"pattern: '^<think>.*</think>$'", "<think>\n</think>", 0},
      {"pattern: '(?s)^<think>.*</think>$'", "<think>\n</think>", 1},
      {think, "<think>so\nthen</think>\n7", 1},
      {think, "<think>so</think>", 1},
      {think, "<think>" + std::string(200'000, 'a') + "</think>" + std::string(200'000, 'b'), 1},
      {think, "so</think>7", 0},
      {think, "<think>so<think></think>7", 0},
      {"pattern: '\\\\p{Greek}'", "\xce\xb1", 1},
      {"pattern: '^.$'", "\xc3\xa4", 1},
      {"pattern: 'b'",
       "\xff\xfe"
       "b",
       1},
      {"pattern: 'x'", "", 0},
      {"pattern: 'x*'", "", 1},
  };
  for (const Case& entry : cases) {
    EXPECT_EQ(Score(*Make("regular_expression { " + entry.config + " }"), entry.completion), entry.reward) << entry.config;
  }
}

TEST(RegularExpressionTest, SlowMatchesEndByTheirWork) {
  const std::string letters(100'000, 'a');
  for (const std::string pattern :
       {"(a+)+b", "(a|aa)+b", "(?:a+)*[^a]{3}b", "a+b", "a++b", "a+?a+?a+?b", "(?=(a+))a+b", "a(?R)?b"}) {
    const auto function = Make("regular_expression { pattern: '" + pattern + "' }");
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_EQ(Score(*function, letters + "! b"), 0) << pattern;
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5)) << pattern;
  }
  EXPECT_EQ(Score(*Make("regular_expression { pattern: 'a+b' }"), letters + "b"), 1);
}

TEST(RepetitionTest, MinusTheShareOfRepeatedNgrams) {
  const auto pairs = Make("repetition { ngram_size: 2 }");
  EXPECT_EQ(Score(*pairs, ""), 0);
  EXPECT_EQ(Score(*pairs, "one"), 0);
  EXPECT_EQ(Score(*pairs, "one two"), 0);
  EXPECT_EQ(Score(*pairs, "a b a b"), 2.0 / 3 - 1);
  EXPECT_EQ(Score(*pairs, "A b\n a\tB "), 2.0 / 3 - 1);
  EXPECT_EQ(Score(*pairs, "\xc3\x84 b \xc3\xa4 b"), 2.0 / 3 - 1);
  EXPECT_EQ(Score(*pairs, "ab c a bc"), 0);
  EXPECT_EQ(Score(*Make("repetition { ngram_size: 1 }"), "a a a a"), 0.25 - 1);
  std::string text;
  for (int i = 0; i < 200'000; ++i) text += "word ";
  EXPECT_EQ(Score(*Make("repetition { ngram_size: 32 }"), text), 1.0 / (200'000 - 31) - 1);
}

TEST(LengthTargetTest, FallsLinearlyWithTheDistance) {
  const auto function = Make("length_target { target_tokens: 100 width_tokens: 50 }");
  const std::pair<int, double> cases[] = {{100, 1}, {75, 0.5}, {125, 0.5}, {50, 0}, {0, 0}, {151, 0}, {1'000'000, 0}};
  for (const auto& [tokens, reward] : cases) { EXPECT_EQ(ScoreLength(*function, tokens), reward) << tokens; }
}

TEST(ScriptShareTest, ShareOfLettersInTheScripts) {
  const auto latin = Make("script_share { scripts: 'Latin' }");
  EXPECT_EQ(Score(*latin, "\xc3\xa4 b, 42!"), 1);
  EXPECT_EQ(Score(*latin, "a\xd0\xb6"), 0.5);
  EXPECT_EQ(Score(*latin, "42!"), 0);
  EXPECT_EQ(Score(*latin, ""), 0);
  EXPECT_EQ(Score(*latin,
                  "\xff"
                  "a\xff"),
            1);
  const std::string kana = "\xe3\x81\xb2\xe3\x83\xbc\xe3\x83\x8e";  // Hiragana, a mark of both, Katakana
  EXPECT_EQ(Score(*Make("script_share { scripts: ['Hira', 'Katakana', 'Han'] }"), kana), 1);
  EXPECT_EQ(Score(*Make("script_share { scripts: 'hiragana' }"), kana), 2.0 / 3);
  EXPECT_EQ(Score(*latin, kana), 0);
}

TEST(EmailChecklistTest, EachPointCountsAFifth) {
  const auto function = Make("email_checklist { min_words: 3 max_words: 10 }");
  const std::string subject = "Subject: Our meeting\n\n", greeting = "Dear Ms Lee,\n\n", closing = "\nKind regards,\nAda\n";
  struct Case {
    std::string completion;
    double reward;
  };
  const Case cases[] = {
      {subject + greeting + "can we meet on Monday?\n" + closing, 1},
      {"\n" + subject + "HI Bo!\r\nsee the [notes](https://example.org) please\r\n" + closing, 1},
      {greeting + "can we meet on Monday?\n" + closing, 0.8},
      {subject + greeting + "can we meet on [day]?\n" + closing, 0.8},
      {subject + greeting + "meet?\n" + closing, 0.8},
      {subject + greeting + "one two three four five six seven eight nine ten eleven\n" + closing, 0.8},
      {subject + greeting + "can we meet on Monday?\nKind regards,", 0.6},  // nobody signs
      {subject + greeting + "can we meet on Monday?\n", 0.6},
      {subject + "can we meet on Monday?\n" + closing, 0.2},
      {"Subject:\nHistory is long,\n", 0},
      {"", 0},
      {"\n \n", 0},
      {std::string(1'000'000, '['), 0},
  };
  for (const Case& entry : cases) EXPECT_EQ(Score(*function, entry.completion), entry.reward) << entry.completion.substr(0, 200);
}

TEST(TextRewardConfigTest, FaultsNameFieldValueAndLimit) {
  EXPECT_EQ(Faults("weight: 1 tag_count { tags: '<a>' trailing_penalty: -1 }"),
            "rewards[2].tag_count.trailing_penalty: -1, must be finite and >= 0");
  EXPECT_EQ(Faults("weight: 1 regular_expression {}"), "rewards[2].regular_expression.pattern: 0 bytes, must be 1 to 4096");
  EXPECT_EQ(Faults("weight: 1 regular_expression { pattern: '" + std::string(4097, 'a') + "' }"),
            "rewards[2].regular_expression.pattern: 4097 bytes, must be 1 to 4096");
  EXPECT_THAT(Faults("weight: 1 regular_expression { pattern: 'a(b' }"),
              HasSubstr("rewards[2].regular_expression.pattern: 'a(b', fails at byte 3: missing closing parenthesis"));
  EXPECT_EQ(Faults("weight: 1 regular_expression { pattern: '(a)\\\\1' }"),
            "rewards[2].regular_expression.pattern: '(a)\\1', refers back to group 1, must have no back references");
  EXPECT_EQ(Faults("weight: 1 repetition { ngram_size: 33 }"), "rewards[2].repetition.ngram_size: 33, must be 1 to 32");
  EXPECT_EQ(Faults("weight: 1 length_target {}"),
            "rewards[2].length_target.target_tokens: 0, must be >= 1\nrewards[2].length_target.width_tokens: 0, must be >= 1");
  EXPECT_EQ(Faults("weight: 1 script_share {}"), "rewards[2].script_share.scripts: 0 scripts, must be 1 to 16");
  for (const std::string name : {"Klingonish", "Common", ""}) {
    EXPECT_EQ(
        Faults("weight: 1 script_share { scripts: '" + name + "' }"),
        "rewards[2].script_share.scripts[0]: '" + name + "', must be the name of a Unicode script, as Latin, Cyrillic or Han");
  }
  EXPECT_EQ(Faults("weight: 1 email_checklist { max_words: 5 }"), "rewards[2].email_checklist.min_words: 0, must be >= 1");
  EXPECT_EQ(Faults("weight: 1 email_checklist { min_words: 6 max_words: 5 }"),
            "rewards[2].email_checklist.max_words: 5, must be >= min_words = 6");
}

}  // namespace
}  // namespace tandem

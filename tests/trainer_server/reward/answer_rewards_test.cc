// Rewards that compare an answer with the row's: numbers, mathematics, choices.
#include <chrono>
#include <fstream>
#include <limits>

#include "gmock/gmock.h"
#include "tests/trainer_server/reward/reward_testing.h"
#include "trainer_server/reward/math_value.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

std::string Repeated(const std::string& part, int count) {
  std::string text;
  for (int i = 0; i < count; ++i) text += part;
  return text;
}

// Scores a text made to be slow; fails when that takes seconds.
double ScoreInTime(const RewardFunction& function, const std::string& completion, const Json& row) {
  const auto begin = std::chrono::steady_clock::now();
  const double score = Score(function, completion, row);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5)) << completion.substr(0, 40);
  return score;
}

TEST(Gsm8kTest, RowsGiveTheNumberBehindTheMarker) {
  std::ifstream file(TANDEM_GOLDEN_DIR "/gsm8k/answers.jsonl");
  const auto exact = Make("numeric_answer { answer_field: 'answer' answer_marker: '####' }");
  const auto math = Make("math_answer { answer_field: 'answer' }");
  int num_rows = 0;
  for (std::string line; std::getline(file, line); ++num_rows) {
    const Json row = Json::parse(line);
    const std::int64_t number = row["number"];
    for (const auto* function : {exact.get(), math.get()}) {
      EXPECT_EQ(Score(*function, absl::StrCat("7 more, so the answer is $", number, "."), row), 1) << line;
      EXPECT_EQ(Score(*function, row["answer"], row), 1) << line;
      EXPECT_EQ(Score(*function, absl::StrCat(number + 1), row), 0) << line;
      EXPECT_EQ(Score(*function, absl::StrCat(-number), row), 0) << line;
    }
  }
  EXPECT_EQ(num_rows, 20);
}

// The ends of all answers of the test set, and the numbers that Python finds behind the marker.
TEST(Gsm8kTest, EveryAnswerOfTheTestSetIsExtracted) {
  std::ifstream file(TANDEM_GOLDEN_DIR "/gsm8k/test_answers.jsonl");
  const auto function = Make("numeric_answer { answer_field: 'answer' answer_marker: '####' }");
  int num_rows = 0;
  for (std::string line; std::getline(file, line); ++num_rows) {
    const Json row = Json::parse(line);
    const std::int64_t number = row["number"];
    EXPECT_EQ(Score(*function, absl::StrCat("so it is ", number), row), 1) << line;
    EXPECT_EQ(Score(*function, absl::StrCat("so it is ", number + 1), row), 0) << line;
  }
  EXPECT_EQ(num_rows, 1319);
}

TEST(Gsm8kTest, RowsWithoutMarkerOrNumberAreErrors) {
  const auto function = Make("numeric_answer { answer_field: 'answer' answer_marker: '####' }");
  EXPECT_THAT(std::string(ScoreRow(*function, {{"answer", "so 72"}}, "72").status().message()),
              HasSubstr("row field 'answer' holds no '####'"));
  EXPECT_THAT(std::string(ScoreRow(*function, {{"answer", "72 #### none 72"}}, "72").status().message()),
              HasSubstr("has no finite number behind its last '####'"));
  EXPECT_THAT(std::string(ScoreRow(*function, {{"answer", "72 ####"}}, "72").status().message()),
              HasSubstr("has no finite number behind its last '####'"));
  EXPECT_EQ(Score(*function, "72", {{"answer", "#### 71\n#### $72 in 3 weeks"}}), 1);
  EXPECT_EQ(Score(*function, "72", {{"answer", 72}}), 1);
  EXPECT_EQ(*ScoreRow(*function, {{"answer", nullptr}}, "72"), std::nullopt);
}

TEST(NumericBandsTest, TheNarrowestBandThatHoldsTheNumberCounts) {
  const auto function = Make(
      "numeric_bands { answer_field: 'answer' bands { relative_error: 0.1 reward: 0.5 } bands { relative_error: 0.2 reward: 0.25 "
      "} "
      "otherwise: -0.5 }");
  struct Case {
    std::string completion;
    Json answer;
    double reward;
  };
  const Case cases[] = {
      {"100", 100, 1},        {"it is 100.0", 100, 1},
      {"110", 100, 0.5},      {"90", 100, 0.5},
      {"111", 100, 0.25},     {"80", 100, 0.25},
      {"79", 100, -0.5},      {"-100", 100, -0.5},
      {"-105", -100, 0.5},    {"none", 100, -0.5},
      {"", 100, -0.5},        {"0", 0, 1},
      {"0.001", 0, -0.5},     {std::string(400, '9'), 100, -0.5},
      {"100", "#### 100", 1},
  };
  for (const Case& entry : cases) {
    EXPECT_EQ(Score(*function, entry.completion, {{"answer", entry.answer}}), entry.reward) << entry.completion;
  }
  EXPECT_EQ(*ScoreRow(*function, {{"answer", nullptr}}, "1"), std::nullopt);
}

TEST(MathAnswerTest, ValuesAreEqualAsExactFractions) {
  const auto function = Make("math_answer { answer_field: 'answer' units: ['m', 'km', 'dollars', '^\\\\circ'] }");
  struct Case {
    std::string completion;
    Json answer;
    double reward;
  };
  const Case cases[] = {
      {"\\boxed{\\frac{1}{2}}", "0.5", 1},
      {"\\boxed{1/2}", "\\frac{1}{2}", 1},
      {"\\boxed{\\dfrac{2}{4}}", "\\tfrac12", 1},
      {"\\boxed{50\\%}", "1/2", 1},
      {"\\boxed{50}", "50\\%", 0},
      {"\\boxed{1{,}234}", "1234", 1},
      {"\\boxed{1,234.50}", 1234.5, 1},
      {"\\boxed{12,34}", "1234", 0},
      {"\\boxed{1\\frac{1}{2}}", "3/2", 1},
      {"\\boxed{-1 1/2}", "-1.5", 1},
      {"\\boxed{-\\frac{3}{4}}", "\\frac{-3}{4}", 1},
      {"\\boxed{\\frac{3}{-4}}", "-0.75", 1},
      {"\\boxed{\xe2\x88\x92"
       "3}",
       "-3", 1},
      {"\\boxed{-0}", "0", 1},
      {"\\boxed{x = 5}", "5", 1},
      {"\\boxed{$5.$}", 5, 1},
      {"\\boxed{5 \\text{ km}}", "5", 1},
      {"\\boxed{5\\,\\mathrm{m}}", "5 m", 1},
      {"\\boxed{90^\\circ}", "90", 1},
      {"\\boxed{5 \\text{ miles}}", "5", 0},  // no unit of the job
      {"\\boxed{1/3}", "0.3333333333333333", 0},
      {"\\boxed{9007199254740993}", "9007199254740992", 0},
      {"\\boxed{1/0}", "1", 0},
      {"\\boxed{\\frac{1}{0}}", "0", 0},
      {"\\boxed{4} or \\boxed{5}", "5", 1},
      {"\\boxed{\\boxed{5}}", "5", 1},
      {"\\boxed{6} then 5", "5", 0},
      {"so <answer> 3/4 </answer> of 8", "0.75", 1},
      {"it is 3/4.", "0.75", 1},
      {"48/2 = 24 clips, so 72 in all", "72", 1},
      {"about 25%", "0.25", 1},
      {"\\boxed{5", "5", 1},  // cut off: the last value counts
      {"nothing", "5", 0},
      {"", "5", 0},
      {"5", "so\n#### 5", 1},
      {"5", "thus \\boxed{5}.", 1},
  };
  for (const Case& entry : cases) {
    EXPECT_EQ(Score(*function, entry.completion, {{"answer", entry.answer}}), entry.reward)
        << entry.completion << " for " << entry.answer;
  }
}

TEST(MathAnswerTest, OtherAnswersAreEqualAsText) {
  const auto function = Make("math_answer { answer_field: 'answer' }");
  EXPECT_EQ(Score(*function, "\\boxed{x^2+1}", {{"answer", "$x^2 + 1$"}}), 1);
  EXPECT_EQ(Score(*function, "\\boxed{\\left(1,\\, 2\\right)}", {{"answer", "(1, 2)"}}), 1);
  EXPECT_EQ(Score(*function, "so\n\\text{Paris}.", {{"answer", "Paris"}}), 1);
  EXPECT_EQ(Score(*function, "Paris\nor Rome", {{"answer", "Paris"}}), 0);
  EXPECT_EQ(Score(*function, "\\boxed{x^2-1}", {{"answer", "x^2+1"}}), 0);
  EXPECT_EQ(Score(*function, "", {{"answer", "x^2+1"}}), 0);
}

TEST(MathAnswerTest, ToleranceIsAbsolute) {
  const auto function = Make("math_answer { answer_field: 'answer' tolerance: 0.01 }");
  EXPECT_EQ(Score(*function, "\\boxed{0.33}", {{"answer", "1/3"}}), 1);
  EXPECT_EQ(Score(*function, "\\boxed{0.3}", {{"answer", "1/3"}}), 0);
  EXPECT_EQ(Score(*function, "\\boxed{" + std::string(400, '9') + "}", {{"answer", std::string(400, '8')}}), 0);
}

TEST(MathAnswerTest, HugeAndHostileTextsAreScoredInTime) {
  const auto function = Make("math_answer { answer_field: 'answer' }");
  const Json row = {{"answer", "3/4"}};
  EXPECT_EQ(ScoreInTime(*function, std::string(1'000'000, '9'), row), 0);
  EXPECT_EQ(ScoreInTime(*function, Repeated("\\frac{1", 100'000) + " or 3/4", row), 1);
  EXPECT_EQ(ScoreInTime(*function, Repeated("\\boxed{", 100'000), row), 0);
  EXPECT_EQ(ScoreInTime(*function, std::string(500'000, '{') + std::string(500'000, '-'), row), 0);
  EXPECT_EQ(ScoreInTime(*function, Repeated("1,234", 200'000), row), 0);
  EXPECT_EQ(ScoreInTime(*function, Repeated("1 1/", 200'000) + "x 3/4", row), 1);
  EXPECT_EQ(Score(*function, "\\boxed{" + std::string(500, '9') + "}", {{"answer", std::string(500, '9')}}), 1);
  const std::string sevens(500, '7');
  EXPECT_EQ(ScoreInTime(*function, "\\boxed{" + sevens + "/" + sevens + "}", {{"answer", 1}}), 1);
}

TEST(MathAnswerTest, RowsThatCannotBeReadNameFunctionAndField) {
  const auto function = Make("name: 'maths' math_answer { answer_field: 'sum' }");
  const std::pair<Json, std::string> rows[] = {
      {Json::object(), "is absent"},
      {{{"sum", true}}, "is of type boolean"},
      {{{"sum", ""}}, "holds no answer"},
      {{{"sum", 1e300}}, "is 1e+300, must be a string to be compared exactly"},
  };
  for (const auto& [row, text] : rows) {
    EXPECT_THAT(std::string(ScoreRow(*function, row, "7").status().message()),
                HasSubstr("reward function 'maths': row field 'sum' " + text));
  }
  EXPECT_EQ(*ScoreRow(*function, {{"sum", nullptr}}, "7"), std::nullopt);
}

TEST(MathValueTest, WhatIsNoValueIsToldApart) {
  for (const std::string text :
       {"", " ", "-", ".", "1.", "1 2", "3 4/0", "1/2/3", "\\frac{1}", "\\frac{a}{b}", "1e5", "%", "1.2.3"}) {
    EXPECT_EQ(ParseMathValue(text), std::nullopt) << text;
  }
  EXPECT_EQ(ParseMathValue(std::string(kMaxMathDigits + 1, '1')), std::nullopt);
}

TEST(MultipleChoiceTest, TheAnnouncedLetterOrTheLastThatStandsAlone) {
  const auto function = Make("multiple_choice { answer_field: 'answer' num_choices: 4 }");
  struct Case {
    std::string completion;
    Json answer;
    double reward;
  };
  const Case cases[] = {
      {"B", "B", 1},
      {"B", 1, 1},
      {" (C). ", "C", 1},
      {"**D**", "D", 1},
      {"\\boxed{A}", "A", 1},
      {"A or B? It is C", "C", 1},
      {"A or B? It is C", "A", 0},
      {"The answer is B, not C", "B", 1},
      {"the ANSWER IS: (b)", "B", 0},  // capital letters only
      {"Answer: D) 42. A is wrong.", "D", 1},
      {"The answer is A. No, the answer is C.", "C", 1},
      {"The answer is unclear: B", "B", 1},
      {"ABCD", "D", 0},
      {"Bach, A-flat, D'Arc, C_1", "A", 0},
      {"B\xc3\xa4r", "B", 0},
      {"\xe7\xad\x94\xe6\xa1\x88\xe6\x98\xaf"
       "B\xe3\x80\x82",
       "B", 1},
      {"\xe2\x80\x9c"
       "C\xe2\x80\x9d",
       "C", 1},
      {"E", "D", 0},
      {"", "A", 0},
      {"\xff"
       "A\xff",
       "A", 1},
  };
  for (const Case& entry : cases) {
    EXPECT_EQ(Score(*function, entry.completion, {{"answer", entry.answer}}), entry.reward) << entry.completion;
  }
  EXPECT_EQ(*ScoreRow(*function, {{"answer", nullptr}}, "A"), std::nullopt);
  EXPECT_EQ(ScoreInTime(*function, Repeated("answer is ", 100'000) + "x B", {{"answer", "B"}}), 1);
  for (const Json& answer : {Json("E"), Json(4), Json(-1), Json("AB"), Json(""), Json(true)}) {
    EXPECT_THAT(std::string(ScoreRow(*function, {{"answer", answer}}, "A").status().message()),
                HasSubstr("must be a letter A to D or its index 0 to 3"));
  }
}

TEST(AnswerRewardConfigTest, FaultsNameFieldValueAndLimit) {
  EXPECT_EQ(Faults("weight: 1 numeric_answer { answer_field: 'x' answer_marker: '" + std::string(65, '#') + "' }"),
            "rewards[2].numeric_answer.answer_marker: 65 bytes, must be at most 64");
  EXPECT_EQ(Faults("weight: 1 math_answer { tolerance: nan units: ['', '5m'] }"),
            "rewards[2].math_answer.answer_field: empty, must name a field of the data set's rows\n"
            "rewards[2].math_answer.tolerance: nan, must be finite and >= 0\n"
            "rewards[2].math_answer.units[0]: '', must be 1 to 64 bytes without digits and %\n"
            "rewards[2].math_answer.units[1]: '5m', must be 1 to 64 bytes without digits and %");
  EXPECT_EQ(Faults("weight: 1 multiple_choice { answer_field: 'x' num_choices: 11 }"),
            "rewards[2].multiple_choice.num_choices: 11, must be 2 to 10");
  EXPECT_EQ(Faults("weight: 1 numeric_bands { answer_field: 'x' }"), "rewards[2].numeric_bands.bands: 0 bands, must be 1 to 16");
  EXPECT_EQ(
      Faults(
          "weight: 1 numeric_bands { answer_field: 'x' bands { relative_error: 0.2 reward: inf } bands { relative_error: 0.1 } "
          "otherwise: nan }"),
      "rewards[2].numeric_bands.bands[0].reward: inf, must be finite\n"
      "rewards[2].numeric_bands.bands[1].relative_error: 0.1, must be finite and > 0.2\n"
      "rewards[2].numeric_bands.otherwise: nan, must be finite");
}

}  // namespace
}  // namespace tandem

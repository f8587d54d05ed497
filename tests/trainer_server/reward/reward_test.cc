#include "trainer_server/reward/reward.h"

#include <cmath>
#include <fstream>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/trainer_server/reward/reward_testing.h"
#include "trainer_server/reward/reward_set.h"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(QuickstartRewardTest, ScoresOfTheUntrainedModelsGreedyAnswersEqualTheRecorded) {
  std::ifstream file(TANDEM_GOLDEN_DIR "/smollm2/quickstart.json");
  const Json golden = Json::parse(file);
  const auto correct = Make("name: 'correct' numeric_answer { answer_field: 'answer' must_end: true }");
  const auto ended = Make("name: 'ended' ended_by_itself {}");
  int num_correct = 0, num_ended = 0;
  for (const Json& entry : golden["held_out"]) {
    const Json row = {{"answer", entry["a"].get<int>() + entry["b"].get<int>()}};
    const std::string text = entry["text"];
    const bool is_truncated = entry["ended"] == 0;
    EXPECT_EQ(ScoreRow(*correct, row, text, is_truncated)->value(), entry["correct"].get<double>()) << text;
    EXPECT_EQ(ScoreRow(*ended, row, text, is_truncated)->value(), entry["ended"].get<double>()) << text;
    num_correct += entry["correct"].get<int>();
    num_ended += entry["ended"].get<int>();
  }
  EXPECT_EQ(golden["held_out"].size(), 64u);
  EXPECT_GT(num_correct, 0);
  EXPECT_LT(num_correct, num_ended);
}

TEST(NumericAnswerTest, TheLastNumberOfTheTextCounts) {
  const auto function = Make("numeric_answer { answer_field: 'answer' }");
  struct Row {
    std::string completion;
    Json answer;
    double reward;
  };
  const Row rows[] = {
      {"3 + 4 = 7", 7, 1},
      {"7 is what 3 + 4 gives", 7, 0},
      {"The answer is 7.", 7, 1},
      {"7.0", 7, 1},
      {"07", 7, 1},
      {"-7", 7, 0},
      {"-7", -7, 1},
      {"10-7", -7, 1},
      {"- 7", 7, 1},
      {"-0", 0, 1},
      {"0.50", 0.5, 1},
      {".5", 0.5, 0},
      {"1.2.3", 3, 1},
      {"x=7,", 7, 1},
      {"$1,234,567.50", 1234567.5, 1},
      {"1,234", 1234, 1},
      {"12,34", 34, 1},
      {"1234,567", 567, 1},
      {"1,2345", 2345, 1},
      {"no number", 7, 0},
      {"", 7, 0},
      {"-", 7, 0},
      {"7-", 7, 1},
      {"9007199254740993", 9007199254740993, 1},
      {"9007199254740992", 9007199254740993, 0},
      {"100000000000000000000", 1e20, 1},
      {"72", "Natalia sold 48/2 = 24 clips.\n#### 72", 1},
      {"1080", "so 1,080\n#### 1,080", 1},
      {"71", "#### 72", 0},
      {"18", "18", 1},
  };
  for (const Row& row : rows) EXPECT_EQ(Score(*function, row.completion, {{"answer", row.answer}}), row.reward) << row.completion;
}

TEST(NumericAnswerTest, ATruncatedCompletionEarnsNothingWhenItMustEnd) {
  const Json row = {{"answer", 7}};
  EXPECT_EQ(**ScoreRow(*Make("numeric_answer { answer_field: 'answer' must_end: true }"), row, "7", true), 0);
  EXPECT_EQ(**ScoreRow(*Make("numeric_answer { answer_field: 'answer' must_end: true }"), row, "7", false), 1);
  EXPECT_EQ(**ScoreRow(*Make("numeric_answer { answer_field: 'answer' }"), row, "7", true), 1);
}

TEST(NumericAnswerTest, TagsNarrowTheTextWhenThereAreAny) {
  const auto function = Make("numeric_answer { answer_field: 'answer' in_tags: true }");
  const Json row = {{"answer", 7}};
  EXPECT_EQ(Score(*function, "<answer>7</answer> as 3 + 4", row), 1);
  EXPECT_EQ(Score(*function, "<answer>6</answer> or 7", row), 0);
  EXPECT_EQ(Score(*function, "<answer>6</answer><answer>7</answer> 9", row), 1);
  EXPECT_EQ(Score(*function, "<answer>none</answer> 7", row), 0);
  EXPECT_EQ(Score(*function, "it is 7", row), 1);
  EXPECT_EQ(Score(*function, "<answer>3, or 7", row), 1);
  EXPECT_EQ(Score(*Make("numeric_answer { answer_field: 'answer' }"), "<answer>7</answer> as 3 + 4", row), 0);
}

TEST(NumericAnswerTest, ToleranceIsAbsoluteAndInclusive) {
  const auto function = Make("numeric_answer { answer_field: 'answer' tolerance: 0.5 }");
  EXPECT_EQ(Score(*function, "6.5", {{"answer", 7}}), 1);
  EXPECT_EQ(Score(*function, "7.51", {{"answer", 7}}), 0);
}

TEST(NumericAnswerTest, RowsThatCannotBeReadNameFunctionAndField) {
  for (const std::string kind : {"numeric_answer { answer_field: 'sum' }", "numeric_distance { answer_field: 'sum' scale: 1 }"}) {
    const auto function = Make("name: 'correct' " + kind);
    EXPECT_THAT(function->required_fields(), ElementsAre("sum"));
    const std::pair<Json, std::string> rows[] = {
        {Json::object(), "is absent"},
        {{{"sum", "none"}}, "holds no finite number"},
        {{{"sum", std::string(400, '9')}}, "holds no finite number"},
        {{{"sum", true}}, "is of type boolean"},
        {{{"sum", Json::array({1})}}, "is of type array"},
        {{{"sum", std::numeric_limits<double>::infinity()}}, "is not a finite number"},
        {Json::array(), "the row is not an object"},
    };
    for (const auto& [row, text] : rows) {
      const auto reward = ScoreRow(*function, row, "7");
      EXPECT_EQ(reward.status().code(), absl::StatusCode::kInvalidArgument) << row;
      EXPECT_THAT(std::string(reward.status().message()),
                  HasSubstr("reward function 'correct': row field 'sum' " +
                            (text.starts_with("the") ? "cannot be read: " + text : text)));
    }
    const RewardInput rowless{.row = nullptr, .completion = "7"};
    EXPECT_FALSE(function->Score({&rowless, 1}, {}).ok());
    EXPECT_EQ(*ScoreRow(*function, {{"sum", nullptr}}, "7"), std::nullopt);
  }
}

TEST(NumericDistanceTest, FallsWithTheDistance) {
  const auto function = Make("numeric_distance { answer_field: 'answer' scale: 2 }");
  const Json row = {{"answer", 7}};
  EXPECT_EQ(Score(*function, "it is 7", row), 1);
  EXPECT_NEAR(Score(*function, "it is 5", row), std::exp(-1), 1e-15);
  EXPECT_NEAR(Score(*function, "it is 9", row), std::exp(-1), 1e-15);
  EXPECT_EQ(Score(*function, "nothing", row), 0);
  EXPECT_EQ(Score(*function, std::string(400, '9'), row), 0);
}

TEST(EndedByItselfTest, TellsTheTokenLimitApart) {
  const auto function = Make("ended_by_itself {}");
  EXPECT_EQ(**ScoreRow(*function, Json::object(), "x", false), 1);
  EXPECT_EQ(**ScoreRow(*function, Json::object(), "x", true), 0);
}

TEST(AnswerTagsTest, StrictWantsTheNewlinesOfTheTemplate) {
  const auto strict = Make("answer_tags { strictness: TAG_STRICTNESS_STRICT }");
  const auto soft = Make("answer_tags { strictness: TAG_STRICTNESS_SOFT }");
  struct Row {
    std::string text;
    double strict, soft;
  };
  const Row rows[] = {
      {"<reasoning>\nso\n</reasoning>\n<answer>\n7\n</answer>\n", 1, 1},
      {"<reasoning>\nso\nthen\n</reasoning>\n<answer>\n7\n</answer>", 1, 1},
      {"<reasoning>so</reasoning><answer>7</answer>", 0, 1},
      {"  <reasoning>so</reasoning>\n\n<answer>7</answer>\n", 0, 1},
      {"<reasoning>so</reasoning> and <answer>7</answer>", 0, 0},
      {"I say <reasoning>\nso\n</reasoning>\n<answer>\n7\n</answer>\n", 0, 0},
      {"<reasoning>\nso\n</reasoning>\n<answer>\n7\n</answer>\nbye", 0, 0},
      {"<answer>7</answer><reasoning>so</reasoning>", 0, 0},
      {"<reasoning>so<answer>7</reasoning></answer>", 0, 0},
      {"<reasoning>\nso\n</reasoning>\n<answer>\n7\n</answer>\n<answer>\n8\n</answer>\n", 0, 0},
      {"<reasoning>so</reasoning><answer>7", 0, 0},
      {"", 0, 0},
  };
  for (const Row& row : rows) {
    EXPECT_EQ(Score(*strict, row.text), row.strict) << row.text;
    EXPECT_EQ(Score(*soft, row.text), row.soft) << row.text;
  }
  const auto named = Make("answer_tags { strictness: TAG_STRICTNESS_SOFT reasoning_tag: 'think' answer_tag: 'result' }");
  EXPECT_EQ(Score(*named, "<think>so</think><result>7</result>"), 1);
  EXPECT_EQ(Score(*named, "<reasoning>so</reasoning><answer>7</answer>"), 0);
}

TEST(IntegerOnlyTest, DigitsAndSpaceAroundThem) {
  const auto whole = Make("integer_only {}");
  EXPECT_EQ(Score(*whole, " 42\n"), 1);
  EXPECT_EQ(Score(*whole, "42."), 0);
  EXPECT_EQ(Score(*whole, "4 2"), 0);
  EXPECT_EQ(Score(*whole, "-42"), 0);
  EXPECT_EQ(Score(*whole, " "), 0);
  const auto tagged = Make("integer_only { answer_tag: 'answer' }");
  EXPECT_EQ(Score(*tagged, "so <answer>\n42\n</answer> it is"), 1);
  EXPECT_EQ(Score(*tagged, "<answer>forty</answer> 42"), 0);
  EXPECT_EQ(Score(*tagged, "42"), 0);
}

TEST(TagCountTest, ShareOfTagsThatOccurExactlyOnce) {
  const auto function = Make("tag_count { tags: ['<answer>', '</answer>', '<reasoning>', '</reasoning>'] }");
  EXPECT_EQ(Score(*function, "<reasoning>so</reasoning><answer>7</answer>"), 1);
  EXPECT_EQ(Score(*function, "<answer>7</answer>"), 0.5);
  EXPECT_EQ(Score(*function, "<answer><answer>7</answer>"), 0.25);
  EXPECT_EQ(Score(*function, ""), 0);
}

TEST(KeywordsTest, ShareOrAll) {
  const auto share = Make("keywords { words: ['sum', 'there\xc3\x96re'] }");
  EXPECT_EQ(Score(*share, "the sum"), 0.5);
  EXPECT_EQ(Score(*share, "the Sum there\xc3\xb6re"), 0);
  const auto folded = Make("keywords { words: ['SUM', 'there\xc3\x96re'] ignore_case: true }");
  EXPECT_EQ(Score(*folded, "the Sum there\xc3\xb6re"), 1);
  const auto all = Make("keywords { words: ['a', 'b', 'c'] all: true }");
  EXPECT_EQ(Score(*all, "a b"), 0);
  EXPECT_EQ(Score(*all, "c b a"), 1);
}

TEST(LengthRewardTest, GoldenOverlongCases) {
  std::ifstream file(TANDEM_GOLDEN_DIR "/grpo_cases.json");
  const Json cases = Json::parse(file)["overlong_cases"];
  EXPECT_EQ(cases.size(), 2u);
  for (const Json& entry : cases) {
    const Json& inputs = entry["inputs"];
    const auto function = Make(absl::StrCat("length { max_tokens: ", inputs["max_length"].get<int>(),
                                            " cache_tokens: ", inputs["cache"].get<int>(), " }"));
    for (std::size_t i = 0; i < inputs["lengths"].size(); ++i) {
      EXPECT_NEAR(ScoreLength(*function, inputs["lengths"][i].get<int>()), entry["expected"]["penalties"][i].get<double>(), 1e-10)
          << inputs["lengths"][i];
    }
  }
}

TEST(RewardConfigTest, FaultsNameFieldValueAndLimit) {
  EXPECT_EQ(Faults("weight: 1"),
            "rewards[2].function: none is set, must be one of numeric_answer, numeric_distance, ended_by_itself, answer_tags, "
            "integer_only, tag_count, keywords, length, math_answer, multiple_choice, regular_expression, repetition, "
            "length_target, script_share, numeric_bands, email_checklist, python_function, remote, code_tests, json_schema, "
            "cosine_length");
  EXPECT_EQ(Faults("ended_by_itself {}"), "rewards[2].weight: 0, must be finite and not 0");
  EXPECT_EQ(Faults("weight: inf ended_by_itself {}"), "rewards[2].weight: inf, must be finite and not 0");
  EXPECT_THAT(Faults("weight: 1 name: 'a b' ended_by_itself {}"), HasSubstr("rewards[2].name: 'a b', must be"));
  EXPECT_EQ(Faults("weight: nan numeric_answer { tolerance: -1 }"),
            "rewards[2].weight: nan, must be finite and not 0\n"
            "rewards[2].numeric_answer.answer_field: empty, must name a field of the data set's rows\n"
            "rewards[2].numeric_answer.tolerance: -1, must be finite and >= 0");
  EXPECT_THAT(Faults("weight: 1 numeric_distance { answer_field: 'x' }"), HasSubstr("numeric_distance.scale: 0, must be"));
  EXPECT_THAT(Faults("weight: 1 answer_tags {}"), HasSubstr("answer_tags.strictness: 0, must be"));
  EXPECT_THAT(Faults("weight: 1 answer_tags { strictness: TAG_STRICTNESS_SOFT answer_tag: 'reasoning' }"),
              HasSubstr("answer_tags.answer_tag: 'reasoning', must differ"));
  EXPECT_THAT(Faults("weight: 1 integer_only { answer_tag: '<a>' }"), HasSubstr("integer_only.answer_tag: '<a>', must be"));
  EXPECT_THAT(Faults("weight: 1 tag_count {}"), HasSubstr("tag_count.tags: 0 tags, must be 1 to 64"));
  EXPECT_THAT(Faults("weight: 1 tag_count { tags: ['<a>', 'b'] }"), HasSubstr("tag_count.tags[1]: 'b', must be"));
  EXPECT_THAT(Faults("weight: 1 keywords {}"), HasSubstr("keywords.words: 0 words, must be"));
  EXPECT_THAT(Faults("weight: 1 keywords { words: '' }"), HasSubstr("keywords.words[0]: 0 bytes, must be"));
  EXPECT_THAT(Faults("weight: 1 length {}"), HasSubstr("length.max_tokens: 0, must be >= 1"));
  EXPECT_THAT(Faults("weight: 1 length { max_tokens: 10 cache_tokens: 11 }"),
              HasSubstr("length.cache_tokens: 11, must be 1 to max_tokens = 10"));
}

TEST(RewardConfigTest, TheNameDefaultsToTheFunctions) {
  EXPECT_EQ(Make("ended_by_itself {}")->name(), "ended_by_itself");
  EXPECT_EQ(Make("name: 'ended' ended_by_itself {}")->name(), "ended");
}

google::protobuf::RepeatedPtrField<v1::RewardConfig> Configs(const std::vector<std::string>& texts) {
  google::protobuf::RepeatedPtrField<v1::RewardConfig> configs;
  for (const std::string& text : texts) *configs.Add() = Config(text);
  return configs;
}

TEST(RewardSetTest, ScoresEachCompletionWithEachFunctionAndLogsThemApart) {
  const auto set = RewardSet::Create(
      Configs({"name: 'correct' weight: 0.8 numeric_answer { answer_field: 'answer' must_end: true }",
               "name: 'ended' weight: 0.2 ended_by_itself {}", "weight: 1 numeric_distance { answer_field: 'hint' scale: 1 }"}));
  ASSERT_TRUE(set.ok()) << set.status();
  EXPECT_THAT(set->names(), ElementsAre("correct", "ended", "numeric_distance"));
  EXPECT_THAT(set->weights(), ElementsAre(0.8, 0.2, 1.0));
  EXPECT_THAT(set->required_fields(), ElementsAre("answer", "hint"));
  const Json row = {{"answer", 7}, {"hint", nullptr}};
  const std::vector<RewardInput> completions = {{.row = &row, .completion = "7", .is_truncated = false},
                                                {.row = &row, .completion = "8", .is_truncated = false},
                                                {.row = &row, .completion = "7", .is_truncated = true}};
  const auto table = set->Score(completions);
  ASSERT_TRUE(table.ok()) << table.status();
  EXPECT_THAT(*table, ElementsAre(ElementsAre(1.0, 1.0, std::nullopt), ElementsAre(0.0, 1.0, std::nullopt),
                                  ElementsAre(0.0, 0.0, std::nullopt)));
  const auto metrics = set->Summarize(*table);
  ASSERT_TRUE(metrics.ok()) << metrics.status();
  EXPECT_EQ((*metrics)[0].name, "correct");
  EXPECT_NEAR((*metrics)[0].mean, 1.0 / 3, 1e-15);
  EXPECT_NEAR((*metrics)[0].std, std::sqrt(1.0 / 3), 1e-15);
  EXPECT_NEAR((*metrics)[1].mean, 2.0 / 3, 1e-15);
  EXPECT_EQ((*metrics)[1].num_applied, 3u);
  EXPECT_EQ((*metrics)[2].num_applied, 0u);
  EXPECT_EQ((*metrics)[2].mean, 0);
}

// CASES C26
TEST(RewardSetTest, ATableOfTheWrongWidthIsRefusedAndNothingIsBroadcast) {
  const auto set = RewardSet::Create(Configs({"weight: 1 ended_by_itself {}", "name: 'whole' weight: 1 integer_only {}"}));
  ASSERT_TRUE(set.ok()) << set.status();
  const RewardTable narrow = {{1.0, 0.0}, {1.0}};
  EXPECT_THAT(std::string(set->Summarize(narrow).status().message()),
              HasSubstr("completion 1 has 1 values, expected 2, one of each of ended_by_itself, whole"));
}

// Gives `num_values` values whatever there is to score (0: as many), of which those of "bad" are not finite.
class BrokenReward final : public RewardFunction {
 public:
  explicit BrokenReward(std::size_t num_values = 0) : num_values_(num_values) {}
  const std::string& name() const override { return name_; }
  double weight() const override { return 1; }
  absl::StatusOr<RewardColumn> Score(std::span<const RewardInput> completions, const RewardCall&) const override {
    RewardColumn rewards;
    for (const RewardInput& input : completions) {
      rewards.push_back(input.completion == "bad" ? std::numeric_limits<double>::quiet_NaN() : 0.5);
    }
    if (num_values_ > 0) rewards.assign(num_values_, 1.0);
    return rewards;
  }
  std::vector<std::string> required_fields() const override { return {}; }

 private:
  const std::size_t num_values_;
  std::string name_ = "broken";
};

// CASES C26
TEST(RewardSetTest, ACountThatIsNotTheCompletionsIsRefusedByFunctionAndBothCounts) {
  const std::vector<RewardInput> completions(8, {.row = nullptr, .completion = "good"});
  for (const std::size_t count : {std::size_t{1}, std::size_t{9}}) {
    std::vector<std::unique_ptr<RewardFunction>> functions;
    functions.push_back(std::make_unique<BrokenReward>(count));
    const auto set = RewardSet::Create(std::move(functions));
    ASSERT_TRUE(set.ok()) << set.status();
    const auto table = set->Score(completions);
    EXPECT_EQ(table.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(table.status().message()),
                HasSubstr(absl::StrCat("reward function 'broken' gave ", count, " values for 8 completions")));
  }
}

// CASES C27
TEST(RewardSetTest, ARewardThatIsNotANumberNamesFunctionAndCompletion) {
  std::vector<std::unique_ptr<RewardFunction>> functions;
  functions.push_back(std::make_unique<BrokenReward>());
  const auto set = RewardSet::Create(std::move(functions));
  ASSERT_TRUE(set.ok()) << set.status();
  const std::vector<RewardInput> completions = {{.row = nullptr, .completion = "good"}, {.row = nullptr, .completion = "bad"}};
  const auto table = set->Score(completions);
  EXPECT_EQ(table.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(table.status().message()), HasSubstr("'broken' gave completion 1 the value nan"));
}

TEST(RewardSetTest, AFaultyRowNamesTheCompletion) {
  const auto set = RewardSet::Create(Configs({"name: 'correct' weight: 1 numeric_answer { answer_field: 'answer' }"}));
  ASSERT_TRUE(set.ok());
  const Json row = Json::object();
  const std::vector<RewardInput> completions = {{.row = &row, .completion = "7"}};
  EXPECT_THAT(std::string(set->Score(completions).status().message()),
              HasSubstr("scoring completion 0: reward function 'correct': row field 'answer' is absent"));
}

TEST(RewardSetTest, FaultsOfAllFunctionsAreListedAtOnce) {
  const auto set = RewardSet::Create(Configs(
      {"ended_by_itself {}", "weight: 1", "weight: 1 integer_only {}", "weight: 2 name: 'integer_only' ended_by_itself {}"}));
  const std::string message(set.status().message());
  EXPECT_THAT(message, HasSubstr("rewards[0].weight: 0"));
  EXPECT_THAT(message, HasSubstr("\nrewards[1].function: none is set"));
  EXPECT_THAT(message, HasSubstr("\nrewards[3].name: 'integer_only' names another function already"));
  EXPECT_THAT(std::string(RewardSet::Create(Configs({})).status().message()), HasSubstr("0 functions, must be 1 to 32"));
  const std::vector<std::string> many(33, "weight: 1 ended_by_itself {}");
  EXPECT_THAT(std::string(RewardSet::Create(Configs(many)).status().message()), HasSubstr("33 functions, must be 1 to 32"));
}

}  // namespace
}  // namespace tandem

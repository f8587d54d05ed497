#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "tests/trainer_server/support/fake_model.h"
#include "trainer_server/prompt/prompt_source.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

absl::StatusOr<std::shared_ptr<const DataSet>> Rows(const std::string& text) {
  const std::string path = FreshDirectory("data_set") + "/rows.jsonl";
  WriteText(path, text);
  return DataSet::Open(path);
}

PromptSource Source(const std::string& text, std::uint64_t seed, v1::DataConfig config = {}) {
  const auto data = Rows(text);
  EXPECT_TRUE(data.ok()) << data.status();
  return PromptSource(*data, std::make_shared<ByteEncoder>(), config, seed);
}

std::string Numbered(int count) {
  std::string rows;
  for (int i = 0; i < count; ++i) rows += absl::StrCat("{\"prompt\": \"p", i, "\"}\n");
  return rows;
}

TEST(DataSetTest, FindsRowsWhateverEndsThem) {
  const auto data = Rows("{\"a\": 1}\r\n\n  \n{\"a\": \"x\\ny\"}\n{\"a\": 3}");
  ASSERT_TRUE(data.ok());
  ASSERT_EQ((*data)->num_rows(), 3u);
  EXPECT_EQ((*data)->line_of(1), 4u);
  EXPECT_EQ((*(*data)->ReadRow(0))["a"], 1);
  EXPECT_EQ((*(*data)->ReadRow(1))["a"], "x\ny");
  EXPECT_EQ((*(*data)->ReadRow(2))["a"], 3);
}

TEST(DataSetTest, FaultyRowsAreNamedByLine) {
  const auto data = Rows("{\"a\": 1}\n\n[1]\n{\"a\": }\n" + std::string(100, '[') + "\n");
  ASSERT_TRUE(data.ok());
  for (std::size_t row = 1; row < 4; ++row) {
    const auto read = (*data)->ReadRow(row);
    EXPECT_TRUE(absl::IsInvalidArgument(read.status()));
    EXPECT_THAT(std::string(read.status().message()), HasSubstr(absl::StrCat("line ", row + 2)));
  }
  EXPECT_THAT(std::string(Rows("").status().message()), HasSubstr("0 rows"));
  EXPECT_THAT(std::string(Rows("{}\n" + std::string(kMaxRowBytes + 1, 'x')).status().message()), HasSubstr("line 2"));
  EXPECT_TRUE(absl::IsNotFound(DataSet::Open("/nowhere.jsonl").status()));
}

TEST(DataSetTest, NestingIsBounded) {
  std::string deep = "{\"a\":";
  for (int i = 0; i < 100000; ++i) deep += "[";
  const auto data = Rows(deep);
  ASSERT_TRUE(data.ok());
  EXPECT_TRUE(absl::IsInvalidArgument((*data)->ReadRow(0).status()));
}

TEST(PromptSourceTest, OrderIsAFunctionOfTheSeedAndEachEpochDiffers) {
  PromptSource source = Source(Numbered(50), 3), same = Source(Numbered(50), 3), other = Source(Numbered(50), 4);
  std::vector<std::size_t> first, second, of_other;
  for (std::uint64_t i = 0; i < 50; ++i) {
    first.push_back(source.RowAt(i));
    second.push_back(source.RowAt(50 + i));
    of_other.push_back(other.RowAt(i));
  }
  EXPECT_NE(first, second);
  EXPECT_NE(first, of_other);
  // A cursor taken up in the middle, in any order, draws the same.
  EXPECT_EQ(same.RowAt(77), second[27]);
  EXPECT_EQ(same.RowAt(12), first[12]);
}

// CASES C28: over an epoch each row is drawn once, also when two rows ask the same.
TEST(PromptSourceTest, EachRowIsDrawnOnceAnEpochAndEqualPromptsStayApart) {
  PromptSource source = Source("{\"prompt\": \"same\"}\n{\"prompt\": \"other\"}\n{\"prompt\": \"same\"}\n", 9);
  for (std::uint64_t epoch = 0; epoch < 4; ++epoch) {
    const auto prompts = source.Draw(epoch * 3, 3);
    ASSERT_TRUE(prompts.ok());
    std::set<std::size_t> rows;
    std::map<std::vector<TokenId>, int> by_ids;
    for (const Prompt& prompt : *prompts) {
      rows.insert(prompt.row_index);
      ++by_ids[prompt.token_ids];
    }
    EXPECT_EQ(rows.size(), 3u);
    EXPECT_EQ(by_ids.size(), 2u);
  }
}

TEST(PromptSourceTest, PromptsAreTextOrMessagesWithTheSystemTurnFirst) {
  const std::string row =
      "{\"q\": \"2 + 2\", \"turns\": [{\"role\": \"user\", \"content\": \"hi\"}], \"bad\": 3, \"empty\": \"\"}";
  const ByteEncoder encoder;
  const nlohmann::json json = nlohmann::json::parse(row);
  v1::DataConfig config;
  config.set_prompt_field("q");
  const auto text = [&](const absl::StatusOr<std::vector<TokenId>>& ids) {
    return ids.ok() ? ByteTokenizer().Decode(*ids, true) : std::string(ids.status().message());
  };
  EXPECT_EQ(text(EncodePrompt(encoder, config, json, 1)), "2 + 2");
  config.set_apply_chat_template(true);
  config.set_system_prompt("add");
  EXPECT_EQ(text(EncodePrompt(encoder, config, json, 1)), "system:add;user:2 + 2;");
  config.set_prompt_field("turns");
  EXPECT_EQ(text(EncodePrompt(encoder, config, json, 1)), "system:add;user:hi;");
  config.set_prompt_field("bad");
  EXPECT_THAT(text(EncodePrompt(encoder, config, json, 7)), HasSubstr("line 7 field 'bad'"));
  config.set_prompt_field("missing");
  EXPECT_THAT(text(EncodePrompt(encoder, config, json, 7)), HasSubstr("absent"));
  config.set_prompt_field("empty");
  config.clear_system_prompt();
  config.set_apply_chat_template(false);
  EXPECT_THAT(text(EncodePrompt(encoder, config, json, 7)), HasSubstr("0 tokens"));
}

}  // namespace
}  // namespace tandem

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/resource.h>

#include <fstream>
#include <map>
#include <set>

#include "common/model/utf8.h"
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
  return PromptSource(*data, nullptr, std::make_shared<ByteEncoder>(), config, seed);
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

// The same rows as JSON lines, as an array and as CSV.
TEST(DataSetTest, ArraysAndCsvHoldRowsToo) {
  const std::string mark = "\xef\xbb\xbf";
  for (const auto& [text, format] :
       {std::pair<std::string, DataFormat>{"{\"q\": \"a, \\\"b\\\"\\n]\", \"n\": \"1\"}\n{\"q\": \"x\", \"n\": \"\"}\n",
                                           DataFormat::kJsonLines},
        {mark + "{\"q\": \"a, \\\"b\\\"\\n]\", \"n\": \"1\"}\n{\"q\": \"x\", \"n\": \"\"}", DataFormat::kJsonLines},
        {" \n[\n {\"q\": \"a, \\\"b\\\"\\n]\",\n  \"n\": \"1\"}\n, {\"q\": \"x\", \"n\": \"\"}]\n", DataFormat::kJsonArray},
        {"q,n\r\n\"a, \"\"b\"\"\n]\",1\r\n\r\nx,\r\n", DataFormat::kCsv},
        {mark + "\"q\",n\n\"a, \"\"b\"\"\n]\",\"1\"\nx,\"\"", DataFormat::kCsv}}) {
    SCOPED_TRACE(text);
    const auto data = Rows(text);
    ASSERT_TRUE(data.ok()) << data.status();
    EXPECT_EQ((*data)->format(), format);
    ASSERT_EQ((*data)->num_rows(), 2u);
    EXPECT_EQ(*(*data)->ReadRow(0), nlohmann::json({{"q", "a, \"b\"\n]"}, {"n", "1"}}));
    EXPECT_EQ(*(*data)->ReadRow(1), nlohmann::json({{"q", "x"}, {"n", ""}}));
  }
  const auto array = Rows("[\n {\"q\": \"[{\", \"t\": [{}, 2]},\n\n {\"q\": 1}]");
  ASSERT_TRUE(array.ok()) << array.status();
  EXPECT_EQ((*array)->line_of(1), 4u);
  EXPECT_EQ((*(*array)->ReadRow(0))["t"][1], 2);
  const auto inches = Rows("name,size\nscreen,5\" wide\n");
  ASSERT_TRUE(inches.ok()) << inches.status();
  EXPECT_EQ((*(*inches)->ReadRow(0))["size"], "5\" wide");
}

TEST(DataSetTest, FaultyFilesAreNamed) {
  for (const auto& [text, words] : {std::pair<std::string, std::string>{"[1]", "line 1: '1' where an object was expected"},
                                    {"[{} {}]", "line 1: '{' where ',' or ']' was expected"},
                                    {"[{}]\nx", "line 2: 'x' where nothing more was expected"},
                                    {"[{},", "line 1: the JSON array does not end"},
                                    {"[]", "0 rows"},
                                    {"q,n\n", "0 rows"},
                                    {"q,q\n1,2\n", "line 1: field 2 of the CSV header, 'q', is empty or there twice"},
                                    {"q,n\n\"a,1\n", "line 2: a quote is not closed"},
                                    {"q\n\"" + std::string(5 * kMaxRowBytes, 'x'), "line 2 has a row of more than"},
                                    {"q,\xfc\na,1\n", "line 1: field 2 of the CSV header is not UTF-8"},
                                    {"PAR1xxxx", "python3 -m tandem.convert"},
                                    {"\x1f\x8b\x08", "compressed"}}) {
    const absl::Status status = Rows(text).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << text.substr(0, 40);
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
  }
  const auto data = Rows("q,n\na,1\nb\n");
  ASSERT_TRUE(data.ok());
  EXPECT_THAT(std::string((*data)->ReadRow(1).status().message()), HasSubstr("line 3 has 1 fields; the CSV header has 2"));
  // Latin-1, as spreadsheets write it: whatever quotes a row quotes UTF-8.
  const auto latin = Rows("q,n\na,M\xfcller\n");
  ASSERT_TRUE(latin.ok());
  EXPECT_THAT(std::string((*latin)->ReadRow(0).status().message()), HasSubstr("line 2: field 'n' is not UTF-8"));
  const auto lines = Rows("{\"q\": \"M\xfcller\"}\n");
  ASSERT_TRUE(lines.ok());
  EXPECT_TRUE(IsWellFormed(std::string((*lines)->ReadRow(0).status().message()))) << "of a row that is cut, too";
}

// A file of 128 MiB under a limit of 24 MiB more than is mapped.
TEST(DataSetTest, ReadsFilesLargerThanItsMemory) {
  constexpr std::size_t kRows = 8192, kRowBytes = 16 << 10;
  const std::string path = FreshDirectory("large") + "/rows.jsonl";
  {
    std::ofstream file(path, std::ios::binary);
    for (std::size_t i = 0; i < kRows; ++i) {
      std::string row = absl::StrCat("{\"prompt\": \"p", i, "\"}");
      row.resize(kRowBytes - 1, ' ');
      file << row << '\n';
    }
  }
  std::size_t mapped_pages = 0;
  std::ifstream("/proc/self/statm") >> mapped_pages;
  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_AS, &before), 0);
  struct rlimit bounded = before;
  bounded.rlim_cur = mapped_pages * static_cast<std::size_t>(::getpagesize()) + (24 << 20);
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &bounded), 0);
  std::size_t num_right = 0;
  const auto data = DataSet::Open(path);
  for (std::size_t i = 0; data.ok() && i < kRows; ++i) num_right += (*(*data)->ReadRow(i))["prompt"] == absl::StrCat("p", i);
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &before), 0);
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ(num_right, kRows);
}

absl::StatusOr<RowSelection> Select(const std::string& rows, double share, std::uint64_t split_seed, std::uint32_t least = 0,
                                    std::uint32_t most = 0) {
  v1::DataConfig config;
  config.set_held_out_share(share);
  config.set_split_seed(split_seed);
  config.set_min_prompt_tokens(least);
  config.set_max_prompt_tokens(most);
  return SelectRows(ByteEncoder(), config, **Rows(rows));
}

TEST(RowSelectionTest, SplitsBySeedAndShareAndAFilterMovesNoRow) {
  const std::string rows = Numbered(120);  // prompts of 2 tokens up to p9, of 3 up to p99, then of 4
  const auto whole = Select(rows, 0, 1);
  ASSERT_TRUE(whole.ok());
  EXPECT_EQ(whole->trained, nullptr);
  EXPECT_EQ(whole->counts.trained(), 120u);

  const auto split = Select(rows, 0.25, 1), same = Select(rows, 0.25, 1), other = Select(rows, 0.25, 2);
  ASSERT_TRUE(split.ok() && same.ok() && other.ok());
  EXPECT_EQ(split->held_out->size(), 30u);
  EXPECT_EQ(*split->held_out, *same->held_out);
  EXPECT_NE(*split->held_out, *other->held_out);
  std::set<std::uint32_t> all(split->trained->begin(), split->trained->end());
  all.insert(split->held_out->begin(), split->held_out->end());
  EXPECT_EQ(all.size(), 120u);

  const auto filtered = Select(rows, 0.25, 1, 3, 3);
  ASSERT_TRUE(filtered.ok()) << filtered.status();
  const v1::DataCounts& counts = filtered->counts;
  EXPECT_EQ(counts.too_short(), 10u);
  EXPECT_EQ(counts.too_long(), 20u);
  EXPECT_EQ(counts.trained() + counts.held_out(), 90u);
  for (const std::uint32_t row : *filtered->held_out) {
    EXPECT_TRUE(std::ranges::binary_search(*split->held_out, row)) << row;
    EXPECT_TRUE(row >= 10 && row < 100) << row;
  }
}

TEST(RowSelectionTest, ShareAndFiltersThatLeaveNothingAreNamed) {
  EXPECT_THAT(std::string(Select(Numbered(3), 0.1, 1).status().message()), HasSubstr("held_out_share: 0.1 of 3 rows is 0"));
  EXPECT_THAT(std::string(Select(Numbered(3), 0.9, 1).status().message()), HasSubstr("it must be 1 to 2"));
  EXPECT_THAT(std::string(Select(Numbered(3), 0, 1, 0, 1).status().message()),
              HasSubstr("max_prompt_tokens: 1 leave 0 rows to train on and 0 held out, of 3: 0 are shorter, 3 longer"));
}

TEST(PromptSourceTest, DrawsTheSelectedRowsAlone) {
  const auto data = Rows(Numbered(20));
  ASSERT_TRUE(data.ok());
  PromptSource source(*data, std::make_shared<std::vector<std::uint32_t>>(std::initializer_list<std::uint32_t>{3, 7, 11}),
                      std::make_shared<ByteEncoder>(), {}, 5);
  EXPECT_EQ(source.num_rows(), 3u);
  const auto prompts = source.Draw(0, 6);
  ASSERT_TRUE(prompts.ok()) << prompts.status();
  std::map<std::size_t, int> drawn;
  for (const Prompt& prompt : *prompts) ++drawn[prompt.row_index];
  EXPECT_EQ(drawn, (std::map<std::size_t, int>{{3, 2}, {7, 2}, {11, 2}}));
  EXPECT_EQ(source.Read(2)->row["prompt"], "p11");
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
  const auto text = [&](const absl::StatusOr<EncodedPrompt>& prompt) {
    return prompt.ok() ? ByteTokenizer().Decode(prompt->token_ids, true) : std::string(prompt.status().message());
  };
  EXPECT_EQ(text(EncodePrompt(encoder, config, json, 1)), "2 + 2");
  config.set_apply_chat_template(true);
  config.set_system_prompt("add");
  EXPECT_EQ(text(EncodePrompt(encoder, config, json, 1)), "system:add;user:2 + 2;");
  config.set_prompt_field("turns");
  EXPECT_EQ(text(EncodePrompt(encoder, config, json, 1)), "system:add;user:hi;");
  config.set_template_arguments("{\"a\": 1}");
  EXPECT_EQ(text(EncodePrompt(encoder, config, json, 1)), "{\"a\": 1}system:add;user:hi;");
  config.clear_template_arguments();
  // A conversation: its prompt ends where the model writes first.
  config.set_prompt_field("talk");
  const nlohmann::json talk = nlohmann::json::parse(R"({"talk": [{"role": "user", "content": "hi"}, {"role": "assistant"},
                                                          {"role": "tool", "content": "4"}, {"role": "assistant"}]})");
  EXPECT_EQ(text(EncodePrompt(encoder, config, talk, 1)), "system:add;user:hi;");
  EXPECT_EQ(EncodePrompt(encoder, config, talk, 1)->messages.size(), 4u);
  config.set_prompt_field("bad");
  EXPECT_THAT(text(EncodePrompt(encoder, config, json, 7)), HasSubstr("line 7 field 'bad'"));
  config.set_prompt_field("missing");
  EXPECT_THAT(text(EncodePrompt(encoder, config, json, 7)),
              HasSubstr("absent; data.prompt_field names it. The row has: bad, empty, q, turns"));
  config.set_prompt_field("empty");
  config.clear_system_prompt();
  config.set_apply_chat_template(false);
  EXPECT_THAT(text(EncodePrompt(encoder, config, json, 7)), HasSubstr("0 tokens"));
}

}  // namespace
}  // namespace tandem

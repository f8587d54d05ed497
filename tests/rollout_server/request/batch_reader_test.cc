#include "rollout_server/request/batch_reader.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

// Text gives one token 1 a byte, but 100, which the vocabulary lacks, for Z; a chat gives one token 2 a message, and one more for
// each byte of template arguments.
class FakeEncoder final : public PromptEncoder {
 public:
  absl::StatusOr<std::string> Render(const std::vector<ChatMessage>& /*messages*/,
                                     const ChatOptions& /*options*/) const override {
    return absl::UnimplementedError("not needed here");
  }
  absl::StatusOr<std::vector<TokenId>> EncodeChat(const std::vector<ChatMessage>& messages,
                                                  const ChatOptions& options) const override {
    return std::vector<TokenId>(messages.size() + options.template_arguments.size(), 2);
  }
  absl::StatusOr<std::optional<std::vector<TokenId>>> EncodeBehind(const std::vector<ChatMessage>& /*messages*/,
                                                                   std::size_t /*answer_index*/,
                                                                   const ChatOptions& /*options*/) const override {
    return absl::UnimplementedError("not needed here");
  }
  std::vector<TokenId> EncodeText(std::string_view text) const override {
    std::vector<TokenId> ids(text.size(), 1);
    std::ranges::transform(text, ids.begin(), [](char c) { return c == 'Z' ? TokenId{100} : TokenId{1}; });
    return ids;
  }
};

constexpr RequestLimits kLimits = {.vocab_size = 100, .max_positions = 2000, .pool_tokens = 800, .max_sequences = 50};

v1::GenerateRequest Header(const std::function<void(v1::BatchHeader*)>& change = [](v1::BatchHeader*) {}) {
  v1::GenerateRequest piece;
  piece.mutable_header()->set_job("job");
  piece.mutable_header()->set_mode(v1::SCHEDULE_MODE_SHARED);
  piece.mutable_header()->set_num_groups(1);
  change(piece.mutable_header());
  return piece;
}
v1::GenerateRequest Group(const std::function<void(v1::GroupHeader*)>& change = [](v1::GroupHeader*) {}) {
  v1::GenerateRequest piece;
  piece.mutable_group()->set_group_size(4);
  piece.mutable_group()->mutable_sampling()->set_temperature(1);
  piece.mutable_group()->mutable_sampling()->set_max_tokens(10);
  change(piece.mutable_group());
  return piece;
}
v1::GenerateRequest Ids(const std::vector<std::uint32_t>& ids) {
  v1::GenerateRequest piece;
  *piece.mutable_prompt()->mutable_token_ids()->mutable_ids() = {ids.begin(), ids.end()};
  return piece;
}
v1::GenerateRequest Text(const std::string& text) {
  v1::GenerateRequest piece;
  piece.mutable_prompt()->set_text(text);
  return piece;
}
v1::GenerateRequest RunPiece() {
  v1::GenerateRequest piece;
  piece.mutable_run();
  return piece;
}

// The first error, or OK when the batch is complete.
absl::Status Read(const std::vector<v1::GenerateRequest>& pieces, BatchRequest* batch = nullptr) {
  BatchReader reader(kLimits, std::make_shared<FakeEncoder>());
  for (const v1::GenerateRequest& piece : pieces) {
    if (absl::Status status = reader.Push(piece); !status.ok()) return status;
  }
  if (!reader.is_complete()) return absl::UnknownError("not complete");
  if (batch != nullptr) *batch = reader.Take();
  return absl::OkStatus();
}

void ExpectRefused(const std::vector<v1::GenerateRequest>& pieces, absl::StatusCode code, const std::vector<std::string>& words) {
  const absl::Status status = Read(pieces);
  EXPECT_EQ(status.code(), code) << status;
  for (const std::string& word : words) EXPECT_THAT(std::string(status.message()), HasSubstr(word));
}

void ExpectSamplingRefused(const std::function<void(v1::SamplingParams*)>& change, const std::vector<std::string>& words) {
  ExpectRefused({Header(), Group([&](v1::GroupHeader* group) { change(group->mutable_sampling()); })},
                absl::StatusCode::kInvalidArgument, words);
}

TEST(BatchReaderTest, ReadsGroupsWithPromptsInPieces) {
  BatchRequest batch;
  ASSERT_TRUE(Read({Header([](v1::BatchHeader* header) {
                      header->set_num_groups(2);
                      header->set_mode(v1::SCHEDULE_MODE_UNIT);
                      header->set_weight_version(7);
                    }),
                    Group(), Ids({1, 2}), Ids({3}), Group([](v1::GroupHeader* group) { group->set_group_index(1); }), Text("ab"),
                    Text("c"), RunPiece()},
                   &batch)
                  .ok());
  EXPECT_EQ(batch.job, "job");
  EXPECT_EQ(batch.weight_version, 7u);
  ASSERT_EQ(batch.groups.size(), 2u);
  EXPECT_EQ(*batch.groups[0].prompt, (std::vector<std::uint32_t>{1, 2, 3}));
  EXPECT_EQ(*batch.groups[1].prompt, (std::vector<std::uint32_t>{1, 1, 1}));
  EXPECT_EQ(batch.groups[0].prompt_kind, "ids");
  EXPECT_EQ(batch.groups[1].prompt_kind, "text");
  EXPECT_EQ(batch.groups[0].sampling.top_p, 1) << "0 is read as off";
  EXPECT_EQ(batch.groups[0].sampling.repetition_penalty, 1);
}

TEST(BatchReaderTest, RefusesSamplingOutsideItsLimitsByFieldAndValue) {
  using P = v1::SamplingParams;
  ExpectSamplingRefused([](P* p) { p->set_temperature(-0.5); }, {"group 0", "temperature", "-0.5", "[1e-4, 100]"});
  ExpectSamplingRefused([](P* p) { p->set_temperature(1e-40); }, {"temperature", "1e-40"});  // 1 / temperature is no float
  ExpectSamplingRefused([](P* p) { p->set_temperature(101); }, {"temperature", "101"});
  ExpectSamplingRefused([](P* p) { p->set_temperature(std::nan("")); }, {"temperature", "nan"});
  ExpectSamplingRefused([](P* p) { p->set_top_p(1.5); }, {"top_p", "1.5"});
  ExpectSamplingRefused([](P* p) { p->set_top_p(-1); }, {"top_p", "-1"});
  ExpectSamplingRefused([](P* p) { p->set_min_p(1); }, {"min_p", "1", "[0, 1)"});
  ExpectSamplingRefused([](P* p) { p->set_repetition_penalty(-2); }, {"repetition_penalty", "-2"});
  ExpectSamplingRefused([](P* p) { p->set_repetition_penalty(INFINITY); }, {"repetition_penalty", "inf"});
  ExpectSamplingRefused([](P* p) { p->set_repetition_penalty(1e300); }, {"repetition_penalty", "1e+300", "100"});
  ExpectSamplingRefused([](P* p) { p->set_repetition_penalty(1e-300); }, {"repetition_penalty", "1e-300", "0.01"});
  ExpectSamplingRefused([](P* p) { p->set_presence_penalty(3); }, {"presence_penalty", "3", "[-2, 2]"});
  ExpectSamplingRefused([](P* p) { p->set_max_tokens(0); }, {"max_tokens", "0"});
  ExpectSamplingRefused([](P* p) { p->add_stop_token_ids(100); }, {"stop_token_ids", "100"});
  ExpectSamplingRefused(
      [](P* p) {
        for (int i = 0; i < 65; ++i) p->add_stop_token_ids(1);
      },
      {"stop_token_ids", "65", "64"});
  ExpectSamplingRefused([](P* p) { p->add_stop_strings(""); }, {"stop_strings", "0 bytes"});
  ExpectSamplingRefused([](P* p) { p->add_stop_strings(std::string(257, 'x')); }, {"stop_strings", "257", "256"});
  ExpectSamplingRefused(
      [](P* p) {
        for (int i = 0; i < 17; ++i) p->add_stop_strings("x");
      },
      {"stop_strings", "17", "16"});
}

// CASES C07
TEST(BatchReaderTest, RefusesARequestThatCanNeverFitTheCache) {
  ExpectRefused({Header(), Group([](v1::GroupHeader* group) { group->mutable_sampling()->set_max_tokens(200); }),
                 Ids(std::vector<std::uint32_t>(700, 1))},
                absl::StatusCode::kResourceExhausted, {"900", "800"});
  EXPECT_TRUE(Read({Header(), Group([](v1::GroupHeader* group) { group->mutable_sampling()->set_max_tokens(100); }),
                    Ids(std::vector<std::uint32_t>(700, 1)), RunPiece()})
                  .ok());
  ExpectRefused({Header(), Group([](v1::GroupHeader* group) { group->mutable_sampling()->set_max_tokens(200); }),
                 Text(std::string(700, 'x')), RunPiece()},
                absl::StatusCode::kResourceExhausted, {"900", "800"});
  ExpectRefused(
      {Header(), Group([](v1::GroupHeader* group) { group->mutable_sampling()->set_max_tokens(4294967295u); }), Ids({1})},
      absl::StatusCode::kInvalidArgument, {"4294967296", "2000"});
}

TEST(BatchReaderTest, RefusesBadHeadersAndGroups) {
  constexpr auto kBad = absl::StatusCode::kInvalidArgument;
  ExpectRefused({Header([](v1::BatchHeader* h) { h->set_mode(v1::SCHEDULE_MODE_UNSPECIFIED); })}, kBad, {"mode", "0"});
  ExpectRefused({Header([](v1::BatchHeader* h) { h->set_num_groups(0); })}, kBad, {"num_groups", "0"});
  ExpectRefused({Header([](v1::BatchHeader* h) { h->set_num_groups(65537); })}, kBad, {"num_groups", "65537", "65536"});
  ExpectRefused({Header([](v1::BatchHeader* h) { h->set_job(std::string(300, 'j')); })}, kBad, {"job", "300"});
  ExpectRefused({Header(), Group([](v1::GroupHeader* g) { g->set_group_index(3); })}, kBad, {"group_index", "3"});
  ExpectRefused({Header(), Group([](v1::GroupHeader* g) { g->set_group_size(0); })}, kBad, {"group_size", "0"});
  ExpectRefused({Header(), Group([](v1::GroupHeader* g) { g->set_group_size(1025); })}, kBad, {"group_size", "1025", "1024"});
  ExpectRefused({Header(), Group([](v1::GroupHeader* g) { g->set_group_size(51); })}, absl::StatusCode::kResourceExhausted,
                {"51", "50"});
}

TEST(BatchReaderTest, TemplateArgumentsGoWithMessagesAlone) {
  const auto arguments = Group([](v1::GroupHeader* group) { group->set_template_arguments("{}"); });
  v1::GenerateRequest messages;
  messages.mutable_prompt()->set_messages_json(R"([{"role": "user", "content": "x"}])");
  BatchRequest batch;
  ASSERT_TRUE(Read({Header(), arguments, messages, RunPiece()}, &batch).ok());
  EXPECT_EQ(batch.groups[0].prompt->size(), 3u);
  ExpectRefused({Header(), arguments, Text("a"), RunPiece()}, absl::StatusCode::kInvalidArgument,
                {"group 0", "template_arguments without messages_json"});
}

TEST(BatchReaderTest, RefusesPiecesOutOfOrder) {
  constexpr auto kBad = absl::StatusCode::kInvalidArgument;
  ExpectRefused({Group()}, kBad, {"header"});
  ExpectRefused({Header(), Header()}, kBad, {"second `header`"});
  ExpectRefused({Header(), Ids({1})}, kBad, {"before any `group`"});
  ExpectRefused({Header(), RunPiece()}, kBad, {"0 groups", "num_groups is 1"});
  ExpectRefused({Header(), Group(), RunPiece()}, kBad, {"group 0", "no prompt"});
  ExpectRefused({Header(), Group(), Ids({1}), Text("a")}, kBad, {"two kinds", "token_ids", "text"});
  ExpectRefused({Header(), Group(), Ids({}), RunPiece()}, kBad, {"no tokens"});
  ExpectRefused({Header(), Group(), Ids({1, 100})}, kBad, {"prompt token 1", "100"});
  ExpectRefused({Header(), Group(), Text("aZa"), RunPiece()}, kBad, {"group 0", "makes token 100 of the prompt's text", "100"});
  ExpectRefused({Header(), Group(), Ids({1}), Group()}, kBad, {"beyond", "1"});
  ExpectRefused({Header(), Group(), Ids({1}), RunPiece(), RunPiece()}, kBad, {"after `run`"});
  ExpectRefused({v1::GenerateRequest()}, kBad, {"header"});
  ExpectRefused({Header(), v1::GenerateRequest()}, kBad, {"no part"});
}

}  // namespace
}  // namespace tandem

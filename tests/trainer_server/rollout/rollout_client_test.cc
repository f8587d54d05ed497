// The two gRPC ends of the loop, against a rollout server in this process: drawing a unit, publishing a version.
#include "trainer_server/rollout/rollout_client.h"
#include "common/base/clock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <thread>

#include "tests/trainer_server/support/fake_rollout.h"
#include "trainer_server/publish/adapter_publisher.h"
#include "trainer_server/rollout/further_turns.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

class RolloutClientTest : public ::testing::Test {
 protected:
  RolloutClientTest()
      : rollout_(&pool_),
        peer_(
            {.address = rollout_.address(), .is_attached = [this] { return is_attached_.load(); }, .patience = absl::Seconds(2)}),
        layout_(AdapterLayout::Create(SmallModel(), 2, {LinearKind::kQProj})),
        publisher_(&peer_, Options()),
        client_(&peer_, [this] { return publisher_.Reactivate(); },
                {.tokenizer = std::make_shared<ByteTokenizer>(),
                 .end_token_ids = {kEndToken},
                 .vocab_size = 257,
                 .unit_deadline = absl::Seconds(10),
                 .max_busy_attempts = 5,
                 .max_lost_attempts = 5}) {
    adapter_.resize(layout_.total_bytes);
  }
  AdapterPublisher::Options Options() {
    const std::span<std::byte> region = pool_.region(v1::REGION_KIND_TRAINER_STANDING);
    return {.job = "job-1",
            .slots = {region.subspan(0, layout_.total_bytes), region.subspan(1 << 20, layout_.total_bytes)},
            .offset_of = [this](const void* address) { return pool_.offset_of(address); },
            .layout = layout_,
            .scale = 2,
            .activate_deadline = absl::Seconds(1)};
  }
  RolloutUnit Unit() {
    return {.job = "job-1",
            .weight_version = 1,
            .group_size = 3,
            .sampling = Sampling(),
            .prompts = {prompt_, prompt_},
            .seeds = {11, 12}};
  }
  v1::SamplingParams Sampling() {
    v1::SamplingParams sampling;
    sampling.set_temperature(1);
    sampling.set_max_tokens(6);
    return sampling;
  }
  absl::StatusOr<std::vector<RolloutGroup>> Draw() { return client_.Draw(Unit()); }
  static std::vector<std::vector<std::uint32_t>> Ids(const std::vector<RolloutGroup>& groups) {
    std::vector<std::vector<std::uint32_t>> ids;
    for (const RolloutGroup& group : groups) {
      for (const Rollout& member : group.members) ids.push_back(member.token_ids);
    }
    return ids;
  }

  FakePool pool_;
  FakeRollout rollout_;
  std::atomic<bool> is_attached_ = true;
  RolloutPeer peer_;
  AdapterLayout layout_;
  AdapterPublisher publisher_;
  RolloutClient client_;
  std::vector<std::byte> adapter_;
  std::vector<TokenId> prompt_ = std::vector<TokenId>(100000, 65);
};

TEST_F(RolloutClientTest, UnitIsSentInPiecesAndCollectedWhole) {
  ASSERT_TRUE(publisher_.Publish(1, adapter_).ok());
  const auto groups = Draw();
  ASSERT_TRUE(groups.ok()) << groups.status();
  ASSERT_EQ(groups->size(), 2u);
  for (const RolloutGroup& group : *groups) {
    ASSERT_EQ(group.members.size(), 3u);
    for (const Rollout& rollout : group.members) {
      EXPECT_EQ(rollout.token_ids.size(), rollout.rollout_logprobs.size());
      EXPECT_EQ(rollout.is_truncated(), rollout.token_ids.back() != kEndToken);
      EXPECT_EQ(rollout.text.size(), rollout.token_ids.size() - (rollout.is_truncated() ? 0 : 1));
      EXPECT_TRUE(rollout.kept_mass.empty());
    }
  }
  const std::vector<v1::GenerateRequest> sent = rollout_.last_unit();
  EXPECT_EQ(sent[0].header().mode(), v1::SCHEDULE_MODE_UNIT);
  EXPECT_EQ(sent[0].header().weight_version(), 1u);
  std::size_t prompt_tokens = 0;
  for (const v1::GenerateRequest& part : sent) {
    EXPECT_LE(part.prompt().token_ids().ids_size(), 64 << 10);
    prompt_tokens += static_cast<std::size_t>(part.prompt().token_ids().ids_size());
  }
  EXPECT_EQ(prompt_tokens, 2 * prompt_.size());
}

TEST_F(RolloutClientTest, ServerThatDiesForgetsOrIsBusyGivesTheSameUnit) {
  ASSERT_TRUE(publisher_.Publish(1, adapter_).ok());
  const auto undisturbed = Draw();
  ASSERT_TRUE(undisturbed.ok());
  const int before = rollout_.num_units();
  rollout_.Set({.dying_units = 2, .forgotten_units = 1, .busy_units = 2, .stalled_activations = 0, .corrupt = {}});
  const auto disturbed = Draw();
  ASSERT_TRUE(disturbed.ok()) << disturbed.status();
  EXPECT_EQ(Ids(*disturbed), Ids(*undisturbed));
  EXPECT_EQ(rollout_.num_units() - before, 6);
  EXPECT_EQ(rollout_.version("job-1"), 1u);
}

// Which a unit may do that its server cannot bear.
TEST_F(RolloutClientTest, ServerThatDiesInEachAttemptEndsTheUnit) {
  ASSERT_TRUE(publisher_.Publish(1, adapter_).ok());
  const int before = rollout_.num_units();
  rollout_.Set({.dying_units = 1000, .forgotten_units = 0, .busy_units = 0, .stalled_activations = 0, .corrupt = {}});
  EXPECT_TRUE(absl::IsUnavailable(Draw().status()));
  EXPECT_EQ(rollout_.num_units() - before, 5);
}

TEST_F(RolloutClientTest, GroupsAreHandedOnWholeAndAgainWhenDrawnAgain) {
  ASSERT_TRUE(publisher_.Publish(1, adapter_).ok());
  for (const int dying_units : {0, 1}) {
    FakeRollout::Faults faults;
    faults.dying_units = dying_units;
    rollout_.Set(std::move(faults));
    std::map<std::size_t, RolloutGroup> handed_on;
    RolloutUnit unit = Unit();
    unit.on_group = [&](std::size_t group_index, const RolloutGroup& group) { handed_on[group_index] = group; };
    const auto groups = client_.Draw(unit);
    ASSERT_TRUE(groups.ok()) << groups.status();
    ASSERT_EQ(handed_on.size(), groups->size());
    for (std::size_t g = 0; g < groups->size(); ++g) {
      for (std::size_t m = 0; m < unit.group_size; ++m) {
        EXPECT_EQ(handed_on[g].members[m].token_ids, (*groups)[g].members[m].token_ids);
        EXPECT_EQ(handed_on[g].members[m].text, (*groups)[g].members[m].text);
        EXPECT_NE(handed_on[g].members[m].finish_reason, v1::FINISH_REASON_UNSPECIFIED);
      }
    }
  }
}

TEST_F(RolloutClientTest, BusyServerIsGivenUpWithItsWords) {
  ASSERT_TRUE(publisher_.Publish(1, adapter_).ok());
  rollout_.Set({.dying_units = 0, .forgotten_units = 0, .busy_units = 100, .stalled_activations = 0, .corrupt = {}});
  const auto groups = Draw();
  EXPECT_TRUE(absl::IsResourceExhausted(groups.status()));
  EXPECT_THAT(std::string(groups.status().message()), HasSubstr("the queue is full"));
}

// CASES C06: a log-prob that is not finite, or a completion that failed, is an error by name, never a neutral value.
TEST_F(RolloutClientTest, AnswersThatBreakTheContractAreRefusedByName) {
  ASSERT_TRUE(publisher_.Publish(1, adapter_).ok());
  struct Case {
    std::function<void(v1::GenerateResponse*)> corrupt;
    std::string words;
  };
  const auto on_tokens = [](auto change) {
    return [change](v1::GenerateResponse* response) {
      if (response->has_tokens()) change(response->mutable_tokens());
    };
  };
  const std::vector<Case> cases = {
      {on_tokens([](v1::TokenPiece* p) { p->set_rollout_logprobs(0, std::nanf("")); }), "not finite"},
      {on_tokens([](v1::TokenPiece* p) { p->clear_rollout_logprobs(); }), "1 ids with 0 log-probs"},
      {on_tokens([](v1::TokenPiece* p) { p->set_ids(0, 9999); }), "token id 9999; the vocabulary has 257"},
      {on_tokens([](v1::TokenPiece* p) { p->add_kept_mass(-1); }), "kept mass -1"},
      {on_tokens([](v1::TokenPiece* p) { p->mutable_version_spans(0)->set_weight_version(7); }),
       "version 7; the unit asked for 1"},
      {[](v1::GenerateResponse* r) { r->set_group_index(50); }, "group 50"},
      {[](v1::GenerateResponse* r) {
         if (r->has_finished()) r->mutable_finished()->set_completion_tokens(77);
       },
       "of 77"},
      {[](v1::GenerateResponse* r) {
         if (!r->has_finished()) return;
         r->mutable_finished()->set_reason(v1::FINISH_REASON_ERROR);
         r->mutable_finished()->set_error("NaN logits at step 3");
       },
       "NaN logits at step 3"},
  };
  for (const Case& faulty : cases) {
    rollout_.Set({.dying_units = 0, .forgotten_units = 0, .busy_units = 0, .stalled_activations = 0, .corrupt = faulty.corrupt});
    const auto groups = Draw();
    EXPECT_FALSE(groups.ok()) << faulty.words;
    EXPECT_THAT(std::string(groups.status().message()), HasSubstr(faulty.words));
  }
}

TEST_F(RolloutClientTest, KeptMassIsOneWhereAPieceSaysNothing) {
  ASSERT_TRUE(publisher_.Publish(1, adapter_).ok());
  FakeRollout::Faults faults;
  faults.corrupt = [](v1::GenerateResponse* response) {
    if (response->has_tokens() && response->tokens().version_spans(0).begin() == 1)
      response->mutable_tokens()->add_kept_mass(0.8f);
  };
  rollout_.Set(faults);
  const auto groups = Draw();
  ASSERT_TRUE(groups.ok()) << groups.status();
  int num_long = 0;
  for (const Rollout& rollout : (*groups)[0].members) {
    if (rollout.token_ids.size() < 2) {
      EXPECT_TRUE(rollout.kept_mass.empty());
      continue;
    }
    ++num_long;
    ASSERT_EQ(rollout.kept_mass.size(), rollout.token_ids.size());
    EXPECT_EQ(rollout.kept_mass[0], 1);
    EXPECT_NEAR(rollout.kept_mass[1], 0.8, 1e-6);
  }
  EXPECT_GT(num_long, 0);
}

TEST_F(RolloutClientTest, StopStringIsCutFromTheTextAndItsTokensStay) {
  ASSERT_TRUE(publisher_.Publish(1, adapter_).ok());
  RolloutUnit unit = Unit();
  const auto plain = client_.Draw(unit);
  ASSERT_TRUE(plain.ok());
  std::string text;
  for (const Rollout& rollout : (*plain)[0].members) {
    if (!rollout.is_truncated() && rollout.text.size() > text.size()) text = rollout.text;
  }
  ASSERT_GE(text.size(), 2u);
  unit.sampling.add_stop_strings(text.substr(1));
  const auto cut = client_.Draw(unit);
  ASSERT_TRUE(cut.ok());
  EXPECT_EQ(Ids(*cut), Ids(*plain));
  bool is_found = false;
  for (const Rollout& rollout : (*cut)[0].members) is_found = is_found || rollout.text == text.substr(0, 1);
  EXPECT_TRUE(is_found);
}

TEST_F(RolloutClientTest, WaitIsShownEndsWithInterruptAndWithPatience) {
  is_attached_ = false;
  const absl::Status timed_out = peer_.WaitUntilServing();
  EXPECT_TRUE(absl::IsDeadlineExceeded(timed_out));
  EXPECT_THAT(std::string(timed_out.message()), HasSubstr(rollout_.address()));
  std::thread waiting([this] { EXPECT_TRUE(absl::IsCancelled(peer_.WaitUntilServing())); });
  while (peer_.waiting_for().empty()) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_THAT(peer_.waiting_for(), HasSubstr("rollout_server at"));
  peer_.Interrupt();
  waiting.join();
  EXPECT_EQ(peer_.waiting_for(), "");
  is_attached_ = true;
  EXPECT_TRUE(absl::IsCancelled(Draw().status()));
}

TEST_F(RolloutClientTest, VersionsAlternateBetweenSlotsAndTheOneInUseIsNeverWritten) {
  std::string before;
  for (std::uint64_t version = 1; version <= 4; ++version) {
    adapter_[0] = static_cast<std::byte>(version);
    ASSERT_TRUE(publisher_.Publish(version, adapter_).ok());
    EXPECT_EQ(rollout_.version("job-1"), version);
    EXPECT_NE(rollout_.checksum("job-1"), before);
    before = rollout_.checksum("job-1");
    adapter_[1] = static_cast<std::byte>(version);  // the caller's copy is not the slot
    EXPECT_EQ(rollout_.checksum("job-1"), before);
  }
}

// CASES C44: the server does not answer within the bound; the version is advanced on neither side, and publishing again works.
TEST_F(RolloutClientTest, PublishThatIsNotAnsweredAdvancesNothing) {
  ASSERT_TRUE(publisher_.Publish(1, adapter_).ok());
  const std::string in_use = rollout_.checksum("job-1");
  rollout_.Set({.dying_units = 0, .forgotten_units = 0, .busy_units = 0, .stalled_activations = 1, .corrupt = {}});
  adapter_[0] = std::byte{42};
  const MonotonicTime begin = MonotonicTime::Now();
  const absl::Status status = publisher_.Publish(2, adapter_);
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_LT(MonotonicTime::Now() - begin, absl::Seconds(4));
  EXPECT_EQ(publisher_.version(), 1u);
  EXPECT_EQ(rollout_.version("job-1"), 1u);
  EXPECT_EQ(rollout_.checksum("job-1"), in_use) << "the slot in use was written";
  ASSERT_TRUE(Draw().ok());
  EXPECT_TRUE(publisher_.PublishWhenServing(2, adapter_).ok());
  EXPECT_EQ(publisher_.version(), 2u);
  EXPECT_EQ(rollout_.version("job-1"), 2u);
}

// CASES C31: a further turn's prompt is the prompt and the ids that were drawn, byte for byte, and what was said; the arrays keep
// one length, and nothing that was said is learned.
TEST_F(RolloutClientTest, FurtherTurnsExtendTheIdsThatWereDrawn) {
  ASSERT_TRUE(publisher_.Publish(1, adapter_).ok());
  const ByteEncoder encoder;
  const auto bytes = [&](const std::string& text) { return encoder.EncodeText(text); };
  std::vector<Prompt> prompts(2);
  prompts[0].token_ids = bytes("user:hi;");
  prompts[0].messages = *PromptEncoder::ParseMessages(
      R"([{"role": "user", "content": "hi"}, {"role": "assistant"}, {"role": "tool", "content": "4"}, {"role": "assistant"},
          {"role": "user", "content": "and?"}])");
  prompts[1].token_ids = bytes("user:one turn;");
  RolloutUnit unit = Unit();
  unit.group_size = 8;
  unit.sampling.set_max_tokens(12);
  unit.prompts = {prompts[0].token_ids, prompts[1].token_ids};
  auto groups = client_.Draw(unit);
  ASSERT_TRUE(groups.ok()) << groups.status();
  const std::vector<RolloutGroup> first = *groups;
  const absl::Status status = DrawFurtherTurns({&encoder, "", 100}, unit, prompts, &client_, &*groups);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(Ids({(*groups)[1]}), Ids({first[1]})) << "no conversation";
  int num_whole = 0;
  for (std::size_t m = 0; m < 8; ++m) {
    const Rollout& member = (*groups)[0].members[m];
    std::vector<TokenId> expected = first[0].members[m].token_ids;
    std::vector<std::uint8_t> mask(expected.size(), 1);
    ASSERT_GE(member.token_ids.size(), expected.size());
    EXPECT_EQ(std::vector<TokenId>(member.token_ids.begin(), member.token_ids.begin() + static_cast<long>(expected.size())),
              expected);
    EXPECT_EQ(member.rollout_logprobs.size(), member.token_ids.size());
    if (first[0].members[m].is_truncated()) {
      EXPECT_EQ(member.token_ids, expected) << "cut by its length: it has no further turn";
      EXPECT_EQ(member.num_drawn(), expected.size());
      continue;
    }
    ASSERT_EQ(member.loss_mask.size(), member.token_ids.size());
    std::string said;
    for (std::size_t t = 0; t < member.token_ids.size(); ++t) {
      if (member.loss_mask[t] != 0) continue;
      said += static_cast<char>(member.token_ids[t]);
      EXPECT_EQ(member.rollout_logprobs[t], 0);
    }
    EXPECT_EQ(member.num_drawn(), member.token_ids.size() - said.size());
    EXPECT_EQ(std::string(";tool:4;;user:and?;").find(said), 0u) << said;
    num_whole += said == ";tool:4;;user:and?;" ? 1 : 0;
  }
  EXPECT_GT(num_whole, 0);
  // The last turn was asked for behind everything before.
  for (const v1::GenerateRequest& request : rollout_.last_unit()) {
    if (!request.has_prompt()) continue;
    const auto& ids = request.prompt().token_ids().ids();
    const std::string text = ByteTokenizer().Decode(std::vector<TokenId>(ids.begin(), ids.end()), false);
    EXPECT_EQ(text.find("user:hi;"), 0u);
    EXPECT_THAT(text, ::testing::EndsWith(";user:and?;"));
  }
  const absl::Status small = DrawFurtherTurns({&encoder, "", 30}, unit, prompts, &client_, &*(groups = first));
  EXPECT_TRUE(absl::IsResourceExhausted(small));
  EXPECT_THAT(std::string(small.message()), HasSubstr("data set row 0: the conversation has"));
}

// CASES C31: a template that writes earlier turns anew splits the sample, which then begins at the new prompt.
TEST_F(RolloutClientTest, RewrittenHistorySplitsTheSample) {
  struct ForgettingEncoder final : public PromptEncoder {
    absl::StatusOr<std::string> Render(const std::vector<ChatMessage>&, const ChatOptions&) const override { return ""; }
    absl::StatusOr<std::vector<TokenId>> EncodeChat(const std::vector<ChatMessage>& messages, const ChatOptions&) const override {
      return EncodeText("last:" + messages.back().content);
    }
    absl::StatusOr<std::optional<std::vector<TokenId>>> EncodeBehind(const std::vector<ChatMessage>&, std::size_t,
                                                                     const ChatOptions&) const override {
      return std::nullopt;
    }
    std::vector<TokenId> EncodeText(std::string_view text) const override { return ByteEncoder().EncodeText(text); }
  } encoder;
  ASSERT_TRUE(publisher_.Publish(1, adapter_).ok());
  std::vector<Prompt> prompts(1);
  prompts[0].token_ids = encoder.EncodeText("p");
  prompts[0].messages = *PromptEncoder::ParseMessages(
      R"([{"role": "user", "content": "hi"}, {"role": "assistant"}, {"role": "user", "content": "b"}])");
  RolloutUnit unit = Unit();
  unit.group_size = 8;
  unit.sampling.set_max_tokens(12);
  unit.prompts = {prompts[0].token_ids};
  unit.seeds = {11};
  auto groups = client_.Draw(unit);
  ASSERT_TRUE(groups.ok());
  ASSERT_TRUE(DrawFurtherTurns({&encoder, "", 100}, unit, prompts, &client_, &*groups).ok());
  int num_split = 0;
  for (const Rollout& member : (*groups)[0].members) {
    if (member.prompt_ids.empty()) continue;
    ++num_split;
    EXPECT_EQ(member.prompt_ids, encoder.EncodeText("last:b"));
    EXPECT_EQ(member.num_drawn(), member.token_ids.size());
    EXPECT_EQ(member.rollout_logprobs.size(), member.token_ids.size());
  }
  EXPECT_GT(num_split, 0);
}

}  // namespace
}  // namespace tandem

#include "rollout_server/service/rollout_service.h"
#include "kernels/checksum/checksum.h"

#include <functional>
#include <map>

#include "common/rpc/channel.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "tests/rollout_server/support/fake_model.h"

namespace tandem {
namespace {

using testing::FakeModel;
using testing::FakeTokenizer;
using testing::Gate;
using ::testing::HasSubstr;

constexpr int kVocabSize = 40;

class TextEncoder final : public PromptEncoder {
 public:
  absl::StatusOr<std::string> Render(const std::vector<ChatMessage>& /*messages*/,
                                     const ChatOptions& /*options*/) const override {
    return absl::UnimplementedError("not needed here");
  }
  absl::StatusOr<std::vector<TokenId>> EncodeChat(const std::vector<ChatMessage>& /*messages*/,
                                                  const ChatOptions& /*options*/) const override {
    return absl::UnimplementedError("not needed here");
  }
  absl::StatusOr<std::optional<std::vector<TokenId>>> EncodeBehind(const std::vector<ChatMessage>& /*messages*/,
                                                                   std::size_t /*answer_index*/,
                                                                   const ChatOptions& /*options*/) const override {
    return absl::UnimplementedError("not needed here");
  }
  std::vector<TokenId> EncodeText(std::string_view text) const override { return std::vector<TokenId>(text.size(), 1); }
};

class RolloutServiceTest : public ::testing::Test {
 protected:
  RolloutServiceTest() : model_(2000, 4, kVocabSize), region_(4096) {}
  ~RolloutServiceTest() override {
    gate_.Open();
    if (engine_ != nullptr) engine_->Stop();
    if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(2));
  }

  void Start(
      const std::function<void(RolloutServiceOptions*)>& change = [](RolloutServiceOptions*) {}, bool is_gated = false,
      int max_waiting_sequences = 100) {
    if (is_gated) model_.gate = &gate_;
    metrics_ = *Metrics::Create("");
    EngineOptions engine_options;
    engine_options.num_blocks = 2000;
    engine_options.block_tokens = 4;
    engine_options.max_batch_tokens = 256;
    engine_options.max_sequences = 64;
    engine_options.max_waiting_sequences = max_waiting_sequences;
    engine_options.vocab_size = kVocabSize;
    engine_ = *Engine::Create(engine_options, &model_, sampler_.get(), FakeTokenizer::Numbered(kVocabSize), metrics_.get());
    RolloutServiceOptions options;
    options.limits = {.vocab_size = kVocabSize, .max_positions = 100000, .pool_tokens = 8000, .max_sequences = 100};
    options.config.name = "fake";
    options.config.num_layers = 1;
    options.config.hidden_size = options.config.intermediate_size = 4;
    options.config.num_heads = options.config.num_kv_heads = 1;
    options.config.head_dim = 4;
    options.device = "cpu";
    options.trainer_region = region_;
    options.trainer_region_begin_bytes = 8192;
    change(&options);
    service_ = std::make_unique<RolloutService>(options, engine_.get(), std::make_shared<TextEncoder>(), [] {
      PoolReport report;
      report.lease_epoch = 5;
      report.ledger.emplace_back().set_owner("weights");
      return report;
    });
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(service_.get());
    server_ = builder.BuildAndStart();
    ASSERT_NE(server_, nullptr);
    address_ = "127.0.0.1:" + std::to_string(port);
    stub_ = v1::RolloutService::NewStub(MakeChannel(address_));
  }

  struct Call {
    std::unique_ptr<grpc::ClientContext> context = std::make_unique<grpc::ClientContext>();
    std::unique_ptr<grpc::ClientReaderWriter<v1::GenerateRequest, v1::GenerateResponse>> stream;
  };
  Call Open() {
    Call call;
    call.context->set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(1));
    call.stream = stub_->Generate(call.context.get());
    return call;
  }
  // One group of `prompt` (text), sent whole.
  Call Send(const std::string& prompt, std::uint32_t group_size, std::uint32_t max_tokens,
            v1::ScheduleMode mode = v1::SCHEDULE_MODE_SHARED, bool return_text = false) {
    Call call = Open();
    v1::GenerateRequest piece;
    piece.mutable_header()->set_mode(mode);
    piece.mutable_header()->set_num_groups(1);
    piece.mutable_header()->set_return_text(return_text);
    call.stream->Write(piece);
    piece.mutable_group()->set_group_size(group_size);
    piece.mutable_group()->mutable_sampling()->set_temperature(1);
    piece.mutable_group()->mutable_sampling()->set_max_tokens(max_tokens);
    call.stream->Write(piece);
    piece.mutable_prompt()->set_text(prompt);
    call.stream->Write(piece);
    piece.mutable_run();
    call.stream->Write(piece);
    return call;
  }
  // Whether `num_sequences` have been cancelled, now or within a minute.
  bool AwaitAborted(int num_sequences) const {
    const std::string line = absl::StrCat("tandem_request_success_total{finished_reason=\"abort\"} ", num_sequences, "\n");
    for (int tries = 0; tries < 6000; ++tries) {
      if (metrics_->Text().find(line) != std::string::npos) return true;
      absl::SleepFor(absl::Milliseconds(10));
    }
    return false;
  }
  static absl::Status Finish(Call* call) { return FromGrpc(call->stream->Finish()); }

  FakeModel model_;
  std::unique_ptr<Sampler> sampler_ = *Sampler::Create({.vocab_size = kVocabSize});
  Gate gate_;
  std::vector<std::byte> region_;
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<RolloutService> service_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
  std::unique_ptr<v1::RolloutService::Stub> stub_;
};

TEST_F(RolloutServiceTest, StreamsEveryTokenOfEveryMemberInOrder) {
  Start();
  for (v1::ScheduleMode mode : {v1::SCHEDULE_MODE_SHARED, v1::SCHEDULE_MODE_UNIT}) {
    Call call = Send("hello", 3, 200, mode, /*return_text=*/true);
    v1::GenerateResponse message;
    std::map<std::uint32_t, std::vector<std::uint32_t>> ids;
    std::map<std::uint32_t, std::string> texts;
    std::map<std::uint32_t, v1::Finished> finished;
    int num_messages = 0;
    bool is_prompt_reported = false;
    while (call.stream->Read(&message)) {
      ++num_messages;
      const std::uint32_t member = message.member_index();
      EXPECT_FALSE(finished.contains(member)) << "`finished` is the last of a member";
      if (message.has_prompt()) {
        EXPECT_EQ(message.prompt().prompt_tokens(), 5u);
        EXPECT_FALSE(is_prompt_reported);
        is_prompt_reported = true;
      } else if (message.has_tokens()) {
        EXPECT_TRUE(is_prompt_reported);
        const v1::TokenPiece& piece = message.tokens();
        EXPECT_EQ(piece.ids_size(), piece.rollout_logprobs_size());
        EXPECT_EQ(piece.ids_size(), piece.raw_logprobs_size());
        EXPECT_EQ(piece.kept_mass_size(), 0);
        ASSERT_EQ(piece.version_spans_size(), 1);
        EXPECT_EQ(piece.version_spans(0).begin(), ids[member].size());
        ids[member].insert(ids[member].end(), piece.ids().begin(), piece.ids().end());
        EXPECT_EQ(piece.version_spans(0).end(), ids[member].size());
        texts[member] += piece.text();
      } else {
        finished[member] = message.finished();
        texts[member] += message.finished().text();
      }
    }
    EXPECT_TRUE(Finish(&call).ok());
    ASSERT_EQ(finished.size(), 3u);
    for (const auto& [member, end] : finished) {
      EXPECT_EQ(end.reason(), v1::FINISH_REASON_LENGTH);
      EXPECT_EQ(end.completion_tokens(), 200u);
      EXPECT_EQ(ids[member].size(), 200u);
      std::string text;
      for (std::uint32_t id : ids[member]) text += "a" + std::to_string(id) + " ";
      EXPECT_EQ(texts[member], text);
    }
    const int most_messages = mode == v1::SCHEDULE_MODE_UNIT ? 1 + 3 * (200 / 64 + 2) : 1 + 3 * (200 + 1);
    EXPECT_LE(num_messages, most_messages) << "a unit's tokens come in few messages";
  }
}

TEST_F(RolloutServiceTest, BadInputIsRefusedAndTheServerGoesOn) {
  Start();
  Call call = Send("hello", 0, 5);
  absl::Status status = Finish(&call);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("group_size"));

  call = Send(std::string(7000, 'x'), 1, 2000);
  status = Finish(&call);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), ::testing::AllOf(HasSubstr("9000"), HasSubstr("8000")));

  call = Open();
  call.stream->WritesDone();
  EXPECT_EQ(Finish(&call).code(), absl::StatusCode::kInvalidArgument);

  call = Send("hello", 1, 3);
  v1::GenerateResponse message;
  while (call.stream->Read(&message)) {}
  EXPECT_TRUE(Finish(&call).ok());
}

TEST_F(RolloutServiceTest, CancellingTheStreamCancelsTheBatch) {
  Start([](RolloutServiceOptions*) {}, /*is_gated=*/true);
  Call call = Send("hello", 4, 5000);
  gate_.Grant(3);
  v1::GenerateResponse message;
  ASSERT_TRUE(call.stream->Read(&message));
  call.context->TryCancel();
  EXPECT_EQ(Finish(&call).code(), absl::StatusCode::kCancelled);
  gate_.Open();
  EXPECT_TRUE(AwaitAborted(4));
}

TEST_F(RolloutServiceTest, AFullQueueAnswersResourceExhausted) {
  Start([](RolloutServiceOptions*) {}, /*is_gated=*/true, /*max_waiting_sequences=*/8);
  Call first = Send("hello", 8, 10);
  ASSERT_TRUE(gate_.AwaitEntry(1));  // the first member runs, seven wait for its prompt
  std::vector<Call> more;
  for (int i = 0; i < 2; ++i) more.push_back(Send("other", 4, 10));
  for (int tries = 0; engine_->status().queued_commands < 2 && tries < 20000; ++tries) absl::SleepFor(absl::Milliseconds(1));
  gate_.Open();
  for (Call& call : more) {
    const absl::Status status = Finish(&call);
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("8"));
  }
  v1::GenerateResponse message;
  while (first.stream->Read(&message)) {}
  EXPECT_TRUE(Finish(&first).ok());
}

TEST_F(RolloutServiceTest, MoreStreamsThanAllowedAreRefused) {
  Start([](RolloutServiceOptions* options) { options->max_streams = 1; }, /*is_gated=*/true);
  Call first = Send("hello", 1, 3);
  ASSERT_TRUE(gate_.AwaitEntry(1));
  Call second = Send("hello", 1, 3);
  EXPECT_EQ(Finish(&second).code(), absl::StatusCode::kResourceExhausted);
  gate_.Open();
  v1::GenerateResponse message;
  while (first.stream->Read(&message)) {}
  EXPECT_TRUE(Finish(&first).ok());
}

TEST_F(RolloutServiceTest, ASlowReaderNeverStopsTheOthersAndIsLetGo) {
  Start([](RolloutServiceOptions* options) { options->max_buffered_tokens = 3000; }, /*is_gated=*/true);
  // Windows of a fixed size, so that 10 x 4000 tokens are more than they and the buffer hold. Nothing is read for now.
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 16 * 1024);
  stub_ = v1::RolloutService::NewStub(grpc::CreateCustomChannel(address_, grpc::InsecureChannelCredentials(), arguments));
  Call slow = Send("hello", 10, 4000);
  ASSERT_TRUE(gate_.AwaitEntry(1));
  gate_.Open();
  stub_ = v1::RolloutService::NewStub(MakeChannel(address_));
  Call quick = Send("other", 1, 50);
  v1::GenerateResponse message;
  while (quick.stream->Read(&message)) {}
  EXPECT_TRUE(Finish(&quick).ok());
  EXPECT_TRUE(AwaitAborted(10));
  std::size_t num_tokens = 0;
  while (slow.stream->Read(&message)) num_tokens += message.tokens().ids_size();
  const absl::Status status = Finish(&slow);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("too slow"));
  EXPECT_GT(num_tokens, 0u);
  EXPECT_LT(num_tokens, 10u * 4000u);
}

TEST_F(RolloutServiceTest, ASilentCallerIsLetGo) {
  Start([](RolloutServiceOptions* options) { options->message_timeout = absl::Milliseconds(100); });
  Call call = Open();
  v1::GenerateRequest piece;
  piece.mutable_header()->set_mode(v1::SCHEDULE_MODE_SHARED);
  piece.mutable_header()->set_num_groups(1);
  call.stream->Write(piece);
  EXPECT_EQ(Finish(&call).code(), absl::StatusCode::kCancelled);
}

TEST_F(RolloutServiceTest, ActivatesAndRetiresAdapters) {
  Start();
  ModelConfig config;
  config.num_layers = 1;
  config.hidden_size = config.intermediate_size = config.head_dim = 4;
  config.num_heads = config.num_kv_heads = 1;
  const AdapterLayout layout = AdapterLayout::Create(config, 2, {LinearKind::kVProj});
  v1::ActivateAdapterRequest request;
  request.set_job("j");
  request.set_weight_version(4);
  request.mutable_slot()->mutable_range()->set_begin_bytes(8192);
  request.mutable_slot()->mutable_range()->set_end_bytes(8192 + layout.total_bytes);
  request.mutable_slot()->set_rank(2);
  request.mutable_slot()->set_scale(2);
  request.mutable_slot()->add_targets("v_proj");
  const auto activate = [&] {
    grpc::ClientContext context;
    v1::ActivateAdapterResponse response;
    return FromGrpc(stub_->ActivateAdapter(&context, request, &response));
  };
  request.mutable_slot()->set_checksum("half written");
  EXPECT_EQ(activate().code(), absl::StatusCode::kAborted);
  request.mutable_slot()->set_checksum(
      *MemoryChecksum(Device::kCpu, std::vector<std::byte>(layout.total_bytes).data(), layout.total_bytes));
  EXPECT_TRUE(activate().ok());
  EXPECT_EQ(activate().code(), absl::StatusCode::kAborted) << "version 4 is active already";

  for (int i = 0; i < 2; ++i) {
    grpc::ClientContext context;
    v1::RetireAdapterRequest retire;
    retire.set_job("j");
    v1::RetireAdapterResponse response;
    EXPECT_TRUE(stub_->RetireAdapter(&context, retire, &response).ok()) << "idempotent";
  }
}

TEST_F(RolloutServiceTest, StatusTellsLoadAndLedger) {
  Start([](RolloutServiceOptions* options) { options->memory.set_kv_block_bytes(4096); });
  grpc::ClientContext context;
  v1::RolloutStatus status;
  ASSERT_TRUE(stub_->GetStatus(&context, v1::RolloutStatusRequest(), &status).ok());
  EXPECT_EQ(status.model(), "fake");
  EXPECT_EQ(status.kv_blocks_total(), 2000u);
  EXPECT_EQ(status.lease_epoch(), 5u);
  ASSERT_EQ(status.ledger_size(), 1);
  EXPECT_EQ(status.ledger(0).owner(), "weights");
  EXPECT_EQ(status.memory().kv_block_bytes(), 4096u);
  EXPECT_EQ(status.kv_blocks_peak(), 0u);
  EXPECT_FALSE(status.is_paused());
}

TEST(StreamBufferTest, CoalescesWhatASlowReaderLeftIntoFullPieces) {
  StreamBuffer buffer({.tokens_per_piece = 1, .max_buffered_tokens = 100000});
  const Member member = {.group_index = 2, .member_index = 1};
  for (std::uint32_t i = 0; i < 5000; ++i) {
    buffer.OnToken(member, {.id = i, .kept_mass = i == 4500 ? 0.5f : 1.0f}, i < 4200 ? 1 : 2, "x");
  }
  buffer.OnFinished(member, v1::FINISH_REASON_STOP, 5000, "y", "");
  buffer.OnEnd(absl::OkStatus());
  v1::GenerateResponse message;
  absl::Status end;
  ASSERT_EQ(buffer.Pop(absl::ZeroDuration(), &message, &end), StreamBuffer::Next::kMessage);
  EXPECT_EQ(message.group_index(), 2u);
  EXPECT_EQ(message.tokens().ids_size(), 4096);
  EXPECT_EQ(message.tokens().kept_mass_size(), 0) << "all are 1";
  ASSERT_EQ(buffer.Pop(absl::ZeroDuration(), &message, &end), StreamBuffer::Next::kMessage);
  EXPECT_EQ(message.tokens().ids_size(), 904);
  EXPECT_EQ(message.tokens().kept_mass_size(), 904);
  ASSERT_EQ(message.tokens().version_spans_size(), 2);
  EXPECT_EQ(message.tokens().version_spans(0).begin(), 4096u);
  EXPECT_EQ(message.tokens().version_spans(0).end(), 4200u);
  EXPECT_EQ(message.tokens().version_spans(1).end(), 5000u);
  ASSERT_EQ(buffer.Pop(absl::ZeroDuration(), &message, &end), StreamBuffer::Next::kMessage);
  EXPECT_EQ(message.finished().text(), "y");
  EXPECT_EQ(buffer.Pop(absl::ZeroDuration(), &message, &end), StreamBuffer::Next::kEnd);
}

}  // namespace
}  // namespace tandem

// Messages of both daemons' services, as whoever may connect can make them: through gRPC to the services themselves.
#include <memory>

#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/rpc/channel.h"
#include "grpcpp/grpcpp.h"
#include "rollout_server/request/batch_reader.h"
#include "rollout_server/service/rollout_service.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/http_exchange.h"
#include "tests/rollout_server/support/fake_model.h"
#include "tests/trainer_server/support/fake_model.h"
#include "trainer_server/http/http_server.h"
#include "trainer_server/http/live_page.h"
#include "trainer_server/service/job_service.h"

namespace tandem::fuzz {
namespace {

constexpr int kVocabSize = 256;                             // of bytes
constexpr absl::Duration kCallTimeout = absl::Seconds(20);  // of calls that take milliseconds
constexpr char kSomeJob[] = "job";                          // in an input: the one that is there

// A client's call that cannot last.
class Call {
 public:
  Call() { context_.set_deadline(GrpcDeadline(MonotonicTime::Now() + kCallTimeout)); }
  grpc::ClientContext* context() { return &context_; }

 private:
  grpc::ClientContext context_;
};

// None of what says that the server is at fault, hangs or is gone.
void CheckAnswer(const grpc::Status& status) {
  for (const grpc::StatusCode code : {grpc::StatusCode::INTERNAL, grpc::StatusCode::UNKNOWN, grpc::StatusCode::UNAVAILABLE,
                                      grpc::StatusCode::DEADLINE_EXCEEDED}) {
    TANDEM_CHECK(status.error_code() != code, static_cast<int>(code), " ", status.error_message());
  }
}

template <typename Message>
void ReadAll(grpc::ClientReader<Message>* reader) {
  Message message;
  while (reader->Read(&message)) {}
  CheckAnswer(reader->Finish());
}

std::unique_ptr<grpc::Server> StartServer(grpc::Service* service, const std::string& address) {
  grpc::ServerBuilder builder;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials());
  builder.RegisterService(service);
  return builder.BuildAndStart();
}

RequestLimits SmallLimits() { return {.vocab_size = kVocabSize, .max_positions = 128, .pool_tokens = 256, .max_sequences = 8}; }

std::vector<v1::GenerateRequest> WholeBatch() {
  std::vector<v1::GenerateRequest> pieces(5);
  pieces[0].mutable_header()->set_mode(v1::SCHEDULE_MODE_SHARED);
  pieces[0].mutable_header()->set_num_groups(1);
  pieces[0].mutable_header()->set_return_text(true);
  v1::GroupHeader* const group = pieces[1].mutable_group();
  group->set_group_size(2);
  group->mutable_sampling()->set_temperature(1);
  group->mutable_sampling()->set_max_tokens(4);
  group->mutable_sampling()->set_top_p(0.9);
  group->mutable_sampling()->add_stop_strings("END");
  pieces[2].mutable_prompt()->set_text("hello");
  pieces[3].mutable_prompt()->set_text(" you");
  pieces[4].mutable_run();
  return pieces;
}

template <typename Message>
std::string Serialize(const std::vector<Message>& messages) {
  std::vector<std::string> texts;
  for (const Message& message : messages) texts.push_back(message.SerializeAsString());
  return JoinMessages(texts);
}

std::vector<std::string> BatchSeeds() {
  std::vector<v1::GenerateRequest> chat = WholeBatch(), ids = WholeBatch();
  chat[1].mutable_group()->set_template_arguments("{\"a\": 1}");
  chat[2].mutable_prompt()->set_messages_json("[{\"role\": \"user\", ");
  chat[3].mutable_prompt()->set_messages_json("\"content\": \"hi\"}]");
  for (const std::uint32_t id : {1u, 2u, 3u}) ids[2].mutable_prompt()->mutable_token_ids()->add_ids(id);
  ids.erase(ids.begin() + 3);
  return {Serialize(WholeBatch()), Serialize(chat), Serialize(ids)};
}

struct RolloutHalf {
  testing::TemporaryDirectory directory;
  const std::string address = "unix:" + directory.File("rollout.grpc");
  testing::FakeModel model{64, 4, kVocabSize};
  std::unique_ptr<Sampler> sampler = *Sampler::Create({.vocab_size = kVocabSize});
  std::unique_ptr<Metrics> metrics = *Metrics::Create("");
  std::vector<std::byte> region = std::vector<std::byte>(4096);
  std::unique_ptr<Engine> engine;
  std::unique_ptr<RolloutService> service;
  std::unique_ptr<grpc::Server> server;
  std::unique_ptr<v1::RolloutService::Stub> stub;

  RolloutHalf() {
    EngineOptions engine_options;
    engine_options.num_blocks = 64;
    engine_options.block_tokens = 4;
    engine_options.max_batch_tokens = 64;
    engine_options.max_sequences = 8;
    engine_options.max_waiting_sequences = 8;
    engine_options.vocab_size = kVocabSize;
    engine = *Engine::Create(engine_options, &model, sampler.get(), testing::FakeTokenizer::Numbered(kVocabSize), metrics.get());
    RolloutServiceOptions options;
    options.limits = SmallLimits();
    options.config = SmallModel();
    options.device = "cpu";
    options.trainer_region = region;
    options.trainer_region_begin_bytes = 8192;
    service =
        std::make_unique<RolloutService>(options, engine.get(), std::make_shared<ByteEncoder>(), [] { return PoolReport(); });
    server = StartServer(service.get(), address);
    stub = v1::RolloutService::NewStub(server->InProcessChannel({}));
  }
  ~RolloutHalf() {
    engine->Stop();
    server->Shutdown(GrpcDeadline(MonotonicTime::Now() + absl::Seconds(1)));
  }
};

struct TrainerHalf {
  testing::TemporaryDirectory directory;
  const std::string address = "unix:" + directory.File("trainer.grpc");
  FakePool pool;
  std::unique_ptr<JobStore> store = *JobStore::Open(directory.File("jobs.sqlite"));
  std::unique_ptr<ContentStore> content = *ContentStore::Open(directory.File("content"), 1 << 20);
  FakeStanding standing{pool.region(v1::REGION_KIND_TRAINER_STANDING)};
  std::unique_ptr<Metrics> metrics = *Metrics::Create("");
  RolloutPeer peer{
      {.address = "unix:" + directory.File("nobody.grpc"), .is_attached = [] { return false; }, .patience = absl::Seconds(1)}};
  std::unique_ptr<JobRunner> runner;  // not started: jobs stay in the queue
  std::unique_ptr<JobService> service;
  std::unique_ptr<grpc::Server> server;
  std::unique_ptr<v1::JobService::Stub> stub;
  std::string sha256, job_text, job;  // of some content, of a job, the job itself (kSomeJob)

  TrainerHalf() {
    LoopEnvironment environment;
    environment.model = SmallModel();
    environment.tokenizer = std::make_shared<ByteTokenizer>();
    environment.encoder = std::make_shared<ByteEncoder>();
    environment.member = &pool;
    environment.standing = &standing;
    environment.node_memory = [] { return SmallNode(); };
    environment.peer = &peer;
    environment.content = content.get();
    environment.metrics = metrics.get();
    environment.make_policy = [](const AdapterMemory&, const PolicyOptions&) -> absl::StatusOr<std::unique_ptr<PolicyModel>> {
      return absl::UnimplementedError("no job runs here");
    };
    runner = std::make_unique<JobRunner>(store.get(), environment, JobRunner::Options{.directory = directory.path()});
    JobService::Options options;
    options.surroundings = {SmallModel(), environment.encoder, content.get(), environment.node_memory};
    options.model.config = SmallModel();
    options.device = "cpu";
    options.member = &pool;
    options.access = Access::Create({}).value();
    service = std::make_unique<JobService>(options, store.get(), content.get(), runner.get());
    server = StartServer(service.get(), address);
    stub = v1::JobService::NewStub(server->InProcessChannel({}));
  }
  ~TrainerHalf() { server->Shutdown(GrpcDeadline(MonotonicTime::Now() + absl::Seconds(1))); }
};

// One call of a service whose first message is `bytes`, and of one that streams the others too.
using Method = void (*)(TrainerHalf* half, const std::string& bytes, std::span<const std::string> others);

template <typename Request>
bool Parse(const std::string& bytes, const TrainerHalf& half, Request* request) {
  if (!request->ParseFromString(bytes)) return false;
  if constexpr (requires { request->set_job(half.job); }) {
    if (request->job() == kSomeJob) request->set_job(half.job);
  }
  return true;
}

template <typename Request, typename Response,
          grpc::Status (v1::JobService::Stub::*kMethod)(grpc::ClientContext*, const Request&, Response*)>
void Unary(TrainerHalf* half, const std::string& bytes, std::span<const std::string>) {
  Request request;
  if (!Parse(bytes, *half, &request)) return;
  Call call;
  Response response;
  CheckAnswer((half->stub.get()->*kMethod)(call.context(), request, &response));
}

template <typename Request, typename Response,
          std::unique_ptr<grpc::ClientReader<Response>> (v1::JobService::Stub::*kMethod)(grpc::ClientContext*, const Request&)>
void ServerStream(TrainerHalf* half, const std::string& bytes, std::span<const std::string>) {
  Request request;
  if (!Parse(bytes, *half, &request)) return;
  if constexpr (std::is_same_v<Request, v1::WatchRequest>) request.set_until_now(true);  // no job here ends
  Call call;
  ReadAll((half->stub.get()->*kMethod)(call.context(), request).get());
}

void Upload(TrainerHalf* half, const std::string& bytes, std::span<const std::string> others) {
  Call call;
  v1::UploadResponse response;
  const auto writer = half->stub->Upload(call.context(), &response);
  v1::UploadRequest request;
  bool is_open = request.ParseFromString(bytes) && writer->Write(request);
  for (const std::string& other : others) {
    if (!other.empty()) is_open = is_open && request.ParseFromString(other.substr(1)) && writer->Write(request);
  }
  writer->WritesDone();
  CheckAnswer(writer->Finish());
}

constexpr Method kJobMethods[] = {
    Upload,
    Unary<v1::HasContentRequest, v1::HasContentResponse, &v1::JobService::Stub::HasContent>,
    Unary<v1::SubmitRequest, v1::SubmitResponse, &v1::JobService::Stub::Submit>,
    Unary<v1::PlanRequest, v1::PlanResponse, &v1::JobService::Stub::Plan>,
    Unary<v1::ListJobsRequest, v1::ListJobsResponse, &v1::JobService::Stub::ListJobs>,
    Unary<v1::GetJobRequest, v1::JobStatus, &v1::JobService::Stub::GetJob>,
    Unary<v1::GetJobRequest, v1::JobDescription, &v1::JobService::Stub::Describe>,
    ServerStream<v1::WatchRequest, v1::WatchResponse, &v1::JobService::Stub::Watch>,
    Unary<v1::CancelRequest, v1::JobStatus, &v1::JobService::Stub::Cancel>,
    Unary<v1::PauseRequest, v1::JobStatus, &v1::JobService::Stub::Pause>,
    Unary<v1::ResumeRequest, v1::JobStatus, &v1::JobService::Stub::Resume>,
    ServerStream<v1::CompletionsRequest, v1::CompletionRecord, &v1::JobService::Stub::Completions>,
    ServerStream<v1::ExportRequest, v1::ExportResponse, &v1::JobService::Stub::Export>,
    Unary<v1::TrainerStatusRequest, v1::TrainerStatus, &v1::JobService::Stub::GetStatus>,
};

// With content, a job in the queue, and what a job leaves behind.
std::shared_ptr<TrainerHalf> TrainerWithAJob() {
  const auto half = std::make_shared<TrainerHalf>();
  const std::string rows = "{\"prompt\": \"1 + 1\"}\n{\"prompt\": \"2 + 2\"}\n";
  half->sha256 = Sha256Hex(rows);
  auto upload = half->content->BeginUpload(half->sha256, rows.size());
  TANDEM_CHECK(upload.ok() && (*upload)->Append(rows).ok() && (*upload)->Commit().ok(), "upload");
  half->job_text = absl::StrCat(
      R"(name: "a" num_steps: 4 rollout { prompts_per_step: 2 group_size: 4 sampling { temperature: 1 max_tokens: 8 } }
      rewards { weight: 1 ended_by_itself {} } adapter { rank: 2 alpha: 4 } optimizer { learning_rate: 0.1 } data { content: ")",
      half->sha256, "\" }");
  v1::SubmitRequest submit;
  submit.set_job_text(half->job_text);
  v1::SubmitResponse submitted;
  Call call;
  const grpc::Status status = half->stub->Submit(call.context(), submit, &submitted);
  TANDEM_CHECK(status.ok(), status.error_message());
  half->job = submitted.job();
  const std::string directory = half->runner->DirectoryOf(half->job);
  std::filesystem::create_directories(directory + "/completions");
  WriteText(directory + "/history.jsonl", "{\"kind\":\"step\",\"step\":1,\"reward\":0.5,\"times\":{}}\n");
  WriteText(directory + "/completions/step-000001.jsonl", "{\"step\":1,\"prompt\":\"a\",\"completion\":\"b\",\"reward\":1}\n");
  return half;
}

}  // namespace

FuzzTarget GenerateRequestTarget() {
  const auto read = [](const std::string& input) {
    BatchReader reader(SmallLimits(), std::make_shared<ByteEncoder>());
    for (const std::string& message : SplitMessages(input)) {
      v1::GenerateRequest piece;
      if (!piece.ParseFromString(message) || !reader.Push(piece).ok()) return;
    }
    if (!reader.is_complete()) return;
    const BatchRequest batch = reader.Take();
    TANDEM_CHECK(!batch.groups.empty(), "no groups");
    for (const GroupRequest& group : batch.groups) {
      TANDEM_CHECK(group.prompt->size() + group.sampling.max_tokens <= 128, group.prompt->size());
    }
  };
  return {.read = read, .seeds = BatchSeeds(), .words = {"\"role\"", "\"content\"", "[{", "}]"}};
}

FuzzTarget RolloutServiceTarget() {
  const auto half = std::make_shared<RolloutHalf>();
  const auto read = [half](const std::string& input) {
    const std::vector<std::string> messages = SplitMessages(input);
    if (messages.empty()) return;
    // The first message is one byte: which call.
    const unsigned char method = messages[0].empty() ? 0 : static_cast<unsigned char>(messages[0][0]);
    const std::string bytes = messages.size() > 1 ? messages[1] : "";
    Call call;
    if (method % 4 == 0) {
      const auto stream = half->stub->Generate(call.context());
      v1::GenerateRequest piece;
      bool is_open = true;
      for (std::size_t i = 1; i < messages.size() && is_open; ++i) {
        is_open = piece.ParseFromString(messages[i]) && stream->Write(piece) && !piece.has_run();  // nobody reads behind it
      }
      stream->WritesDone();
      v1::GenerateResponse response;
      while (stream->Read(&response)) {}
      CheckAnswer(stream->Finish());
    } else if (method % 4 == 1) {
      v1::ActivateAdapterRequest request;
      v1::ActivateAdapterResponse response;
      if (request.ParseFromString(bytes)) CheckAnswer(half->stub->ActivateAdapter(call.context(), request, &response));
    } else if (method % 4 == 2) {
      v1::RetireAdapterRequest request;
      v1::RetireAdapterResponse response;
      if (request.ParseFromString(bytes)) CheckAnswer(half->stub->RetireAdapter(call.context(), request, &response));
    } else {
      v1::RolloutStatus response;
      CheckAnswer(half->stub->GetStatus(call.context(), {}, &response));
      TANDEM_CHECK(response.running_sequences() + response.waiting_sequences() <= 8, response.ShortDebugString());
    }
  };
  FuzzTarget target{.read = read, .seeds = {}, .words = {}};
  const std::string generate = JoinMessages({std::string(1, '\0')});
  for (const std::string& batch : BatchSeeds()) target.seeds.push_back(generate + batch);
  v1::ActivateAdapterRequest activate;
  activate.set_job("job");
  activate.set_weight_version(1);
  activate.mutable_slot()->mutable_range()->set_begin_bytes(8192);
  activate.mutable_slot()->mutable_range()->set_end_bytes(8192 + 4096);
  activate.mutable_slot()->set_rank(1);
  activate.mutable_slot()->set_scale(1);
  activate.mutable_slot()->add_targets("q_proj");
  activate.mutable_slot()->set_checksum(std::string(16, '0'));
  v1::RetireAdapterRequest retire;
  retire.set_job("job");
  target.seeds.push_back(JoinMessages({"\x01", activate.SerializeAsString()}));
  target.seeds.push_back(JoinMessages({"\x02", retire.SerializeAsString()}));
  target.seeds.push_back(JoinMessages({"\x03"}));
  target.words = {"q_proj", "down_proj"};
  return target;
}

FuzzTarget JobServiceTarget() {
  const std::shared_ptr<TrainerHalf> half = TrainerWithAJob();
  const auto read = [half](const std::string& input) {
    const std::vector<std::string> messages = SplitMessages(input);
    for (std::size_t i = 0; i < messages.size(); ++i) {
      if (messages[i].empty()) continue;
      // The first byte of each message says which call; an upload takes all that follow.
      const Method method = kJobMethods[static_cast<unsigned char>(messages[i][0]) % std::size(kJobMethods)];
      method(half.get(), messages[i].substr(1), std::span(messages).subspan(i + 1));
      if (method == Upload) break;
    }
  };
  FuzzTarget target{.read = read, .seeds = {}, .words = {}};
  v1::UploadRequest header, piece;
  header.mutable_header()->set_sha256(Sha256Hex("abc"));
  header.mutable_header()->set_size_bytes(3);
  header.mutable_header()->set_name("../a");
  piece.set_piece("abc");
  v1::PlanRequest plan;
  plan.set_job_text(half->job_text);
  v1::SubmitRequest submit;
  submit.set_job_text(half->job_text);
  v1::ListJobsRequest list;
  list.set_page_token("5");
  v1::WatchRequest watch;
  watch.set_job(kSomeJob);
  v1::CompletionsRequest completions;
  completions.set_job(kSomeJob);
  completions.set_min_reward(0.5);
  completions.set_function("ended_by_itself");
  v1::ExportRequest export_request;
  export_request.set_job(kSomeJob);
  v1::GetJobRequest get;
  get.set_job(kSomeJob);
  const auto message = [](char method, const google::protobuf::Message& request) { return method + request.SerializeAsString(); };
  target.seeds = {JoinMessages({message(0, header), message(0, piece)}),
                  JoinMessages({message(3, plan)}),
                  JoinMessages({message(2, submit)}),
                  JoinMessages({message(4, list), message(5, get), message(6, get), message(13, v1::TrainerStatusRequest())}),
                  JoinMessages({message(7, watch), message(11, completions)}),
                  JoinMessages({message(9, get), message(10, get), message(12, export_request)})};
  target.words = {kSomeJob, "../../", "/etc", half->sha256, std::string(64, 'a')};
  return target;
}

// Through the live page's own HTTP server.
FuzzTarget PageRequestTarget() {
  struct Page {
    std::shared_ptr<TrainerHalf> trainer = TrainerWithAJob();
    RolloutHalf rollout;
    LivePage page{Access::Create({}).value(), trainer->address, rollout.address};
    std::unique_ptr<HttpServer> server =
        HttpServer::Start("127.0.0.1:0", {}, [this](const HttpRequest& request) { return page.Answer(request); }).value();
  };
  const auto page = std::make_shared<Page>();
  const auto read = [page](const std::string& input) {
    std::string request = input;
    for (std::size_t at = 0; (at = request.find("/jobs/job/", at)) != std::string::npos; ++at) {
      request.replace(at + 6, 3, page->trainer->job);
    }
    TANDEM_CHECK(Exchange(page->server->port(), request, kCallTimeout), "no end of an answer");
  };
  FuzzTarget target{.read = read, .seeds = {}, .words = HttpWords()};
  for (const char* path : {"/", "/api/status", "/api/rollout", "/api/jobs?page_size=10",
                           "/api/jobs/job/history?from_step=1&stride_steps=2", "/api/jobs/job/completions?step=1&limit=2"}) {
    for (const std::string& seed : HttpSeeds(path)) target.seeds.push_back(seed);
  }
  for (const char* word : {"/api/", "jobs/", "job/", "history", "completions", "?", "&", "=", "from_step=", "4294967296", "-1"}) {
    target.words.push_back(word);
  }
  return target;
}

}  // namespace tandem::fuzz

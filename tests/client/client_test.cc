#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "client/commands.h"
#include "client/job_file.h"
#include "client/job_history.h"
#include "client/plot.h"
#include "client/printing.h"
#include "client/progress.h"
#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/base/units.h"
#include "common/rpc/channel.h"
#include "google/protobuf/text_format.h"
#include "nlohmann/json.hpp"

namespace tandem {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string FreshDirectory(const std::string& name) {
  const std::filesystem::path path = std::filesystem::path(::testing::TempDir()) / name;
  std::filesystem::remove_all(path);
  std::filesystem::create_directories(path);
  return path.string();
}

void WriteFile(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// A trainer that keeps what is uploaded and exports whatever files it is told to.
class RecordingTrainer final : public v1::JobService::Service {
 public:
  grpc::Status HasContent(grpc::ServerContext*, const v1::HasContentRequest* request, v1::HasContentResponse* response) override {
    response->set_present(contents.count(request->sha256()) != 0);
    response->set_partial_bytes(partial.size());
    return grpc::Status::OK;
  }
  grpc::Status Upload(grpc::ServerContext*, grpc::ServerReader<v1::UploadRequest>* reader, v1::UploadResponse*) override {
    v1::UploadRequest request;
    std::string sha256, bytes;
    ++num_uploads;
    while (reader->Read(&request)) {
      if (request.has_header()) {
        sha256 = request.header().sha256();
        offsets.push_back(request.header().offset_bytes());
        bytes = partial.substr(0, request.header().offset_bytes());
      }
      largest_piece = std::max(largest_piece, request.piece().size());
      bytes += request.piece();
      if (num_uploads <= num_broken_uploads && request.has_piece()) {
        partial = bytes;
        return grpc::Status(grpc::StatusCode::UNAVAILABLE, "Socket closed");
      }
    }
    if (Sha256Hex(bytes) != sha256) {
      partial.clear();
      return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "other bytes");
    }
    contents[sha256] = bytes;
    return grpc::Status::OK;
  }
  grpc::Status Submit(grpc::ServerContext*, const v1::SubmitRequest* request, v1::SubmitResponse* response) override {
    job_text = request->job_text();
    response->set_job("addition-1");
    return grpc::Status::OK;
  }
  grpc::Status Plan(grpc::ServerContext*, const v1::PlanRequest* request, v1::PlanResponse* response) override {
    job_text = request->job_text();
    live_sequences = request->live_sequences();
    *response = plan;
    return grpc::Status::OK;
  }
  grpc::Status Describe(grpc::ServerContext*, const v1::GetJobRequest* request, v1::JobDescription* response) override {
    response->set_job_text(job_texts[request->job()]);
    response->mutable_status()->set_state(v1::JOB_STATE_SUCCEEDED);
    return grpc::Status::OK;
  }
  grpc::Status Watch(grpc::ServerContext*, const v1::WatchRequest* request,
                     grpc::ServerWriter<v1::WatchResponse>* writer) override {
    watched_from.push_back(request->from_step());
    const bool breaks = watched_from.size() <= num_broken_watches;
    for (const v1::WatchResponse& event : histories[request->job()]) {
      const bool is_known = event.has_step() ? event.step().step() < request->from_step()
                                             : event.has_evaluation() && event.evaluation().step() + 1 < request->from_step();
      if (!is_known && !(breaks && event.has_status())) writer->Write(event);
    }
    return breaks ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "Socket closed") : grpc::Status::OK;
  }
  grpc::Status Completions(grpc::ServerContext*, const v1::CompletionsRequest* request,
                           grpc::ServerWriter<v1::CompletionRecord>* writer) override {
    filters = *request;
    for (const v1::CompletionRecord& record : completions) writer->Write(record);
    return grpc::Status::OK;
  }
  grpc::Status Export(grpc::ServerContext*, const v1::ExportRequest*, grpc::ServerWriter<v1::ExportResponse>* writer) override {
    for (const auto& [name, bytes] : files) {
      v1::ExportResponse response;
      response.set_file(name);
      response.set_piece(bytes);
      response.set_is_last(true);
      if (!writer->Write(response)) break;
    }
    return grpc::Status::OK;
  }

  std::map<std::string, std::string> contents, files, job_texts;
  std::map<std::string, std::vector<v1::WatchResponse>> histories;
  std::vector<std::uint32_t> watched_from;  // by call
  std::size_t num_broken_watches = 0;       // the first so many break before they tell the status
  std::vector<v1::CompletionRecord> completions;
  v1::CompletionsRequest filters;
  std::size_t largest_piece = 0;
  int num_uploads = 0;
  int num_broken_uploads = 0;  // the first so many break after a piece
  std::string partial;
  std::vector<std::uint64_t> offsets;  // by upload
  std::string job_text;
  std::uint32_t live_sequences = 0;
  v1::PlanResponse plan;
};

class ClientTest : public ::testing::Test {
 protected:
  ClientTest() {
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&trainer_);
    server_ = builder.BuildAndStart();
    connection_.trainer_address = absl::StrCat("127.0.0.1:", port);
    connection_.timeout = absl::Seconds(5);
  }
  ~ClientTest() override { server_->Shutdown(GrpcDeadline(MonotonicTime::Now() + absl::Seconds(1))); }

  RecordingTrainer trainer_;
  std::unique_ptr<grpc::Server> server_;
  Connection connection_;
};

TEST_F(ClientTest, SubmitUploadsDataOnceInPiecesAndSendsContentAddresses) {
  const std::string directory = FreshDirectory("submit");
  const std::string data(3 * kMiB + 17, 'x');
  WriteFile(directory + "/rows.jsonl", data);
  WriteFile(directory + "/job.textproto", "name: \"addition\" data { path: \"rows.jsonl\" } seed: 3");
  SubmitOptions options;
  options.overrides = {"seed: 7"};
  ASSERT_TRUE(Submit(connection_, {directory + "/job.textproto"}, options).ok());
  ASSERT_TRUE(Submit(connection_, {directory + "/job.textproto"}, options).ok());
  EXPECT_EQ(trainer_.num_uploads, 1);
  EXPECT_LE(trainer_.largest_piece, kMiB);
  EXPECT_EQ(trainer_.contents[Sha256Hex(data)], data);
  EXPECT_THAT(trainer_.job_text, HasSubstr(Sha256Hex(data)));
  EXPECT_THAT(trainer_.job_text, HasSubstr("seed: 7"));
  EXPECT_THAT(trainer_.job_text, Not(HasSubstr("rows.jsonl")));
}

TEST_F(ClientTest, PythonRewardsTravelByContentWithTheirNames) {
  const std::string directory = FreshDirectory("rewards");
  WriteFile(directory + "/mine.py", "def a(**k): pass");
  WriteFile(directory + "/theirs.py", "def c(**k): pass");
  WriteFile(directory + "/job.textproto",
            "name: \"addition\" rewards { weight: 2 python_function { path: \"mine.py\" function: \"z\" } }");
  SubmitOptions options;
  options.rewards = absl::StrCat(directory, "/mine.py:a,b,", directory, "/theirs.py:c");
  ASSERT_TRUE(Submit(connection_, {directory + "/job.textproto"}, options).ok());
  v1::JobSpec spec;
  ASSERT_TRUE(google::protobuf::TextFormat::ParseFromString(trainer_.job_text, &spec));
  std::vector<std::string> said;
  for (const v1::RewardConfig& reward : spec.rewards()) {
    const v1::PythonFunction& python = reward.python_function();
    EXPECT_EQ(python.path(), "");
    EXPECT_EQ(trainer_.contents[python.content()], python.function() == "c" ? "def c(**k): pass" : "def a(**k): pass");
    said.push_back(absl::StrCat(python.file_name(), ":", python.function(), "=", reward.weight()));
  }
  EXPECT_THAT(said, ::testing::ElementsAre("mine.py:z=2", "mine.py:a=1", "mine.py:b=1", "theirs.py:c=1"));
  options.rewards = "a,mine.py:b";
  EXPECT_THAT(std::string(Submit(connection_, {directory + "/job.textproto"}, options).message()),
              HasSubstr("--rewards: 'a'; must be FILE:FUNCTION"));
  options.rewards = "absent.py:b";
  EXPECT_THAT(std::string(Submit(connection_, {directory + "/job.textproto"}, options).message()), HasSubstr("absent.py"));
}

TEST_F(ClientTest, PlanOfAJobThatDoesNotFitIsPrintedAndFails) {
  const std::string directory = FreshDirectory("plan");
  WriteFile(directory + "/job.textproto", "name: \"addition\"");
  EXPECT_TRUE(Plan(connection_, {directory + "/job.textproto"}, {}, 8).ok());
  EXPECT_EQ(trainer_.live_sequences, 8u);
  EXPECT_THAT(std::string(Plan(connection_, {directory + "/job.textproto"}, {}, -1).message()),
              HasSubstr("--live_sequences: -1; must be 0 to 65536"));
  trainer_.plan.add_faults("adapter.rank: 64; must be small enough");
  trainer_.plan.add_faults("rollout.sampling.max_tokens: 9; the largest context that fits is 7 tokens");
  const absl::Status status = Plan(connection_, {directory + "/job.textproto"}, {}, 0);
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("small enough\nrollout.sampling.max_tokens: 9"));
}

TEST(PrintingTest, MemoryPlanIsATableByOwnerWithWhatToAskFor) {
  v1::MemoryPlan plan;
  const auto add = [&](const char* owner, v1::MemoryPlace place, std::uint64_t generation, std::uint64_t training) {
    v1::PlannedBytes* owned = plan.add_owners();
    owned->set_owner(owner);
    owned->set_place(place);
    owned->set_generation_bytes(generation);
    owned->set_training_bytes(training);
  };
  add("weights", v1::MEMORY_PLACE_POOL, 5 * kGiB, 5 * kGiB);
  add("kv_cache", v1::MEMORY_PLACE_POOL, 2 * kGiB, 0);
  add("activations", v1::MEMORY_PLACE_POOL, 0, 3 * kGiB);
  add("host_layer_inputs", v1::MEMORY_PLACE_HOST, 7 * kGiB, 7 * kGiB);
  plan.set_pool_bytes(9 * kGiB);
  plan.set_context_tokens(20480);
  plan.set_asked_pool_bytes(8 * kGiB);
  v1::ContextWall* wall = plan.add_walls();
  wall->set_name("kv_cache");
  wall->set_context_tokens(30000);
  const std::string text = FormatMemoryPlan(plan);
  for (const char* words :
       {"weights            5.0 GiB     5.0 GiB   pool", "kv_cache           2.0 GiB     -         pool",
        "host_layer_inputs  7.0 GiB     7.0 GiB   host", "pool               7.0 GiB     8.0 GiB   of 9.0 GiB",
        "context: 20480 tokens of the job; no context fits this node", "kv_cache 30000", "--pool_bytes=8192MiB",
        "estimate of a step"}) {
    EXPECT_THAT(text, HasSubstr(words));
  }
  plan.set_largest_context_tokens(30000);
  EXPECT_THAT(FormatMemoryPlan(plan), HasSubstr("at most 30000 on this node"));
}

TEST_F(ClientTest, FaultyJobFileIsNamedWithLineAndColumn) {
  const std::string directory = FreshDirectory("faulty");
  WriteFile(directory + "/job.textproto", "name: \"a\"\nnum_stepz: 3\n");
  const absl::Status status = Submit(connection_, {directory + "/job.textproto"}, {});
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("job.textproto:2:"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("num_stepz"));
  EXPECT_TRUE(trainer_.job_text.empty());
}

TEST_F(ClientTest, UnknownEnumerationValueIsToldWithThoseAllowed) {
  const std::string directory = FreshDirectory("enumeration");
  const std::string path = directory + "/job.textproto";
  const auto why = [&](const std::string& text, const std::vector<std::string>& overrides) {
    WriteFile(path, text);
    return std::string(ReadJobFile(path, overrides).status().message());
  };
  const std::string kl = R"("K9" for field "kl_estimator"; must be KL_ESTIMATOR_K1, KL_ESTIMATOR_K2, KL_ESTIMATOR_K3)";
  const std::string preset = R"(Unknown enumeration value of "DR_GRPO" for field "preset"; must be LOSS_PRESET_GRPO, )";
  EXPECT_THAT(why("loss { preset: DR_GRPO }", {}), HasSubstr("job.textproto:1:24: " + preset));
  EXPECT_THAT(why("loss { preset: DR_GRPO }", {}), HasSubstr(", LOSS_PRESET_DR_GRPO, "));
  EXPECT_THAT(why("loss { preset: DR_GRPO }", {}), Not(HasSubstr("UNSPECIFIED")));
  EXPECT_THAT(why("", {"loss { preset: DR_GRPO }"}), HasSubstr("--set 'loss { preset: DR_GRPO }':1:24: " + preset));
  EXPECT_THAT(why("loss { kl_estimator: K9 }", {}), HasSubstr(kl));
  // Two fields of the name.
  EXPECT_THAT(why("loss { aggregation: MEAN }", {}),
              HasSubstr("; must be advantage.aggregation: REWARD_AGGREGATION_SUM_THEN_NORMALIZE, "));
  EXPECT_THAT(why("loss { aggregation: MEAN }", {}), HasSubstr("; loss.aggregation: AGGREGATION_SEQUENCE_MEAN, "));
}

TEST_F(ClientTest, AnOverrideIsOneTextWhateverItsCommas) {
  const std::string directory = FreshDirectory("override");
  WriteFile(directory + "/job.textproto", "seed: 3 num_steps: 4");
  const auto spec =
      ReadJobFile(directory + "/job.textproto",
                  {"seed: 0,num_steps: 15", "name: \"a,b\"; rollout { sampling { temperature: 1, max_tokens: 5 } },"});
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->seed(), 0u);
  EXPECT_EQ(spec->num_steps(), 15u);
  EXPECT_EQ(spec->name(), "a,b");
  EXPECT_EQ(spec->rollout().sampling().max_tokens(), 5u);
}

TEST_F(ClientTest, FileThatCannotBeReadIsNamedWithItsFieldAndTheReason) {
  const std::string directory = FreshDirectory("missing");
  const auto why = [&](const std::string& text) {
    WriteFile(directory + "/job.textproto", text);
    const absl::Status status = Submit(connection_, {directory + "/job.textproto"}, {});
    EXPECT_TRUE(absl::IsNotFound(status)) << status;
    return std::string(status.message());
  };
  const std::string absent = ": cannot read " + directory + "/absent: No such file or directory";
  EXPECT_EQ(why("data { path: \"absent\" }"), "data.path" + absent);
  EXPECT_EQ(why("evaluation { path: \"absent\" }"), "evaluation.path" + absent);
  EXPECT_EQ(why("rewards { ended_by_itself {} } rewards { python_function { path: \"absent\" function: \"f\" } }"),
            "rewards[1].python_function.path" + absent);
  EXPECT_EQ(why("adapter { start_path: \".\" }"),
            "adapter.start_path: cannot read " + directory + "/adapter_config.json: No such file or directory");
  std::filesystem::create_directory(directory + "/folder");
  EXPECT_EQ(why("data { path: \"folder\" }"), "data.path: cannot read " + directory + "/folder: Is a directory");
  if (::geteuid() == 0) return;  // may read all
  WriteFile(directory + "/closed", "");
  std::filesystem::permissions(directory + "/closed", std::filesystem::perms::none);
  EXPECT_EQ(why("data { path: \"closed\" }"), "data.path: cannot read " + directory + "/closed: Permission denied");
}

TEST_F(ClientTest, ExportWritesFilesAndRefusesNamesThatLeaveTheDirectory) {
  const std::string directory = FreshDirectory("export");
  trainer_.files = {{"adapter_config.json", "{}"}, {"adapter_model.safetensors", "bytes"}};
  ASSERT_TRUE(Export(connection_, {"addition-1", directory + "/out"}, {}).ok());
  EXPECT_EQ(ReadFile(directory + "/out/adapter_model.safetensors"), "bytes");
  EXPECT_TRUE(absl::IsAlreadyExists(Export(connection_, {"addition-1", directory + "/out"}, {})));

  // A server that would write elsewhere.
  int number = 2;
  for (const std::string& name : {std::string("../escaped"), absl::StrCat(directory, "/escaped"), std::string(".."),
                                  std::string("."), std::string("a/../../escaped"), std::string("/"), std::string("./escaped")}) {
    trainer_.files = {{name, "bytes"}};
    const absl::Status refused = Export(connection_, {"addition-1", absl::StrCat(directory, "/out", number++)}, {});
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << name << " " << refused;
  }
  trainer_.files = {{std::string(300, 'a'), "bytes"}};
  EXPECT_FALSE(Export(connection_, {"addition-1", directory + "/long"}, {}).ok());
  trainer_.files = {{std::string("a\0/../../escaped", 16), "bytes"}};
  EXPECT_FALSE(Export(connection_, {"addition-1", directory + "/nul"}, {}).ok());
  EXPECT_FALSE(std::filesystem::exists(directory + "/escaped"));
  EXPECT_FALSE(std::filesystem::exists(std::filesystem::path(directory).parent_path() / "escaped"));
}

TEST_F(ClientTest, UnreachableServerIsNamedWithItsAddress) {
  connection_.trainer_address = "127.0.0.1:1";
  const absl::Status status = ListJobs(connection_, {}, {});
  EXPECT_TRUE(absl::IsUnavailable(status));
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("trainer_server at 127.0.0.1:1 does not answer: it is not running there, or still starting"));
}

TEST_F(ClientTest, AServerOfOtherCallsIsSaidToBeNone) {
  connection_.rollout_address = connection_.trainer_address;
  const absl::Status status = ShowStatus(connection_, {}, absl::ZeroDuration());
  EXPECT_EQ(std::string(status.message()),
            absl::StrCat("rollout_server at ", connection_.rollout_address,
                         ": what answers there is none (is it the trainer_server, or another version?)"));
}

TEST_F(ClientTest, AnUploadGoesOnWhereTheConnectionBroke) {
  const std::string directory = FreshDirectory("resume");
  const std::string data = std::string(kMiB, 'a') + std::string(kMiB, 'b') + "end";
  WriteFile(directory + "/rows.jsonl", data);
  WriteFile(directory + "/job.textproto", "data { path: \"rows.jsonl\" }");
  trainer_.num_broken_uploads = 2;
  EXPECT_EQ(Submit(connection_, {directory + "/job.textproto"}, SubmitOptions()), absl::OkStatus());
  EXPECT_EQ(trainer_.offsets, (std::vector<std::uint64_t>{0, 256 * kKiB, 512 * kKiB})) << "a piece each";
  EXPECT_EQ(trainer_.contents[Sha256Hex(data)], data);

  // What another has left under this address are other bytes: sent anew.
  trainer_.contents.clear();
  trainer_.offsets.clear();
  trainer_.num_broken_uploads = 0;
  trainer_.partial = "zzz";
  EXPECT_EQ(Submit(connection_, {directory + "/job.textproto"}, SubmitOptions()), absl::OkStatus());
  EXPECT_EQ(trainer_.offsets, (std::vector<std::uint64_t>{3, 0}));
  EXPECT_EQ(trainer_.contents[Sha256Hex(data)], data);
}

// Three steps, and an evaluation before and after.
std::vector<v1::WatchResponse> SmallHistory(double reward) {
  std::vector<v1::WatchResponse> events(7);
  events[0].mutable_data()->set_rows(10);
  events[0].mutable_data()->set_trained(10);
  const auto add = [](v1::StepMetrics* step, const char* name, double value) {
    v1::NamedValue* const added = step->add_values();
    added->set_name(name);
    added->set_value(value);
  };
  events[1].mutable_evaluation()->set_reward(reward / 2);
  for (int i = 0; i < 3; ++i) {
    v1::StepMetrics* const step = events[static_cast<std::size_t>(2 + i)].mutable_step();
    step->set_step(static_cast<std::uint32_t>(i + 1));
    add(step, "reward", reward + i);
    add(step, "grad_norm", 0.5);
    add(step, "step_time", 2);
  }
  events[5].mutable_evaluation()->set_step(3);
  events[5].mutable_evaluation()->set_reward(reward * 2);
  events[6].mutable_status()->set_job("addition-1");
  events[6].mutable_status()->set_submitted_at("2026-11-30T10:00:00Z");
  return events;
}

TEST_F(ClientTest, WhatABrokenWatchHasToldIsNotToldAgain) {
  trainer_.histories["addition-1"] = SmallHistory(1);
  trainer_.histories["addition-1"].back().mutable_status()->set_state(v1::JOB_STATE_SUCCEEDED);
  trainer_.num_broken_watches = 1;
  connection_.json = true;
  ::testing::internal::CaptureStdout();
  const absl::Status watched = Watch(connection_, {"addition-1"}, "");
  const std::string said = ::testing::internal::GetCapturedStdout();
  ASSERT_TRUE(watched.ok()) << watched;
  EXPECT_EQ(trainer_.watched_from, (std::vector<std::uint32_t>{0, 4}));
  std::map<std::string, int> told;
  std::istringstream lines(said);
  for (std::string line; std::getline(lines, line);) {
    const nlohmann::json told_event = nlohmann::json::parse(line);
    for (auto field = told_event.begin(); field != told_event.end(); ++field) ++told[field.key()];
  }
  EXPECT_EQ(told["step"], 3) << said;
  EXPECT_EQ(told["evaluation"], 2) << said;
  EXPECT_EQ(told["status"], 1) << said;
}

// Read by an implementation of its own, which checks every checksum.
TEST_F(ClientTest, EventFileIsWhatTensorBoardReads) {
  EXPECT_EQ(MaskedCrc32c("123456789"), ((0xe3069283u >> 15) | (0xe3069283u << 17)) + 0xa282ead8u) << "CRC-32C's check value";
  const std::string directory = FreshDirectory("tensorboard");
  trainer_.histories["addition-1"] = SmallHistory(1);
  ASSERT_TRUE(History(connection_, {"addition-1"}, directory).ok());
  const std::string path = directory + "/addition-1/events.out.tfevents.1796032800.tandem";
  const std::string bytes = ReadFile(path);
  ASSERT_FALSE(bytes.empty());
  const auto read = [](const std::string& file) {
    std::FILE* const reader = ::popen(("python3 " TANDEM_CLIENT_TEST_DIR "/read_event_file.py '" + file + "' 2>&1").c_str(), "r");
    std::string text;
    for (int c = std::fgetc(reader); c != EOF; c = std::fgetc(reader)) text += static_cast<char>(c);
    return ::pclose(reader) == 0 ? text : "refused: " + text;
  };
  EXPECT_EQ(read(path),
            R"({"step": 0, "values": {}, "wall_time": 1796032800.0, "version": "brain.Event:2"}
{"step": 0, "values": {"evaluation/reward": 0.5, "evaluation/num_prompts": 0.0}, "wall_time": 1796032800.0}
{"step": 1, "values": {"reward": 1.0, "grad_norm": 0.5, "step_time": 2.0}, "wall_time": 1796032802.0}
{"step": 2, "values": {"reward": 2.0, "grad_norm": 0.5, "step_time": 2.0}, "wall_time": 1796032804.0}
{"step": 3, "values": {"reward": 3.0, "grad_norm": 0.5, "step_time": 2.0}, "wall_time": 1796032806.0}
{"step": 3, "values": {"evaluation/reward": 2.0, "evaluation/num_prompts": 0.0}, "wall_time": 1796032806.0}
)");
  ASSERT_TRUE(History(connection_, {"addition-1"}, directory).ok());
  EXPECT_EQ(ReadFile(path), bytes) << "written again, not appended to";
  std::string damaged = bytes;
  damaged[damaged.size() - 8] ^= 1;
  WriteFile(path, damaged);
  EXPECT_THAT(read(path), HasSubstr("refused: "));
}

TEST_F(ClientTest, HistoryIsOneFlatObjectALine) {
  trainer_.histories["addition-1"] = SmallHistory(1);
  ::testing::internal::CaptureStdout();
  ASSERT_TRUE(History(connection_, {"addition-1"}, "").ok());
  const std::string text = ::testing::internal::GetCapturedStdout();
  EXPECT_THAT(text, HasSubstr(R"({"kind":"data","step":0,"rows":10,"trained":10,"held_out":0,)"));
  EXPECT_THAT(text, HasSubstr("\n"
                              R"({"kind":"step","step":2,"reward":2.0,"grad_norm":0.5,"step_time":2.0})"
                              "\n"));
  EXPECT_THAT(text, HasSubstr(R"({"kind":"evaluation","step":3,"reward":2.0,"num_prompts":0.0})"));
}

TEST_F(ClientTest, CompareShowsSettingsThatDifferAndWhatCameOfThem) {
  trainer_.job_texts = {{"a-1", "seed: 1 num_steps: 3 rewards { name: \"r\" weight: 1 } loss { beta: 0 }"},
                        {"b-2", "seed: 1 num_steps: 3 rewards { name: \"r\" weight: 0.5 } loss { beta: 0.04 }"}};
  trainer_.histories = {{"a-1", SmallHistory(1)}, {"b-2", SmallHistory(4)}};
  ::testing::internal::CaptureStdout();
  ASSERT_TRUE(Compare(connection_, {"a-1", "b-2"}).ok());
  const std::string text = ::testing::internal::GetCapturedStdout();
  for (const char* line : {"rewards[0].weight  1    0.5", "loss.beta          0    0.04"}) EXPECT_THAT(text, HasSubstr(line));
  for (const char* name : {"seed", "num_steps", "rewards[0].name"}) EXPECT_THAT(text, Not(HasSubstr(name)));
  EXPECT_THAT(text, ::testing::ContainsRegex("held-out reward, last +2 +8"));
  EXPECT_THAT(text, ::testing::ContainsRegex("\nreward +2 +5"));
  EXPECT_TRUE(absl::IsInvalidArgument(Compare(connection_, {"a-1"})));
}

TEST_F(ClientTest, PlotDrawsWhatWasRecorded) {
  const std::string png = FreshDirectory("plot") + "/it's.png";
  trainer_.histories = {{"addition-1", SmallHistory(1)}, {"new-1", {SmallHistory(1)[0], SmallHistory(1)[6]}}};
  ASSERT_TRUE(Plot(connection_, {"addition-1"}, {png, {}}).ok());
  EXPECT_EQ(ReadFile(png).substr(0, 8), "\x89PNG\r\n\x1a\n");
  const auto history = FetchHistory(connection_, "addition-1");
  ASSERT_TRUE(history.ok());
  const auto panels = MakePanels(*history, {});
  ASSERT_TRUE(panels.ok());
  ASSERT_EQ(panels->size(), 2u) << "reward and gradient norm";
  ASSERT_EQ((*panels)[0].curves.size(), 3u);
  EXPECT_EQ((*panels)[0].curves[1].points, (std::vector<std::pair<double, double>>{{1, 1}, {2, 1.5}, {3, 2}})) << "means";
  EXPECT_EQ((*panels)[0].curves[2].points, (std::vector<std::pair<double, double>>{{0, 0.5}, {3, 2}})) << "held-out";
  const absl::Status unknown = Plot(connection_, {"addition-1"}, {png, {"kl"}});
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("recorded no 'kl'; it has: reward, grad_norm, step_time"));
  EXPECT_TRUE(absl::IsFailedPrecondition(Plot(connection_, {"new-1"}, {png, {}})));
}

// Else gnuplot writes the picture to the terminal.
TEST(PlotTest, FileThatCannotBeWrittenIsToldBeforeAnythingIsDrawn) {
  const std::string directory = FreshDirectory("no_png");
  const std::vector<Panel> panels = {{.title = "reward", .curves = {{"step", "points", {{1, 1}, {2, 3}}}}}};
  for (const auto& [png, reason] : std::map<std::string, std::string>{{directory + "/absent/x.png", "No such file or directory"},
                                                                      {directory, "Is a directory"}}) {
    ::testing::internal::CaptureStdout();
    const absl::Status status = DrawPanels(panels, png, 80);
    EXPECT_EQ(::testing::internal::GetCapturedStdout(), "");
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_EQ(std::string(status.message()), absl::StrCat("--png: cannot write ", png, ": ", reason));
  }
  const std::string path = std::getenv("PATH"), png = directory + "/x.png";
  ::setenv("PATH", directory.c_str(), 1);
  EXPECT_TRUE(absl::IsFailedPrecondition(DrawPanels(panels, png, 80)));
  EXPECT_FALSE(std::filesystem::exists(png)) << "left by a plot that was not drawn";
  WriteFile(png, "kept");
  EXPECT_TRUE(absl::IsFailedPrecondition(DrawPanels(panels, png, 80)));
  ::setenv("PATH", path.c_str(), 1);
  EXPECT_EQ(ReadFile(png), "kept");
}

// More than the pipe to it holds.
TEST(PlotTest, GnuplotThatIsNotInstalledIsNamedHoweverLongTheJobWas) {
  Curve curve{"step", "points", {}};
  for (int step = 0; step < 20000; ++step) curve.points.emplace_back(step, step);
  const std::string path = std::getenv("PATH");
  ::setenv("PATH", FreshDirectory("no_gnuplot").c_str(), 1);
  const absl::Status missing = DrawPanels({{.title = "reward", .curves = {curve}}}, "", 80);
  ::setenv("PATH", path.c_str(), 1);
  EXPECT_TRUE(absl::IsFailedPrecondition(missing)) << missing;
  EXPECT_THAT(std::string(missing.message()), HasSubstr("gnuplot is not installed"));
}

TEST_F(ClientTest, CompletionsOfOneGroupStandSideBySide) {
  for (int member = 0; member < 4; ++member) {
    v1::CompletionRecord record;
    record.set_step(7);
    record.set_group_index(2);
    record.set_member_index(static_cast<std::uint32_t>(member));
    record.set_prompt("7 + 9 = ?");
    record.set_completion(absl::StrCat("answer ", member));
    trainer_.completions.push_back(record);
  }
  v1::CompletionsRequest filters;
  filters.set_step(7);
  filters.set_group_index(2);
  filters.set_min_reward(0.5);
  ::testing::internal::CaptureStdout();
  ASSERT_TRUE(Completions(connection_, {"addition-1"}, filters).ok());
  const std::string text = ::testing::internal::GetCapturedStdout();
  EXPECT_EQ(trainer_.filters.min_reward(), 0.5);
  EXPECT_EQ(text.find("7 + 9"), text.rfind("7 + 9")) << "the prompt once";
  EXPECT_THAT(text, ::testing::ContainsRegex("answer 0 +answer 1 +answer 2"));
  trainer_.completions.clear();
  ::testing::internal::CaptureStdout();
  ASSERT_TRUE(Completions(connection_, {"addition-1"}, filters).ok());
  EXPECT_EQ(::testing::internal::GetCapturedStdout(), "no completion passes the filters\n");
}

// What a model writes may be what it was taught by whoever wrote the data: a title, a cleared screen, answers from the keyboard.
TEST_F(ClientTest, CompletionsMoveNoTerminal) {
  v1::CompletionRecord record;
  record.set_prompt("\x1b]2;owned\x07");
  record.set_completion(
      "a\n\x1b[2J\x1b[6n\rb\xc2\x9b"
      "c\x7f");
  trainer_.completions.push_back(record);
  for (const bool is_json : {false, true}) {
    connection_.json = is_json;
    for (const bool is_group : {false, true}) {
      v1::CompletionsRequest filters;
      if (is_group) filters.set_group_index(0);
      ::testing::internal::CaptureStdout();
      ASSERT_TRUE(Completions(connection_, {"addition-1"}, filters).ok());
      const std::string text = ::testing::internal::GetCapturedStdout();
      EXPECT_THAT(text, HasSubstr("owned"));
      for (const char* moving : {"\x1b", "\r", "\xc2\x9b", "\x7f", "\x07"})
        EXPECT_EQ(text.find(moving), std::string::npos) << text;
      if (!is_json) continue;
      EXPECT_EQ(nlohmann::json::parse(text)["completion"], record.completion()) << "JSON means the same";
    }
  }
}

TEST(PrintingTest, ColumnsWrapByCharactersAndKeepTheirPlaces) {
  EXPECT_EQ(FormatColumns({"äöüß12", "a\nb"}, 4, 2), "äöüß  a\n12    b");
  EXPECT_EQ(FormatColumns({"über den Fluss", "x"}, 8, 1), "über den x\nFluss");
  EXPECT_EQ(FormatColumns({"ab cdefgh"}, 4, 1), "ab\ncdef\ngh");
  EXPECT_EQ(FormatColumns({"a", "b\nc", "d\ne\x1b"}, 2, 1), "a  b  d\n   c  e ");
}

TEST(PrintingTest, DataCountsAreOneLine) {
  v1::DataCounts counts;
  counts.set_rows(100);
  counts.set_trained(80);
  counts.set_held_out(10);
  counts.set_too_long(10);
  counts.set_evaluated(10);
  EXPECT_EQ(FormatDataCounts(counts),
            "data: 100 rows: 80 trained, 10 held out, 10 left out as too long; 10 scored in evaluations");
}

TEST_F(ClientTest, StatusWaitsForDaemonsThatAreNotThere) {
  connection_.trainer_address = connection_.rollout_address = "127.0.0.1:1";
  const MonotonicTime begin = MonotonicTime::Now();
  EXPECT_TRUE(absl::IsUnavailable(ShowStatus(connection_, {}, absl::Milliseconds(500))));
  EXPECT_GE(MonotonicTime::Now() - begin, absl::Milliseconds(500));
}

TEST(ProgressTest, LineShowsStepRewardFunctionsLengthAndTimeLeft) {
  v1::StepMetrics metrics;
  metrics.set_step(4);
  metrics.set_seconds_left(65);
  for (const auto& [name, value] : std::map<std::string, double>{{"reward", 0.5},
                                                                 {"rewards/correct/mean", 0.25},
                                                                 {"completions/mean_length", 11.5},
                                                                 {"rollout_tokens_per_second", 412},
                                                                 {"step_time", 2},
                                                                 {"rollout_seconds", 0.7},
                                                                 {"reward_seconds", 0.001},
                                                                 {"forward_seconds", 0.4},
                                                                 {"backward_seconds", 0.8}}) {
    auto* entry = metrics.add_values();
    entry->set_name(name);
    entry->set_value(value);
  }
  ProgressPrinter printer;
  const std::string line = printer.StepLine(metrics, 20);
  for (const char* part : {"step  4/20", "reward  0.500", "correct 0.250", "length 11.5", "412 tok/s",
                           "  rollout 35% forward 20% backward 40%  left 1m 05s"}) {
    EXPECT_THAT(line, HasSubstr(part));
  }
}

TEST(ProgressTest, MeanCoversTheLastFiveSteps) {
  ProgressPrinter printer;
  std::string line;
  for (int step = 1; step <= 6; ++step) {
    v1::StepMetrics metrics;
    auto* reward = metrics.add_values();
    reward->set_name("reward");
    reward->set_value(step == 1 ? 100 : 1);
    line = printer.StepLine(metrics, 6);
  }
  EXPECT_THAT(line, HasSubstr("mean  1.000"));
}

TEST(PrintingTest, LedgerIsSortedAndTotalsWhatLiesInThePool) {
  v1::RolloutStatus status;
  for (const auto& [owner, bytes, in_pool] :
       {std::tuple("small", kMiB, true), std::tuple("large", 3 * kMiB, true), std::tuple("heap", 9 * kMiB, false)}) {
    auto* entry = status.add_ledger();
    entry->set_owner(owner);
    entry->set_bytes(bytes);
    entry->set_in_pool(in_pool);
  }
  const std::string table = FormatLedger(status.ledger());
  EXPECT_LT(table.find("large"), table.find("small"));
  EXPECT_THAT(table, HasSubstr("4.0 MiB"));
}

}  // namespace
}  // namespace tandem

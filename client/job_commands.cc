#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "client/commands.h"
#include "client/job_file.h"
#include "client/job_history.h"
#include "client/printing.h"
#include "client/progress.h"
#include "common/base/clock.h"
#include "common/rpc/channel.h"
#include "common/rpc/job_state.h"
#include "google/protobuf/text_format.h"

namespace tandem {
namespace {

constexpr int kMaxLiveSequences = 1 << 16;
// Of submit and plan: the trainer reads the data set in the call, all of it where rows are filtered.
constexpr absl::Duration kCheckTimeout = absl::Minutes(10);
constexpr std::uint32_t kListedJobs = 100;  // a page

absl::StatusOr<std::string> ToText(const v1::JobSpec& spec) {
  std::string text;
  if (!google::protobuf::TextFormat::PrintToString(spec, &text)) return absl::InternalError("the job cannot be printed");
  return text;
}

// What the job waits for, or why it ended.
std::string NoteOf(const v1::JobStatus& status) {
  if (!status.error().empty()) return status.error();
  return status.waiting_for().empty() ? "" : "waits for " + status.waiting_for();
}

void PrintStatus(const Connection& connection, const v1::JobStatus& status) {
  if (connection.json) return Print(ToJson(status));
  std::string line =
      absl::StrCat(status.job(), "  ", StateWord(status.state()), "  step ", status.step(), "/", status.num_steps());
  if (status.priority() != 0) absl::StrAppend(&line, "  priority ", status.priority());
  if (!status.waiting_for().empty()) absl::StrAppend(&line, "  waiting for ", status.waiting_for());
  if (!status.error().empty()) absl::StrAppend(&line, "  ", status.error());
  Print(line);
}

void PrintWarnings(const google::protobuf::RepeatedPtrField<std::string>& warnings) {
  for (const std::string& warning : warnings) Print("warning: " + warning);
}

// Follows a job until it ends, and writes TensorBoard's events under `tensorboard` where that is not empty; a daemon that
// restarts is waited for and the stream taken up where it broke.
absl::Status Follow(const Connection& connection, const std::string& job, const std::string& tensorboard) {
  constexpr absl::Duration kPatience = absl::Minutes(10);  // since the connection broke
  ProgressPrinter printer;
  std::optional<EventFileWriter> events;
  if (!tensorboard.empty()) {
    v1::GetJobRequest request;
    request.set_job(job);
    v1::JobStatus status;
    auto context = connection.Context();
    TANDEM_RETURN_IF_ERROR(
        CallStatus(connection.Trainer()->GetJob(context.get(), request, &status), "trainer_server", connection.trainer_address));
    TANDEM_ASSIGN_OR_RETURN(EventFileWriter writer, EventFileWriter::Create(tensorboard, status));
    events.emplace(std::move(writer));
  }
  std::uint32_t next_step = 0, num_steps = 0;
  std::optional<std::uint32_t> evaluated_step;  // its evaluation is told again where the stream is taken up
  MonotonicTime broken = MonotonicTime::Now();
  bool is_told = false;  // of the break
  while (true) {
    auto trainer = connection.Trainer();
    grpc::ClientContext context;
    context.set_deadline(GrpcDeadline(MonotonicTime::Now() + absl::Hours(24 * 365)));
    v1::WatchRequest request;
    request.set_job(job);
    request.set_from_step(next_step);
    auto reader = trainer->Watch(&context, request);
    v1::WatchResponse response;
    v1::JobStatus last;
    bool is_answered = false;
    while (reader->Read(&response)) {
      is_answered = true;
      if (response.has_evaluation()) {
        const std::uint32_t step = response.evaluation().step();
        if (evaluated_step.has_value() && step <= *evaluated_step) continue;
        evaluated_step = step;
      }
      if (events.has_value()) TANDEM_RETURN_IF_ERROR(events->Append(response));
      if (connection.json) Print(ToJson(response));
      if (response.has_status()) {
        const bool is_news = last.state() != response.status().state() || last.waiting_for() != response.status().waiting_for();
        last = response.status();
        num_steps = last.num_steps();
        if (!connection.json && is_news) PrintStatus(connection, last);
      } else if (response.has_step()) {
        next_step = response.step().step() + 1;
        if (!connection.json) Print(printer.StepLine(response.step(), num_steps));
      } else if (response.has_evaluation() && !connection.json) {
        Print(ProgressPrinter::EvaluationLine(response.evaluation()));
      } else if (response.has_data() && !connection.json) {
        Print(FormatDataCounts(response.data()));
      }
    }
    const absl::Status status = CallStatus(reader->Finish(), "trainer_server", connection.trainer_address);
    if (is_answered) broken = MonotonicTime::Now(), is_told = false;
    if (HasEnded(last.state())) {
      if (last.state() == v1::JOB_STATE_SUCCEEDED) return absl::OkStatus();
      return absl::AbortedError(
          absl::StrCat("job ", job, " ", StateWord(last.state()), last.error().empty() ? "" : ": ", last.error()));
    }
    // Cancelled: nothing was read for long, as when the output is held up.
    if (!status.ok() && !absl::IsUnavailable(status) && !absl::IsCancelled(status)) return status;
    if (MonotonicTime::Now() - broken > kPatience)
      return Annotate(status, absl::StrCat("no word of job ", job, " for 10 minutes"));
    if (!is_told && !status.ok())
      std::fprintf(stderr, "tandem: %s; tried again for 10 minutes\n", std::string(status.message()).c_str());
    is_told = !status.ok();
    absl::SleepFor(absl::Milliseconds(500));
  }
}

template <typename Request, typename Call>
absl::Status ChangeState(const Connection& connection, const Words& words, const std::string& command, Call call) {
  Request request;
  TANDEM_ASSIGN_OR_RETURN(*request.mutable_job(), OneWord(words, command, "JOB"));
  auto trainer = connection.Trainer();
  auto context = connection.Context();
  v1::JobStatus status;
  TANDEM_RETURN_IF_ERROR(
      CallStatus(call(trainer.get(), context.get(), request, &status), "trainer_server", connection.trainer_address));
  PrintStatus(connection, status);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> OneWord(const Words& words, const std::string& command, const std::string& what) {
  if (words.size() == 1) return words[0];
  return absl::InvalidArgumentError(absl::StrCat("usage: tandem ", command, " ", what, " (got ", words.size(), " words)"));
}

absl::Status Submit(const Connection& connection, const Words& words, const SubmitOptions& options) {
  TANDEM_ASSIGN_OR_RETURN(const std::string path, OneWord(words, "submit", "JOB_FILE"));
  TANDEM_ASSIGN_OR_RETURN(v1::JobSpec spec, ReadJobFile(path, options.overrides));
  if (!options.rewards.empty()) TANDEM_RETURN_IF_ERROR(AddPythonRewards(options.rewards, &spec));
  TANDEM_RETURN_IF_ERROR(UploadFiles(connection, &spec));
  v1::SubmitRequest request;
  TANDEM_ASSIGN_OR_RETURN(*request.mutable_job_text(), ToText(spec));
  auto trainer = connection.Trainer();
  auto context = connection.Context(kCheckTimeout);
  v1::SubmitResponse response;
  TANDEM_RETURN_IF_ERROR(
      CallStatus(trainer->Submit(context.get(), request, &response), "trainer_server", connection.trainer_address));
  if (connection.json) {
    Print(ToJson(response));
  } else {
    PrintWarnings(response.warnings());
    if (!options.watch) Print(FormatDataCounts(response.data()));
    Print("submitted " + response.job());
  }
  if (!options.watch) return absl::OkStatus();
  return Follow(connection, response.job(), options.tensorboard);
}

absl::Status Plan(const Connection& connection, const Words& words, const SubmitOptions& options, int live_sequences) {
  if (live_sequences < 0 || live_sequences > kMaxLiveSequences) {
    return absl::InvalidArgumentError(absl::StrCat("--live_sequences: ", live_sequences, "; must be 0 to ", kMaxLiveSequences));
  }
  TANDEM_ASSIGN_OR_RETURN(const std::string path, OneWord(words, "plan", "JOB_FILE"));
  TANDEM_ASSIGN_OR_RETURN(v1::JobSpec spec, ReadJobFile(path, options.overrides));
  if (!options.rewards.empty()) TANDEM_RETURN_IF_ERROR(AddPythonRewards(options.rewards, &spec));
  TANDEM_RETURN_IF_ERROR(UploadFiles(connection, &spec));
  v1::PlanRequest request;
  TANDEM_ASSIGN_OR_RETURN(*request.mutable_job_text(), ToText(spec));
  request.set_live_sequences(static_cast<std::uint32_t>(live_sequences));
  auto trainer = connection.Trainer();
  auto context = connection.Context(kCheckTimeout);
  v1::PlanResponse response;
  TANDEM_RETURN_IF_ERROR(
      CallStatus(trainer->Plan(context.get(), request, &response), "trainer_server", connection.trainer_address));
  if (connection.json) {
    Print(ToJson(response));
  } else {
    Print(response.job_text());
    Print(absl::StrCat("# ", response.trained_parameters(), " trained parameters; an epoch is ", response.steps_per_epoch(),
                       " steps"));
    Print("# " + FormatDataCounts(response.data()));
    Print(FormatMemoryPlan(response.memory()));
    PrintWarnings(response.warnings());
  }
  if (response.faults().empty()) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrJoin(response.faults(), "\n"));
}

absl::Status ListJobs(const Connection& connection, const Words&, const ListOptions& options) {
  auto trainer = connection.Trainer();
  std::vector<std::vector<std::string>> rows = {
      {"job", "state", "place", "priority", "step", "submitter", "submitted", "after", "note"}};
  v1::ListJobsRequest request;
  for (const std::string& word : options.states) {
    v1::JobState state = v1::JOB_STATE_UNSPECIFIED;
    if (!v1::JobState_Parse("JOB_STATE_" + absl::AsciiStrToUpper(word), &state) || state == v1::JOB_STATE_UNSPECIFIED) {
      return absl::InvalidArgumentError(
          absl::StrCat("--state: '", word, "'; must be queued, running, paused, succeeded, failed or cancelled"));
    }
    request.add_states(state);
  }
  std::uint32_t num_left = options.limit == 0 ? std::numeric_limits<std::uint32_t>::max() : options.limit;
  do {
    request.set_page_size(std::min(num_left, kListedJobs));
    auto context = connection.Context();
    v1::ListJobsResponse response;
    TANDEM_RETURN_IF_ERROR(
        CallStatus(trainer->ListJobs(context.get(), request, &response), "trainer_server", connection.trainer_address));
    for (const v1::JobStatus& job : response.jobs()) {
      if (connection.json) Print(ToJson(job));
      rows.push_back({job.job(), StateWord(job.state()), job.queue_position() == 0 ? "-" : absl::StrCat(job.queue_position()),
                      absl::StrCat(job.priority()), absl::StrCat(job.step(), "/", job.num_steps()),
                      job.submitter().empty() ? "-" : job.submitter(), job.submitted_at(),
                      job.after().empty() ? "-" : absl::StrJoin(job.after(), ","), NoteOf(job)});
    }
    num_left -= std::min(num_left, static_cast<std::uint32_t>(response.jobs_size()));
    request.set_page_token(response.next_page_token());
  } while (!request.page_token().empty() && num_left > 0);
  if (!connection.json) Print(FormatTable(rows));
  return absl::OkStatus();
}

absl::Status Watch(const Connection& connection, const Words& words, const std::string& tensorboard) {
  TANDEM_ASSIGN_OR_RETURN(const std::string job, OneWord(words, "watch", "JOB"));
  return Follow(connection, job, tensorboard);
}

absl::Status Cancel(const Connection& connection, const Words& words) {
  return ChangeState<v1::CancelRequest>(
      connection, words, "cancel",
      [](auto* stub, auto* context, const auto& request, auto* status) { return stub->Cancel(context, request, status); });
}
absl::Status Pause(const Connection& connection, const Words& words) {
  return ChangeState<v1::PauseRequest>(
      connection, words, "pause",
      [](auto* stub, auto* context, const auto& request, auto* status) { return stub->Pause(context, request, status); });
}
absl::Status Resume(const Connection& connection, const Words& words) {
  return ChangeState<v1::ResumeRequest>(
      connection, words, "resume",
      [](auto* stub, auto* context, const auto& request, auto* status) { return stub->Resume(context, request, status); });
}

absl::Status SetPriority(const Connection& connection, const Words& words) {
  std::int32_t priority = 0;
  if (words.size() != 2 || !absl::SimpleAtoi(words[1], &priority))
    return absl::InvalidArgumentError("usage: tandem priority JOB NUMBER, from -100 to 100; the highest goes first");
  return ChangeState<v1::SetPriorityRequest>(connection, {words[0]}, "priority",
                                             [priority](auto* stub, auto* context, auto& request, auto* status) {
                                               request.set_priority(priority);
                                               return stub->SetPriority(context, request, status);
                                             });
}

absl::Status Show(const Connection& connection, const Words& words) {
  v1::GetJobRequest request;
  TANDEM_ASSIGN_OR_RETURN(*request.mutable_job(), OneWord(words, "show", "JOB"));
  auto trainer = connection.Trainer();
  auto context = connection.Context();
  v1::JobDescription description;
  TANDEM_RETURN_IF_ERROR(
      CallStatus(trainer->Describe(context.get(), request, &description), "trainer_server", connection.trainer_address));
  if (connection.json) {
    Print(ToJson(description));
    return absl::OkStatus();
  }
  const v1::JobStatus& job = description.status();
  std::vector<std::vector<std::string>> rows = {
      {"job", job.job()},
      {"state", StateWord(job.state())},
      {"step", absl::StrCat(job.step(), "/", job.num_steps())},
      {"submitter", job.submitter().empty() ? "-" : job.submitter()},
      {"submitted", job.submitted_at()},
      {"priority", absl::StrCat(job.priority())},
      {"device time", absl::FormatDuration(absl::Seconds(std::round(job.device_seconds())))}};
  if (job.queue_position() > 0) rows.push_back({"place", absl::StrCat(job.queue_position())});
  if (!job.after().empty()) rows.push_back({"after", absl::StrJoin(job.after(), ", ")});
  if (!job.waiting_for().empty()) rows.push_back({"waits for", job.waiting_for()});
  if (!job.error().empty()) rows.push_back({"error", job.error()});
  Print(FormatTable(rows));
  Print("\n" + description.job_text());
  return absl::OkStatus();
}

absl::Status Export(const Connection& connection, const Words& words, const ExportOptions& options) {
  if (words.size() != 2) return absl::InvalidArgumentError("usage: tandem export JOB DIRECTORY [--merged] [--best]");
  const std::filesystem::path directory(words[1]);
  std::error_code error;
  if (std::filesystem::exists(directory) && !std::filesystem::is_empty(directory, error)) {
    return absl::AlreadyExistsError(absl::StrCat(words[1], " exists and is not empty"));
  }
  std::filesystem::create_directories(directory, error);
  if (error) return absl::InvalidArgumentError(absl::StrCat("cannot make ", words[1], ": ", error.message()));
  v1::ExportRequest request;
  request.set_job(words[0]);
  request.set_merged(options.merged);
  request.set_best(options.best);
  auto trainer = connection.Trainer();
  grpc::ClientContext context;
  context.set_deadline(GrpcDeadline(MonotonicTime::Now() + absl::Hours(4)));
  auto reader = trainer->Export(&context, request);
  v1::ExportResponse response;
  std::ofstream file;
  std::string open_name;
  std::uintmax_t size = 0;
  while (reader->Read(&response)) {
    if (response.file() != open_name) {
      // A bare name only: the server must not choose where on this machine it writes.
      if (response.file().empty() || response.file().front() == '.' || response.file().find('/') != std::string::npos) {
        context.TryCancel();
        reader->Finish();
        return absl::InvalidArgumentError(
            absl::StrCat("the server named a file '", response.file(), "', which is not a bare name"));
      }
      open_name = response.file();
      file.close();
      file.open(directory / open_name, std::ios::binary | std::ios::trunc);
    }
    file.write(response.piece().data(), static_cast<std::streamsize>(response.piece().size()));
    size += response.piece().size();
    if (response.is_last()) file.close();
    if (!file) {
      context.TryCancel();
      reader->Finish();
      return absl::InternalError(absl::StrCat("writing ", (directory / open_name).string(), " failed"));
    }
  }
  TANDEM_RETURN_IF_ERROR(CallStatus(reader->Finish(), "trainer_server", connection.trainer_address));
  Print(connection.json ? absl::StrCat("{\"directory\":\"", words[1], "\",\"bytes\":", size, "}")
                        : absl::StrCat("exported ", size, " bytes to ", words[1]));
  return absl::OkStatus();
}

absl::Status ShowStatus(const Connection& connection, const Words&, absl::Duration wait) {
  const MonotonicTime deadline = MonotonicTime::Now() + wait;
  v1::RolloutStatus rollout_status;
  v1::TrainerStatus trainer_status;
  absl::Status rollout_reached, trainer_reached;
  while (true) {
    auto rollout_context = connection.Context(), trainer_context = connection.Context();
    rollout_reached =
        CallStatus(connection.Rollout()->GetStatus(rollout_context.get(), v1::RolloutStatusRequest(), &rollout_status),
                   "rollout_server", connection.rollout_address);
    trainer_reached =
        CallStatus(connection.Trainer()->GetStatus(trainer_context.get(), v1::TrainerStatusRequest(), &trainer_status),
                   "trainer_server", connection.trainer_address);
    const bool is_away = absl::IsUnavailable(rollout_reached) || absl::IsUnavailable(trainer_reached);
    if (!is_away || MonotonicTime::Now() >= deadline) break;
    absl::SleepFor(absl::Milliseconds(200));
  }
  if (connection.json) {
    if (rollout_reached.ok()) Print(absl::StrCat("{\"rollout_server\":", ToJson(rollout_status), "}"));
    if (trainer_reached.ok()) Print(absl::StrCat("{\"trainer_server\":", ToJson(trainer_status), "}"));
  } else {
    if (rollout_reached.ok()) {
      Print(absl::StrCat("rollout_server  ", rollout_status.model(), " on ", rollout_status.device(), "  ",
                         rollout_status.is_paused() ? "paused" : "serving", "  running ", rollout_status.running_sequences(),
                         "  waiting ", rollout_status.waiting_sequences(), "  KV blocks ", rollout_status.kv_blocks_used(), "/",
                         rollout_status.kv_blocks_total()));
      Print(FormatLedger(rollout_status.ledger()));
    }
    if (trainer_reached.ok()) {
      Print(absl::StrCat("trainer_server  ", trainer_status.model(), " on ", trainer_status.device(), "  phase ",
                         trainer_status.phase(), "  job ",
                         trainer_status.running_job().empty() ? "-" : trainer_status.running_job(), "  queued ",
                         trainer_status.queued_jobs()));
      Print(FormatLedger(trainer_status.ledger()));
    }
  }
  return rollout_reached.ok() ? trainer_reached : rollout_reached;
}

}  // namespace tandem

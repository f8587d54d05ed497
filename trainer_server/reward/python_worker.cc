#include "trainer_server/reward/python_worker.h"

#include <algorithm>
#include <cmath>
#include <csignal>

#include "absl/time/clock.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/printable.h"
#include "common/base/units.h"
#include "trainer_server/reward/embedded_python.h"
#include "trainer_server/reward/json_schema.h"
#include "trainer_server/reward/reward_functions.h"

namespace tandem {
namespace {

constexpr std::size_t kMaxFrameBytes = 1 << 20;
constexpr std::size_t kPieceBytes = 128 << 10;  // of text: JSON may need six bytes for one
constexpr std::size_t kPieceIds = 64 << 10;
constexpr std::size_t kMaxFaultBytes = 4 << 10;
constexpr absl::Duration kFirstPause = absl::Milliseconds(50), kLongestPause = absl::Seconds(2);
constexpr char kFolder[] = "/tandem/";  // of the worker's own files, inside
constexpr char kRewardFolder[] = "/rewards/";

void AppendFrame(const nlohmann::json& message, std::string* frames) {
  const std::string text = message.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  const auto size = static_cast<std::uint32_t>(text.size());
  for (int shift = 24; shift >= 0; shift -= 8) frames->push_back(static_cast<char>((size >> shift) & 0xff));
  frames->append(text);
}

std::size_t FrameSize(std::string_view output) {
  std::size_t size = 0;
  for (std::size_t i = 0; i < 4; ++i) size = size << 8 | static_cast<unsigned char>(output[i]);
  return size;
}

// Text in pieces.
void AppendText(const std::string& text, std::string* frames) {
  std::size_t begin = 0;
  do {
    const std::size_t end = TextPieceEnd(text, begin, kPieceBytes);
    AppendFrame({{"text", text.substr(begin, end - begin)}, {"is_last", end == text.size()}}, frames);
    begin = end;
  } while (begin < text.size());
}

std::string CallFrames(const PythonCall& call, const RewardCall& around) {
  std::string frames;
  AppendFrame({{"function", call.function},
               {"is_chat", call.is_chat},
               {"num_completions", call.completions.size()},
               {"cpu_seconds", std::ceil(absl::ToDoubleSeconds(call.time_limit)) + 1},
               {"state", {{"global_step", around.step}, {"max_steps", around.num_steps}}}},
              &frames);
  const nlohmann::json row = {{"prompt", call.prompt}, {"columns", call.columns}};
  AppendText(row.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace), &frames);
  for (const RewardInput& input : call.completions) {
    const std::vector<std::uint32_t>& ids = input.token_ids;
    std::size_t begin = 0;
    do {
      const std::size_t end = std::min(ids.size(), begin + kPieceIds);
      const std::vector<std::uint32_t> piece(ids.begin() + static_cast<std::ptrdiff_t>(begin),
                                             ids.begin() + static_cast<std::ptrdiff_t>(end));
      AppendFrame({{"ids", piece}, {"is_last", end == ids.size()}}, &frames);
      begin = end;
    } while (begin < ids.size());
    AppendText(input.completion, &frames);
  }
  return frames;
}

absl::Status Lost(const std::string& text) { return absl::UnavailableError(text); }

absl::StatusOr<nlohmann::json> ParseFrame(std::string_view frame) {
  nlohmann::json message = ParseJson(frame);
  if (!message.is_object()) return Lost("its worker answered what is no JSON object");
  return message;
}

}  // namespace

absl::StatusOr<PythonAnswer> ReadAnswer(std::string_view frame, std::size_t num_completions) {
  TANDEM_ASSIGN_OR_RETURN(const nlohmann::json reply, ParseFrame(frame));
  if (reply.contains("error") && reply["error"].is_string()) {
    return absl::AbortedError(Shorten(reply["error"].get<std::string>(), kMaxFaultBytes));
  }
  const auto values = reply.find("values"), faults = reply.find("faults");
  if (values == reply.end() || !values->is_array() || values->size() != num_completions || faults == reply.end() ||
      !faults->is_object()) {
    return Lost("its worker answered what is no answer");
  }
  PythonAnswer answer;
  for (const nlohmann::json& value : *values) {
    if (!value.is_null() && !value.is_number()) return Lost("its worker answered what is no answer");
    answer.values.push_back(value.is_null() ? std::optional<double>() : value.get<double>());
    if (answer.values.back().has_value() && !std::isfinite(*answer.values.back()))
      return Lost("its worker answered what is no number");
  }
  for (std::size_t i = 0; i < num_completions; ++i) {
    const auto fault = faults->find(absl::StrCat(i));
    if (fault == faults->end() || !fault->is_string()) continue;
    answer.values[i].reset();
    answer.faults[i] = Shorten(fault->get<std::string>(), kMaxFaultBytes);
  }
  return answer;
}

class PythonWorkerPool::Worker {
 public:
  Worker(std::unique_ptr<SandboxedProcess> process, std::uint64_t memory_bytes)
      : process_(std::move(process)), memory_bytes_(memory_bytes) {}

  bool is_alive() const { return process_->is_alive(); }
  // Sends frames and returns the one that comes back, without its size. Errors: UNAVAILABLE (the worker is of no use any more),
  // CANCELLED.
  absl::StatusOr<std::string> Exchange(const std::string& frames, absl::Duration limit, const RewardCall& around) {
    std::string output;
    const auto is_whole = [](std::string_view text) {
      return text.size() >= 4 && (FrameSize(text) > kMaxFrameBytes || text.size() >= 4 + FrameSize(text));
    };
    const PumpEnd end = process_->Run({.input = frames,
                                       .is_done = is_whole,
                                       .deadline = MonotonicTime::Now() + limit,
                                       .max_output_bytes = kMaxFrameBytes + 4,
                                       .is_interrupted = around.is_interrupted},
                                      &output);
    switch (end) {
      case PumpEnd::kDone:
        break;
      case PumpEnd::kInterrupted:
        return absl::CancelledError("interrupted");
      case PumpEnd::kTimeLimit:
        return Lost(absl::StrCat("took longer than its limit of ", absl::FormatDuration(limit)));
      case PumpEnd::kMemoryLimit:
        return Lost(absl::StrCat("needed more memory than its limit of ", FormatBytes(memory_bytes_)));
      case PumpEnd::kOutputLimit:
        return Lost("wrote without end");
      case PumpEnd::kExited:
        return Lost(WhyItEnded());
    }
    if (output.size() != 4 + FrameSize(output)) return Lost("its worker answered what is no frame");
    return output.substr(4);
  }

 private:
  std::string WhyItEnded() {
    const int code = process_->ExitCode();
    std::string why = code == 128 + SIGXCPU   ? "used more processor time than its limit"
                      : code == 128 + SIGKILL ? "its worker was killed"
                      : code > 128            ? absl::StrCat("its worker was ended by signal ", code - 128)
                                              : absl::StrCat("its worker ended with code ", code);
    const std::string said = process_->error_tail();
    if (!said.empty()) absl::StrAppend(&why, ": ", said.substr(said.size() - std::min<std::size_t>(said.size(), 500)));
    return why;
  }

  const std::unique_ptr<SandboxedProcess> process_;
  const std::uint64_t memory_bytes_;
};

PythonWorkerPool::PythonWorkerPool(Options options) : options_(std::move(options)) {}
PythonWorkerPool::~PythonWorkerPool() = default;

absl::StatusOr<std::unique_ptr<PythonWorkerPool::Worker>> PythonWorkerPool::StartWorker(const RewardCall& around) const {
  TANDEM_ASSIGN_OR_RETURN(const std::shared_ptr<const Sandbox> sandbox, options_.sandbox->Get());
  SandboxCommand command{.arguments = {"-I", "-B", absl::StrCat(kFolder, "reward_worker.py")},
                         .files = {{absl::StrCat(kFolder, "reward_worker.py"), std::string(kRewardWorkerProgram)},
                                   {absl::StrCat(kFolder, "reward_function.py"), std::string(kRewardFunctionProgram)},
                                   {kRewardFolder + options_.file_name, options_.file_bytes}},
                         .input = std::nullopt};
  command.memory_bytes = options_.memory_bytes;
  TANDEM_ASSIGN_OR_RETURN(std::unique_ptr<SandboxedProcess> process, sandbox->Start(command));
  auto worker = std::make_unique<Worker>(std::move(process), options_.memory_bytes);
  std::string frames;
  AppendFrame({{"file", kRewardFolder + options_.file_name}, {"functions", functions_}}, &frames);
  const absl::StatusOr<std::string> frame = worker->Exchange(frames, kImportLimit, around);
  const absl::StatusOr<nlohmann::json> reply = frame.ok() ? ParseFrame(*frame) : frame.status();
  if (!reply.ok()) return Annotate(reply.status(), absl::StrCat("importing ", options_.file_name));
  if (reply->contains("error")) {
    const nlohmann::json& error = (*reply)["error"];
    return absl::InvalidArgumentError(error.is_string() ? Shorten(error.get<std::string>(), kMaxFaultBytes)
                                                        : "the worker answered what is no answer");
  }
  return worker;
}

// After workers that were lost, the next waits a little: a file that cannot be run must not take the node's processors.
absl::Status PythonWorkerPool::WaitForTurn(const RewardCall& around) const {
  int losses = 0;
  {
    MutexLock lock(&mutex_);
    losses = losses_in_a_row_;
  }
  if (losses < 2) return absl::OkStatus();
  const MonotonicTime end = MonotonicTime::Now() + std::min(kLongestPause, kFirstPause * (1 << std::min(losses - 2, 10)));
  while (MonotonicTime::Now() < end) {
    if (around.is_interrupted && around.is_interrupted()) return absl::CancelledError("interrupted");
    absl::SleepFor(absl::Milliseconds(10));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<PythonWorkerPool::Worker>> PythonWorkerPool::Take(const RewardCall& around) {
  {
    MutexLock lock(&mutex_);
    while (!idle_.empty()) {
      std::unique_ptr<Worker> worker = std::move(idle_.back());
      idle_.pop_back();
      if (worker->is_alive()) return worker;
    }
  }
  TANDEM_RETURN_IF_ERROR(WaitForTurn(around));
  return StartWorker(around);
}

absl::Status PythonWorkerPool::Check() {
  absl::StatusOr<std::unique_ptr<Worker>> worker = Take({});
  if (absl::IsUnavailable(worker.status())) return absl::InvalidArgumentError(worker.status().message());
  TANDEM_RETURN_IF_ERROR(worker.status());
  MutexLock lock(&mutex_);
  idle_.push_back(*std::move(worker));
  return absl::OkStatus();
}

absl::StatusOr<PythonAnswer> PythonWorkerPool::Call(const PythonCall& call, const RewardCall& around) {
  const std::string frames = CallFrames(call, around);
  absl::Status lost;
  for (int attempt = 0; attempt < call.max_attempts; ++attempt) {
    absl::StatusOr<std::unique_ptr<Worker>> worker = Take(around);
    absl::StatusOr<std::string> frame = worker.ok() ? (*worker)->Exchange(frames, call.time_limit, around) : worker.status();
    absl::StatusOr<PythonAnswer> answer = frame.ok() ? ReadAnswer(*frame, call.completions.size()) : frame.status();
    MutexLock lock(&mutex_);
    if (!absl::IsUnavailable(answer.status()) && !absl::IsResourceExhausted(answer.status())) {
      losses_in_a_row_ = 0;
      if (worker.ok() && !absl::IsCancelled(answer.status())) idle_.push_back(*std::move(worker));
      return answer;
    }
    ++losses_in_a_row_;
    lost = answer.status();
    TANDEM_LOG(kWarning, "reward", "worker lost file=", options_.file_name, " function=", call.function, " attempt=", attempt + 1,
               " of=", call.max_attempts, " because=", std::string(lost.message()));
  }
  return absl::AbortedError(
      absl::StrCat(lost.message(), call.max_attempts > 1 ? absl::StrCat(" (", call.max_attempts, " attempts)") : ""));
}

std::shared_ptr<PythonWorkerPool> PythonWorkerPools::Of(const std::string& content, PythonWorkerPool::Options options) {
  std::shared_ptr<PythonWorkerPool>& pool = pools_[{content, options.memory_bytes}];
  if (pool == nullptr) pool = std::make_shared<PythonWorkerPool>(std::move(options));
  return pool;
}

}  // namespace tandem

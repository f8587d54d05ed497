#include <algorithm>
#include <cmath>
#include <thread>

#include "absl/time/clock.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/mutex.h"
#include "common/rpc/channel.h"
#include "proto/reward.grpc.pb.h"
#include "trainer_server/reward/external_rewards.h"

namespace tandem {
namespace {

constexpr std::size_t kPieceBytes = 256 << 10;
constexpr std::uint32_t kMostAttempts = 100;
constexpr absl::Duration kFirstPause = absl::Milliseconds(100), kLongestPause = absl::Seconds(10);

// Cancels a call when the trainer stops meanwhile.
class CancelOnInterruption {
 public:
  CancelOnInterruption(grpc::ClientContext* context, const std::function<bool()>& is_interrupted) {
    if (!is_interrupted) return;
    watcher_ = std::thread([this, context, &is_interrupted] {
      MutexLock lock(&mutex_);
      while (!has_ended_) {
        if (is_interrupted()) return context->TryCancel();
        ended_.WaitFor(&mutex_, absl::Milliseconds(100));
      }
    });
  }
  ~CancelOnInterruption() {
    {
      MutexLock lock(&mutex_);
      has_ended_ = true;
      ended_.SignalAll();
    }
    if (watcher_.joinable()) watcher_.join();
  }
  CancelOnInterruption(const CancelOnInterruption&) = delete;
  CancelOnInterruption& operator=(const CancelOnInterruption&) = delete;

 private:
  Mutex mutex_;
  CondVar ended_;
  bool has_ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread watcher_;
};

bool MayPass(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) || absl::IsResourceExhausted(status) ||
         absl::IsAborted(status) || absl::IsUnknown(status) || absl::IsInternal(status);
}

class RemoteReward final : public RewardFunction {
 public:
  RemoteReward(v1::RemoteReward config, absl::Duration time_limit, FailurePolicy policy)
      : config_(std::move(config)),
        time_limit_(time_limit),
        policy_(std::move(policy)),
        stub_(v1::RewardService::NewStub(MakeChannel(config_.address()))) {}

  const std::string& name() const override { return policy_.identity().name; }
  double weight() const override { return policy_.identity().weight; }
  std::vector<std::string> required_fields() const override { return {}; }

  absl::StatusOr<RewardColumn> Score(std::span<const RewardInput> completions, const RewardCall& call) const override {
    const std::string row = completions.front().row->dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    absl::Status failure;
    for (std::uint32_t attempt = 1; attempt <= config_.max_attempts(); ++attempt) {
      absl::StatusOr<RewardColumn> rewards = ScoreOnce(row, completions, call);
      if (rewards.ok()) return CheckValues(*std::move(rewards), call);
      failure = rewards.status();
      if (!MayPass(failure)) break;
      TANDEM_LOG(kWarning, "reward", "remote call failed function=", name(), " address=", config_.address(), " attempt=", attempt,
                 " of=", config_.max_attempts(), " because=", std::string(failure.message()));
      if (attempt < config_.max_attempts()) TANDEM_RETURN_IF_ERROR(Pause(attempt, call));
    }
    const absl::Status told(absl::IsCancelled(failure) ? failure.code() : absl::StatusCode::kAborted,
                            absl::StrCat(config_.function(), " at ", config_.address(), ": ", failure.message()));
    return policy_.OnFailure(told, completions.size(), call);
  }

 private:
  absl::StatusOr<RewardColumn> ScoreOnce(const std::string& row, std::span<const RewardInput> completions,
                                         const RewardCall& call) const {
    grpc::ClientContext context;
    context.set_deadline(GrpcDeadline(MonotonicTime::Now() + time_limit_));
    const CancelOnInterruption watch(&context, call.is_interrupted);
    const auto stream = stub_->Score(&context);
    RewardColumn rewards;
    absl::Status fault;
    Send(row, completions, stream.get());
    v1::ScoreResponse response;
    while (fault.ok() && stream->Read(&response)) fault = Take(response, completions.size(), &rewards);
    if (!fault.ok()) context.TryCancel();
    const absl::Status finished = FromGrpc(stream->Finish());
    if (call.is_interrupted && call.is_interrupted()) return absl::CancelledError("interrupted");
    TANDEM_RETURN_IF_ERROR(fault);
    // CANCELLED is this side's word for an interruption, which ends the job's work without an error.
    if (absl::IsCancelled(finished)) return absl::UnavailableError(absl::StrCat("the server cancelled: ", finished.message()));
    TANDEM_RETURN_IF_ERROR(finished);
    if (rewards.size() == completions.size()) return rewards;
    return absl::InvalidArgumentError(
        absl::StrCat("answered ", rewards.size(), " scores for ", completions.size(), " completions"));
  }

  // Until the stream breaks, whose status then says why: a server may have answered all without reading all.
  void Send(const std::string& row, std::span<const RewardInput> completions,
            grpc::ClientReaderWriter<v1::ScoreRequest, v1::ScoreResponse>* stream) const {
    v1::ScoreRequest request;
    v1::ScoreHeader* header = request.mutable_header();
    header->set_function(config_.function());
    header->set_num_completions(static_cast<std::uint32_t>(completions.size()));
    std::size_t row_end = TextPieceEnd(row, 0, kPieceBytes);
    header->set_row_json(row.substr(0, row_end));
    if (!stream->Write(request)) return;
    while (row_end < row.size()) {
      const std::size_t begin = row_end;
      row_end = TextPieceEnd(row, begin, kPieceBytes);
      request.set_row_piece(row.substr(begin, row_end - begin));
      if (!stream->Write(request)) return;
    }
    for (std::size_t i = 0; i < completions.size(); ++i) {
      const std::string& text = completions[i].completion;
      std::size_t begin = 0;
      do {
        const std::size_t end = TextPieceEnd(text, begin, kPieceBytes);
        v1::CompletionPiece* piece = request.mutable_completion();
        piece->set_index(static_cast<std::uint32_t>(i));
        piece->set_text(ToValidUtf8(std::string_view(text).substr(begin, end - begin)));
        piece->set_is_last(end == text.size());
        piece->set_is_truncated(piece->is_last() && completions[i].is_truncated);
        if (!stream->Write(request)) return;
        begin = end;
      } while (begin < text.size());
    }
    stream->WritesDone();
  }

  static absl::Status Take(const v1::ScoreResponse& response, std::size_t num_completions, RewardColumn* rewards) {
    if (response.index() != rewards->size() || rewards->size() == num_completions) {
      return absl::InvalidArgumentError(absl::StrCat("answered a score of completion ", response.index(), "; completion ",
                                                     rewards->size(), " of ", num_completions, " comes next"));
    }
    if (response.result_case() == v1::ScoreResponse::RESULT_NOT_SET) {
      return absl::InvalidArgumentError(
          absl::StrCat("answered neither reward nor not_applicable for completion ", response.index()));
    }
    rewards->push_back(response.has_reward() ? std::optional<double>(response.reward()) : std::nullopt);
    return absl::OkStatus();
  }

  absl::StatusOr<RewardColumn> CheckValues(RewardColumn rewards, const RewardCall& call) const {
    for (std::size_t i = 0; i < rewards.size(); ++i) {
      if (!rewards[i].has_value() || std::isfinite(*rewards[i])) continue;
      TANDEM_RETURN_IF_ERROR(
          policy_.OnFault(i, absl::StrCat("returned ", *rewards[i], ", must be finite or not applicable"), call));
      rewards[i].reset();
    }
    return rewards;
  }

  absl::Status Pause(std::uint32_t attempt, const RewardCall& call) const {
    const MonotonicTime end = MonotonicTime::Now() + std::min(kLongestPause, kFirstPause * (1 << std::min(attempt - 1, 10u)));
    while (MonotonicTime::Now() < end) {
      if (call.is_interrupted && call.is_interrupted()) return absl::CancelledError("interrupted");
      absl::SleepFor(absl::Milliseconds(20));
    }
    return absl::OkStatus();
  }

  const v1::RemoteReward config_;
  const absl::Duration time_limit_;
  const FailurePolicy policy_;
  const std::unique_ptr<v1::RewardService::Stub> stub_;
};

}  // namespace

std::unique_ptr<RewardFunction> MakeRemoteReward(const v1::RemoteReward& config, FailurePolicy policy, RewardFaults* faults) {
  const std::size_t faults_before = faults->lines().size();
  if (config.address().find(':') == std::string::npos || config.address().size() > 512) {
    faults->Add("address", absl::StrCat("'", config.address().substr(0, 80), "', must be host:port"));
  }
  if (config.function().empty() || config.function().size() > 64) {
    faults->Add("function", absl::StrCat("'", config.function().substr(0, 80), "', must be 1 to 64 bytes"));
  }
  if (config.max_attempts() > kMostAttempts) {
    faults->Add("max_attempts", absl::StrCat(config.max_attempts(), ", must be 1 to ", kMostAttempts));
  }
  const absl::Duration time_limit = CheckTimeLimit(config.time_limit_seconds(), 3600, faults);
  if (faults->lines().size() != faults_before) return nullptr;
  return std::make_unique<RemoteReward>(config, time_limit, std::move(policy));
}

}  // namespace tandem

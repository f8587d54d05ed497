#include "rollout_server/service/rollout_service.h"

#include <algorithm>
#include <utility>

#include "common/base/clock.h"
#include "common/rpc/channel.h"
#include "rollout_server/request/batch_reader.h"

namespace tandem {
namespace {

constexpr absl::Duration kPollInterval = absl::Milliseconds(20);  // between looks at a stream that was cancelled
constexpr absl::Duration kMaxCommandWait = absl::Minutes(10);

MonotonicTime CommandDeadline(const grpc::ServerContext& context) {
  return std::min(DeadlineOf(context), MonotonicTime::Now() + kMaxCommandWait);
}

absl::Status WhyCancelled(const grpc::ServerContext& context, absl::Duration message_timeout) {
  if (DeadlineOf(context) <= MonotonicTime::Now()) return absl::DeadlineExceededError("the caller's deadline passed");
  return absl::CancelledError(
      absl::StrCat("cancelled by the caller, or no message came or went for ", absl::FormatDuration(message_timeout)));
}

}  // namespace

RolloutService::RolloutService(RolloutServiceOptions options, Engine* engine, std::shared_ptr<const PromptEncoder> encoder,
                               std::function<PoolReport()> pool_report)
    : options_(std::move(options)), engine_(engine), encoder_(std::move(encoder)), pool_report_(std::move(pool_report)) {}

grpc::Status RolloutService::Answer(const absl::Status& status) const {
  if (status.ok() || absl::IsUnavailable(status) || ContextHealth(options_.pool_device).ok()) return ToGrpc(status);
  return ToGrpc(absl::UnavailableError(absl::StrCat("the device's context is lost: ", status.message())));
}

grpc::Status RolloutService::Generate(grpc::ServerContext* context, Stream* stream) {
  struct Count {
    std::atomic<int>* num_streams;
    ~Count() { --*num_streams; }
  } count{&num_streams_};
  if (++num_streams_ > options_.max_streams) {
    return ToGrpc(absl::ResourceExhaustedError(absl::StrCat("more than ", options_.max_streams, " streams at a time")));
  }
  absl::StatusOr<BatchRequest> batch = ReadBatch(context, stream);
  if (!batch.ok()) return Answer(batch.status());
  const bool is_unit = batch->mode == v1::SCHEDULE_MODE_UNIT;
  const std::size_t tokens_per_piece = is_unit ? options_.unit_tokens_per_piece : 1;
  auto buffer = std::make_shared<StreamBuffer>(
      StreamBufferOptions{.tokens_per_piece = tokens_per_piece, .max_buffered_tokens = options_.max_buffered_tokens});
  if (absl::Status status = engine_->Submit(*std::move(batch), buffer); !status.ok()) return Answer(status);
  const absl::Status status = WriteBatch(context, stream, buffer.get());
  buffer->Cancel();
  return Answer(status);
}

absl::StatusOr<BatchRequest> RolloutService::ReadBatch(grpc::ServerContext* context, Stream* stream) {
  BatchReader reader(options_.limits, encoder_);
  v1::GenerateRequest piece;
  while (!reader.is_complete()) {
    bool is_read = false;
    {
      StreamWatch::Wait wait(&watch_, context, MonotonicTime::Now() + options_.message_timeout);
      is_read = stream->Read(&piece);
    }
    if (!is_read) {
      if (context->IsCancelled()) return WhyCancelled(*context, options_.message_timeout);
      return absl::InvalidArgumentError("the stream ended before `run`");
    }
    TANDEM_RETURN_IF_ERROR(reader.Push(piece));
  }
  return reader.Take();
}

absl::Status RolloutService::WriteBatch(grpc::ServerContext* context, Stream* stream, StreamBuffer* buffer) {
  v1::GenerateResponse message;
  absl::Status end;
  while (true) {
    if (context->IsCancelled()) return WhyCancelled(*context, options_.message_timeout);
    switch (buffer->Pop(kPollInterval, &message, &end)) {
      case StreamBuffer::Next::kTimeout:
        break;
      case StreamBuffer::Next::kEnd:
        return end;
      case StreamBuffer::Next::kMessage: {
        StreamWatch::Wait wait(&watch_, context, MonotonicTime::Now() + options_.message_timeout);
        if (!stream->Write(message)) return WhyCancelled(*context, options_.message_timeout);
        break;
      }
    }
  }
}

grpc::Status RolloutService::ActivateAdapter(grpc::ServerContext* context, const v1::ActivateAdapterRequest* request,
                                             v1::ActivateAdapterResponse* response) {
  absl::StatusOr<Adapter> adapter =
      OpenAdapter(*request, options_.config, options_.trainer_region, options_.trainer_region_begin_bytes,
                  options_.max_adapter_rank, options_.pool_device);
  if (!adapter.ok()) return Answer(adapter.status());
  const absl::Status status = engine_->Activate(*std::move(adapter), request->drain(), CommandDeadline(*context));
  if (status.ok()) response->set_weight_version(request->weight_version());
  return Answer(status);
}

grpc::Status RolloutService::RetireAdapter(grpc::ServerContext* context, const v1::RetireAdapterRequest* request,
                                           v1::RetireAdapterResponse* /*response*/) {
  if (request->job().empty()) return ToGrpc(absl::InvalidArgumentError("job: empty; the base model has no adapter"));
  return Answer(engine_->Retire(request->job(), CommandDeadline(*context)));
}

grpc::Status RolloutService::GetStatus(grpc::ServerContext* /*context*/, const v1::RolloutStatusRequest* /*request*/,
                                       v1::RolloutStatus* response) {
  const EngineStatus status = engine_->status();
  PoolReport report = pool_report_();
  response->set_model(options_.config.name);
  response->set_device(options_.device);
  response->set_is_paused(status.is_paused);
  response->set_running_sequences(status.running_sequences);
  response->set_waiting_sequences(status.waiting_sequences);
  response->set_kv_blocks_total(status.kv_blocks_total);
  response->set_kv_blocks_used(status.kv_blocks_used);
  for (v1::OwnedBytes& owned : report.ledger) *response->add_ledger() = std::move(owned);
  response->set_lease_epoch(report.lease_epoch);
  *response->mutable_memory() = options_.memory;
  response->set_kv_blocks_peak(status.kv_blocks_peak);
  return grpc::Status::OK;
}

}  // namespace tandem

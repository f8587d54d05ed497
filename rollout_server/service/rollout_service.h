// RolloutService over gRPC: parses, checks, hands to the engine, writes what comes back. Each Generate stream has its own thread,
// at most max_streams of them; none of them touches the model, and no reader, however slow, makes the engine wait. Thread-safe.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "common/model/model_config.h"
#include "common/model/prompt_encoder.h"
#include "common/rpc/stream_watch.h"
#include "proto/rollout.grpc.pb.h"
#include "rollout_server/engine/engine.h"
#include "rollout_server/request/rollout_request.h"
#include "rollout_server/service/stream_buffer.h"

namespace tandem {

struct RolloutServiceOptions {
  RequestLimits limits;
  ModelConfig config;
  std::string device;
  v1::RolloutMemory memory;                      // as GetStatus tells it
  std::span<const std::byte> trainer_region;     // adapter slots lie here
  std::uint64_t trainer_region_begin_bytes = 0;  // its offset in the pool
  int max_adapter_rank = 1024;
  Device pool_device = Device::kCpu;  // where it lies
  int max_streams = 64;
  absl::Duration message_timeout = absl::Minutes(1);  // for one message, to come or to go
  std::size_t max_buffered_tokens = 1 << 20;          // of one stream
  int unit_tokens_per_piece = 64;                     // a unit's reader wants few messages, not early ones
};

// What GetStatus reports of the pool.
struct PoolReport {
  std::vector<v1::OwnedBytes> ledger;
  std::uint64_t lease_epoch = 0;
};

class RolloutService final : public v1::RolloutService::Service {
 public:
  // `engine` outlives the service.
  RolloutService(RolloutServiceOptions options, Engine* engine, std::shared_ptr<const PromptEncoder> encoder,
                 std::function<PoolReport()> pool_report);

  grpc::Status Generate(grpc::ServerContext* context,
                        grpc::ServerReaderWriter<v1::GenerateResponse, v1::GenerateRequest>* stream) override;
  grpc::Status ActivateAdapter(grpc::ServerContext* context, const v1::ActivateAdapterRequest* request,
                               v1::ActivateAdapterResponse* response) override;
  grpc::Status RetireAdapter(grpc::ServerContext* context, const v1::RetireAdapterRequest* request,
                             v1::RetireAdapterResponse* response) override;
  grpc::Status GetStatus(grpc::ServerContext* context, const v1::RolloutStatusRequest* request,
                         v1::RolloutStatus* response) override;

 private:
  using Stream = grpc::ServerReaderWriter<v1::GenerateResponse, v1::GenerateRequest>;
  absl::StatusOr<BatchRequest> ReadBatch(grpc::ServerContext* context, Stream* stream);
  // `status` as a caller gets it: where the device's context is lost everything fails until the daemon ends, soon, so to callers
  // it is away: UNAVAILABLE.
  grpc::Status Answer(const absl::Status& status) const;
  absl::Status WriteBatch(grpc::ServerContext* context, Stream* stream, StreamBuffer* buffer);

  const RolloutServiceOptions options_;
  Engine* const engine_;
  const std::shared_ptr<const PromptEncoder> encoder_;
  const std::function<PoolReport()> pool_report_;
  std::atomic<int> num_streams_{0};
  StreamWatch watch_;
};

}  // namespace tandem

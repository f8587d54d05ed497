#include <cuda_runtime_api.h>

#include <array>
#include <utility>

#include "common/base/check.h"
#include "common/base/log.h"
#include "common/gpu/cuda_status.h"
#include "common/gpu/stream.h"
#include "common/model/stripe_writer.h"

namespace tandem::internal {
namespace {

// A buffer and the stream of its copies: fenced, the buffer may be filled again.
struct Lane {
  std::unique_ptr<HostBuffer> buffer;
  std::unique_ptr<Stream> stream;
};

class DeviceStripeWriter final : public StripeWriter {
 public:
  DeviceStripeWriter(std::span<std::byte> region, std::array<Lane, 2> lanes) : region_(region), lanes_(std::move(lanes)) {}
  ~DeviceStripeWriter() override {
    if (const absl::Status status = Finish(); !status.ok()) TANDEM_LOG(kWarning, "model", status.ToString());
  }

  absl::StatusOr<std::span<std::byte>> Begin(std::uint64_t begin_bytes, std::uint64_t size_bytes) override {
    lane_ = 1 - lane_;
    TANDEM_CHECK(size_bytes <= lanes_[lane_].buffer->bytes().size(), size_bytes, " bytes in one stripe");
    TANDEM_RETURN_IF_ERROR(lanes_[lane_].stream->Synchronize());
    place_ = region_.subspan(begin_bytes, size_bytes);
    return lanes_[lane_].buffer->bytes().first(size_bytes);
  }

  absl::Status Commit() override {
    return CudaToStatus(cudaMemcpyAsync(place_.data(), lanes_[lane_].buffer->bytes().data(), place_.size(),
                                        cudaMemcpyHostToDevice, static_cast<cudaStream_t>(lanes_[lane_].stream->handle())),
                        "copying weights to the device");
  }

  absl::Status Finish() override {
    for (const Lane& lane : lanes_) TANDEM_RETURN_IF_ERROR(lane.stream->Synchronize());
    return absl::OkStatus();
  }

 private:
  const std::span<std::byte> region_;
  const std::array<Lane, 2> lanes_;
  std::size_t lane_ = 0;
  std::span<std::byte> place_;  // of the stripe that is being filled
};

}  // namespace

absl::StatusOr<std::unique_ptr<StripeWriter>> CreateDeviceStripeWriter(std::span<std::byte> region,
                                                                       std::uint64_t max_stripe_bytes) {
  std::array<Lane, 2> lanes;
  for (Lane& lane : lanes) {
    TANDEM_ASSIGN_OR_RETURN(lane.buffer, HostBuffer::Create(Device::kCuda, max_stripe_bytes));
    TANDEM_ASSIGN_OR_RETURN(lane.stream, Stream::Create(Device::kCuda));
  }
  return std::make_unique<DeviceStripeWriter>(region, std::move(lanes));
}

}  // namespace tandem::internal

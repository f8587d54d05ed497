#include "common/model/stripe_writer.h"

namespace tandem {
namespace {

class HostStripeWriter final : public StripeWriter {
 public:
  explicit HostStripeWriter(std::span<std::byte> region) : region_(region) {}
  absl::StatusOr<std::span<std::byte>> Begin(std::uint64_t begin_bytes, std::uint64_t size_bytes) override {
    return region_.subspan(begin_bytes, size_bytes);
  }
  absl::Status Commit() override { return absl::OkStatus(); }
  absl::Status Finish() override { return absl::OkStatus(); }

 private:
  const std::span<std::byte> region_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<StripeWriter>> StripeWriter::Create(Device device, std::span<std::byte> region,
                                                                   std::uint64_t max_stripe_bytes) {
  if (device == Device::kCuda) return internal::CreateDeviceStripeWriter(region, max_stripe_bytes);
  return std::make_unique<HostStripeWriter>(region);
}

}  // namespace tandem

#include "common/gpu/device.h"

#include <cstring>
#include <vector>

#include "common/gpu/cuda_device.h"
#include "common/gpu/stream.h"

namespace tandem {
namespace {

class CpuStream final : public Stream {
 public:
  void* handle() const override { return nullptr; }
  absl::Status Synchronize() override { return absl::OkStatus(); }
};

class PageableBuffer final : public HostBuffer {
 public:
  explicit PageableBuffer(std::size_t size_bytes) : bytes_(size_bytes) {}
  std::span<std::byte> bytes() const override { return bytes_; }

 private:
  mutable std::vector<std::byte> bytes_;
};

absl::Status CopyOnHost(void* destination, const void* source, std::size_t size_bytes) {
  if (size_bytes > 0) std::memmove(destination, source, size_bytes);
  return absl::OkStatus();
}

}  // namespace

absl::Status BuiltWithoutCuda(const char* what) {
  return absl::UnimplementedError(absl::StrCat(what, ": this build has no device code (TANDEM_CUDA=OFF)"));
}

std::string DeviceName(Device device) { return device == Device::kCpu ? "cpu" : internal::CudaDeviceName(); }

absl::StatusOr<std::string> DeviceUuid(Device device) {
  if (device == Device::kCpu) return "cpu";
  return internal::CudaDeviceUuid();
}

absl::Status CopyToHost(Device device, void* host, const void* source, std::size_t size_bytes) {
  return device == Device::kCpu ? CopyOnHost(host, source, size_bytes) : internal::CudaCopy(host, source, size_bytes);
}

absl::Status CopyFromHost(Device device, void* destination, const void* host, std::size_t size_bytes) {
  return device == Device::kCpu ? CopyOnHost(destination, host, size_bytes) : internal::CudaCopy(destination, host, size_bytes);
}

absl::Status CopyOnDevice(Device device, void* destination, const void* source, std::size_t size_bytes) {
  return device == Device::kCpu ? CopyOnHost(destination, source, size_bytes)
                                : internal::CudaCopy(destination, source, size_bytes);
}

absl::Status ZeroMemory(Device device, void* destination, std::size_t size_bytes) {
  if (device == Device::kCuda) return internal::CudaZero(destination, size_bytes);
  if (size_bytes > 0) std::memset(destination, 0, size_bytes);
  return absl::OkStatus();
}

absl::StatusOr<DeviceMemoryUse> DriverMemory(Device device) {
  if (device == Device::kCpu) return absl::FailedPreconditionError("driver memory: the CPU has no driver");
  return internal::CudaDriverMemory();
}

absl::Status ContextHealth(Device device) { return device == Device::kCpu ? absl::OkStatus() : internal::CudaContextHealth(); }

absl::StatusOr<std::unique_ptr<Stream>> Stream::Create(Device device) {
  if (device == Device::kCuda) return internal::CreateCudaStream();
  return std::make_unique<CpuStream>();
}

absl::StatusOr<std::unique_ptr<HostBuffer>> HostBuffer::Create(Device device, std::size_t size_bytes) {
  if (device == Device::kCuda) return internal::CreatePinnedBuffer(size_bytes);
  return std::make_unique<PageableBuffer>(size_bytes);
}

}  // namespace tandem

#include "common/gpu/device.h"

#include <charconv>
#include <cstring>
#include <vector>

#include "absl/strings/str_split.h"
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

// One of CMake's names: "90a-real". Without -real or -virtual it is both.
bool EntryRuns(std::string_view entry, ComputeCapability capability) {
  int number = 0;
  const char* const end = entry.data() + entry.size();
  const auto [rest, error] = std::from_chars(entry.data(), end, number);
  if (error != std::errc()) return false;
  const std::string_view kind(rest, end);
  const int actual = capability.major * 10 + capability.minor;
  const bool is_for_one = !kind.empty() && kind.front() != '-';
  if (is_for_one || actual <= number) return actual == number;
  return kind != "-real" || number / 10 == capability.major;
}

}  // namespace

absl::StatusOr<ComputeCapability> DeviceCapability() { return internal::CudaCapability(); }

bool DeviceCodeRuns(std::string_view architectures, ComputeCapability capability) {
  for (const absl::string_view entry : absl::StrSplit(ToAbsl(architectures), ',')) {
    if (EntryRuns({entry.data(), entry.size()}, capability)) return true;
  }
  return false;
}

absl::Status CheckDeviceCode() {
  TANDEM_ASSIGN_OR_RETURN(const ComputeCapability capability, DeviceCapability());
  if (DeviceCodeRuns(internal::CudaArchitectures(), capability)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("the GPU ", DeviceName(Device::kCuda), " has compute capability ",
                                                    capability.major, ".", capability.minor, "; this build has code for ",
                                                    internal::CudaArchitectures(), " alone (CMAKE_CUDA_ARCHITECTURES)"));
}

std::string DescribeDevice(Device device) {
  const absl::StatusOr<ComputeCapability> capability = DeviceCapability();
  if (device == Device::kCpu || !capability.ok()) return DeviceName(device);
  return absl::StrCat(DeviceName(device), " capability=", capability->major, ".", capability->minor,
                      " code=", internal::CudaArchitectures());
}

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

absl::Status SynchronizeDevice(Device device) { return device == Device::kCpu ? absl::OkStatus() : internal::CudaSynchronize(); }

absl::StatusOr<std::unique_ptr<Stream>> Stream::Create(Device device) {
  if (device == Device::kCuda) return internal::CreateCudaStream();
  return std::make_unique<CpuStream>();
}

absl::StatusOr<std::unique_ptr<HostBuffer>> HostBuffer::Create(Device device, std::size_t size_bytes) {
  if (device == Device::kCuda) return internal::CreatePinnedBuffer(size_bytes);
  return std::make_unique<PageableBuffer>(size_bytes);
}

}  // namespace tandem

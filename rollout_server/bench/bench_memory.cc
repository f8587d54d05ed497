#include "rollout_server/bench/bench_memory.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <new>

#include "common/gpu/cuda_status.h"

namespace tandem {
namespace {
constexpr std::align_val_t kAlignment{256};
}

absl::StatusOr<std::unique_ptr<BenchMemory>> BenchMemory::Create(Device device, std::uint64_t size_bytes) {
  const std::uint64_t size = std::max<std::uint64_t>(size_bytes, 1);
  void* data = nullptr;
  if (device == Device::kCuda) {
    TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaMalloc(&data, size), "bench memory"));
  } else if (data = ::operator new(size, kAlignment, std::nothrow); data == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat("bench memory: ", size, " bytes"));
  }
  auto memory = std::unique_ptr<BenchMemory>(new BenchMemory(device, static_cast<std::byte*>(data), size_bytes));
  TANDEM_RETURN_IF_ERROR(ZeroMemory(device, data, size_bytes));
  return memory;
}

BenchMemory::~BenchMemory() {
  if (device_ == Device::kCuda) {
    cudaFree(data_);
  } else {
    ::operator delete(data_, kAlignment);
  }
}

absl::Status BenchMemory::Fill(const void* pattern, std::uint64_t pattern_bytes) const {
  std::uint64_t done = std::min(pattern_bytes, size_bytes_);
  TANDEM_RETURN_IF_ERROR(CopyFromHost(device_, data_, pattern, done));
  while (done < size_bytes_) {
    const std::uint64_t next = std::min(done, size_bytes_ - done);
    TANDEM_RETURN_IF_ERROR(CopyOnDevice(device_, data_ + done, data_, next));
    done += next;
  }
  return absl::OkStatus();
}

}  // namespace tandem

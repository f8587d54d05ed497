// The device that memory lies on and work runs on. One binary serves machines with and without a GPU: the choice is made at run
// time, once, and passed on. A process uses one GPU, the first that it sees.
//
// A `stream` is a cudaStream_t, ignored on the CPU; no header but those of device code knows CUDA's types.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/base/status.h"

namespace tandem {

enum class Device { kCpu, kCuda };

// Where no driver or no GPU is there: false; never throws. The answer does not change in a process's life.
bool HasCudaDevice();
// "cpu", or the GPU's name.
std::string DeviceName(Device device);
// "cpu", or the GPU's UUID as nvidia-smi prints it: "GPU-6f0c...". Errors: FAILED_PRECONDITION (no GPU), INTERNAL.
absl::StatusOr<std::string> DeviceUuid(Device device);
// Why device code cannot run in this build: what every launcher answers to Device::kCuda without CUDA.
absl::Status BuiltWithoutCuda(const char* what);

// Bytes between host and device memory, or within the device; each returns when the bytes have arrived, ordered after nothing but
// earlier calls of the same thread: fence the stream that wrote them first. On the CPU all memory is host memory.
absl::Status CopyToHost(Device device, void* host, const void* source, std::size_t size_bytes);
absl::Status CopyFromHost(Device device, void* destination, const void* host, std::size_t size_bytes);
absl::Status CopyOnDevice(Device device, void* destination, const void* source, std::size_t size_bytes);
absl::Status ZeroMemory(Device device, void* destination, std::size_t size_bytes);

// Returns when nothing that this process put on the device runs or will run any more: before memory that kernels use goes to
// somebody else. Errors: INTERNAL: a kernel failed; see ContextHealth.
absl::Status SynchronizeDevice(Device device);

struct DeviceMemoryUse {
  std::uint64_t total_bytes = 0;
  std::uint64_t free_bytes = 0;  // of the whole card, all processes
};
// As the driver says. Errors: FAILED_PRECONDITION on the CPU.
absl::StatusOr<DeviceMemoryUse> DriverMemory(Device device);

// OK, or the error that an earlier kernel left behind, after which the context can do nothing any more: the process has to end
// (kPoisonedContextExitCode). Does not wait.
absl::Status ContextHealth(Device device);
inline constexpr int kPoisonedContextExitCode = 4;

}  // namespace tandem

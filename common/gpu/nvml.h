// NVIDIA's management library, loaded at run time: load, power and temperature of one GPU, what the driver counts as this
// process's memory, and which driver and GPUs there are. Thread-compatible.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/base/status.h"

namespace tandem {

// nullopt: the GPU or its driver does not say.
struct GpuReading {
  std::optional<double> busy_ratio;  // share of the last sample period in which a kernel ran, 0 to 1
  std::optional<double> power_watts;
  std::optional<double> temperature_celsius;
  std::optional<double> clock_hertz;                  // of the multiprocessors
  std::optional<std::uint64_t> process_memory_bytes;  // of this process; absent in a PID namespace of its own
};

inline constexpr char kNvmlLibrary[] = "libnvidia-ml.so.1";

class Nvml {
 public:
  // `uuid` as DeviceUuid gives it. Errors: NOT_FOUND (no such library, or it does not know the GPU), INTERNAL (it has not the
  // functions, or does not start).
  static absl::StatusOr<std::unique_ptr<Nvml>> Open(const std::string& uuid, const std::string& library = kNvmlLibrary);
  virtual ~Nvml() = default;
  // Takes about a millisecond.
  virtual GpuReading Read() const = 0;
};

struct DriverGpu {
  std::string name;  // "NVIDIA H200"
  std::uint64_t total_bytes = 0;
  std::uint64_t free_bytes = 0;
};
struct DriverDescription {
  std::string version;   // "580.95.05"
  int cuda_version = 0;  // the newest that it serves; 13000 for 13.0
  std::vector<DriverGpu> gpus;
};
// All of the node, whatever CUDA_VISIBLE_DEVICES says. Makes no context on any. Errors: NOT_FOUND (no such library), INTERNAL.
absl::StatusOr<DriverDescription> DescribeDriver(const std::string& library = kNvmlLibrary);

}  // namespace tandem

// NVIDIA's management library, loaded at run time: load, power and temperature of one GPU, and what the driver counts as this
// process's memory. Thread-compatible.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

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

class Nvml {
 public:
  // `uuid` as DeviceUuid gives it. Errors: NOT_FOUND (no such library, or it does not know the GPU), INTERNAL (it has not the
  // functions, or does not start).
  static absl::StatusOr<std::unique_ptr<Nvml>> Open(const std::string& uuid, const std::string& library = "libnvidia-ml.so.1");
  virtual ~Nvml() = default;
  // Takes about a millisecond.
  virtual GpuReading Read() const = 0;
};

}  // namespace tandem

#include "common/gpu/nvml.h"

#include <dlfcn.h>
#include <unistd.h>

#include <array>
#include <limits>

namespace tandem {
namespace {

// From nvml.h, which a build without CUDA has not. Its functions are versioned: what one name takes never changes.
using NvmlDevice = void*;
constexpr int kSuccess = 0;
constexpr unsigned int kGpuTemperature = 0;  // NVML_TEMPERATURE_GPU
constexpr unsigned int kSmClock = 1;         // NVML_CLOCK_SM
struct Utilization {
  unsigned int gpu, memory;  // percent
};
struct ProcessInfo {
  unsigned int pid;
  unsigned long long used_bytes;  // all ones: not known
  unsigned int gpu_instance, compute_instance;
};
constexpr unsigned int kMaxProcesses = 256;

struct Functions {
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  const char* (*error_string)(int) = nullptr;
  int (*find)(const char* uuid, NvmlDevice*) = nullptr;
  int (*utilization)(NvmlDevice, Utilization*) = nullptr;
  int (*power)(NvmlDevice, unsigned int* milliwatts) = nullptr;
  int (*temperature)(NvmlDevice, unsigned int sensor, unsigned int* celsius) = nullptr;
  int (*clock)(NvmlDevice, unsigned int type, unsigned int* megahertz) = nullptr;
  int (*processes)(NvmlDevice, unsigned int* count, ProcessInfo*) = nullptr;
};

template <typename Function>
absl::Status FindFunction(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(::dlsym(library, name));
  return *function != nullptr ? absl::OkStatus()
                              : absl::InternalError(absl::StrCat("NVML has no ", name, ": the driver is too old"));
}

class LoadedNvml final : public Nvml {
 public:
  explicit LoadedNvml(void* library) : library_(library) {}
  ~LoadedNvml() override {
    if (is_started_) functions_.shutdown();
    ::dlclose(library_);
  }

  absl::Status Start(const std::string& uuid) {
    TANDEM_RETURN_IF_ERROR(Find("nvmlInit_v2", &functions_.init));
    TANDEM_RETURN_IF_ERROR(Find("nvmlShutdown", &functions_.shutdown));
    TANDEM_RETURN_IF_ERROR(Find("nvmlErrorString", &functions_.error_string));
    TANDEM_RETURN_IF_ERROR(Find("nvmlDeviceGetHandleByUUID", &functions_.find));
    TANDEM_RETURN_IF_ERROR(Find("nvmlDeviceGetUtilizationRates", &functions_.utilization));
    TANDEM_RETURN_IF_ERROR(Find("nvmlDeviceGetPowerUsage", &functions_.power));
    TANDEM_RETURN_IF_ERROR(Find("nvmlDeviceGetTemperature", &functions_.temperature));
    TANDEM_RETURN_IF_ERROR(Find("nvmlDeviceGetClockInfo", &functions_.clock));
    TANDEM_RETURN_IF_ERROR(Find("nvmlDeviceGetComputeRunningProcesses_v3", &functions_.processes));
    if (const int error = functions_.init(); error != kSuccess)
      return absl::InternalError(absl::StrCat("starting NVML: ", functions_.error_string(error)));
    is_started_ = true;
    if (const int error = functions_.find(uuid.c_str(), &device_); error != kSuccess)
      return absl::NotFoundError(absl::StrCat("NVML: GPU ", uuid, ": ", functions_.error_string(error)));
    return absl::OkStatus();
  }

  GpuReading Read() const override {
    GpuReading reading;
    unsigned int value = 0;
    if (Utilization use{}; functions_.utilization(device_, &use) == kSuccess) reading.busy_ratio = use.gpu / 100.0;
    if (functions_.power(device_, &value) == kSuccess) reading.power_watts = value / 1e3;
    if (functions_.temperature(device_, kGpuTemperature, &value) == kSuccess) reading.temperature_celsius = value;
    if (functions_.clock(device_, kSmClock, &value) == kSuccess) reading.clock_hertz = value * 1e6;
    std::array<ProcessInfo, kMaxProcesses> processes;
    unsigned int count = kMaxProcesses;
    if (functions_.processes(device_, &count, processes.data()) != kSuccess) return reading;
    for (unsigned int i = 0; i < count; ++i) {
      if (processes[i].pid != static_cast<unsigned int>(::getpid())) continue;
      if (processes[i].used_bytes != std::numeric_limits<unsigned long long>::max())
        reading.process_memory_bytes = processes[i].used_bytes;
    }
    return reading;
  }

 private:
  template <typename Function>
  absl::Status Find(const char* name, Function* function) {
    return FindFunction(library_, name, function);
  }

  void* const library_;
  Functions functions_;
  NvmlDevice device_ = nullptr;
  bool is_started_ = false;
};

struct MemoryInfo {
  unsigned long long total, free, used;  // bytes
};
constexpr unsigned int kTextBytes = 96;  // NVML_DEVICE_UUID_V2_BUFFER_SIZE, the longest of its texts

absl::StatusOr<DriverDescription> Describe(void* library) {
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  const char* (*error_string)(int) = nullptr;
  int (*driver_version)(char*, unsigned int) = nullptr;
  int (*cuda_version)(int*) = nullptr;
  int (*count_devices)(unsigned int*) = nullptr;
  int (*find)(unsigned int index, NvmlDevice*) = nullptr;
  int (*name_of)(NvmlDevice, char*, unsigned int) = nullptr;
  int (*memory_of)(NvmlDevice, MemoryInfo*) = nullptr;
  TANDEM_RETURN_IF_ERROR(FindFunction(library, "nvmlInit_v2", &init));
  TANDEM_RETURN_IF_ERROR(FindFunction(library, "nvmlShutdown", &shutdown));
  TANDEM_RETURN_IF_ERROR(FindFunction(library, "nvmlErrorString", &error_string));
  TANDEM_RETURN_IF_ERROR(FindFunction(library, "nvmlSystemGetDriverVersion", &driver_version));
  TANDEM_RETURN_IF_ERROR(FindFunction(library, "nvmlSystemGetCudaDriverVersion_v2", &cuda_version));
  TANDEM_RETURN_IF_ERROR(FindFunction(library, "nvmlDeviceGetCount_v2", &count_devices));
  TANDEM_RETURN_IF_ERROR(FindFunction(library, "nvmlDeviceGetHandleByIndex_v2", &find));
  TANDEM_RETURN_IF_ERROR(FindFunction(library, "nvmlDeviceGetName", &name_of));
  TANDEM_RETURN_IF_ERROR(FindFunction(library, "nvmlDeviceGetMemoryInfo", &memory_of));
  const auto check = [&](int error, const char* what) {
    return error == kSuccess ? absl::OkStatus() : absl::InternalError(absl::StrCat("NVML: ", what, ": ", error_string(error)));
  };
  TANDEM_RETURN_IF_ERROR(check(init(), "starting"));
  DriverDescription description;
  const auto ask = [&]() -> absl::Status {
    std::array<char, kTextBytes> text{};
    unsigned int count = 0;
    TANDEM_RETURN_IF_ERROR(check(driver_version(text.data(), kTextBytes), "version of the driver"));
    description.version = text.data();
    TANDEM_RETURN_IF_ERROR(check(cuda_version(&description.cuda_version), "version of CUDA"));
    TANDEM_RETURN_IF_ERROR(check(count_devices(&count), "number of GPUs"));
    for (unsigned int i = 0; i < count; ++i) {
      NvmlDevice device = nullptr;
      MemoryInfo memory{};
      TANDEM_RETURN_IF_ERROR(check(find(i, &device), "GPU"));
      TANDEM_RETURN_IF_ERROR(check(name_of(device, text.data(), kTextBytes), "name of a GPU"));
      TANDEM_RETURN_IF_ERROR(check(memory_of(device, &memory), "memory of a GPU"));
      description.gpus.push_back({text.data(), memory.total, memory.free});
    }
    return absl::OkStatus();
  };
  const absl::Status asked = ask();
  shutdown();
  TANDEM_RETURN_IF_ERROR(asked);
  return description;
}

}  // namespace

absl::StatusOr<DriverDescription> DescribeDriver(const std::string& library) {
  void* const handle = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return absl::NotFoundError(absl::StrCat("NVML: ", ::dlerror()));
  absl::StatusOr<DriverDescription> description = Describe(handle);
  ::dlclose(handle);
  return description;
}

absl::StatusOr<std::unique_ptr<Nvml>> Nvml::Open(const std::string& uuid, const std::string& library) {
  void* const handle = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return absl::NotFoundError(absl::StrCat("NVML: ", ::dlerror()));
  auto nvml = std::make_unique<LoadedNvml>(handle);
  TANDEM_RETURN_IF_ERROR(nvml->Start(uuid));
  return nvml;
}

}  // namespace tandem

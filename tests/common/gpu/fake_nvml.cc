// Stands in for NVIDIA's management library: one GPU of constant readings. TANDEM_FAKE_NVML_FAILS names a function that fails,
// TANDEM_FAKE_NVML_CUDA is the CUDA that the driver serves (12080).
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

constexpr int kSuccess = 0, kUnknownError = 999, kNotFound = 6;
int gpu = 0;

int Answer(const char* name) {
  const char* const failing = std::getenv("TANDEM_FAKE_NVML_FAILS");
  return failing != nullptr && std::string(failing) == name ? kUnknownError : kSuccess;
}

}  // namespace

extern "C" {

struct FakeUtilization {
  unsigned int gpu, memory;
};
struct FakeProcess {
  unsigned int pid;
  unsigned long long used_bytes;
  unsigned int gpu_instance, compute_instance;
};

struct FakeMemory {
  unsigned long long total, free, used;
};

int nvmlInit_v2() { return Answer("init"); }
int nvmlShutdown() { return kSuccess; }
const char* nvmlErrorString(int error) { return error == kNotFound ? "Not Found" : "Unknown Error"; }
int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  if (std::string(uuid) != "GPU-fake") return kNotFound;
  *device = &gpu;
  return kSuccess;
}
int nvmlDeviceGetUtilizationRates(void*, FakeUtilization* use) {
  *use = {73, 40};
  return Answer("utilization");
}
int nvmlDeviceGetPowerUsage(void*, unsigned int* milliwatts) {
  *milliwatts = 412500;
  return Answer("power");
}
int nvmlDeviceGetTemperature(void*, unsigned int sensor, unsigned int* celsius) {
  *celsius = sensor == 0 ? 61 : 0;
  return kSuccess;
}
int nvmlDeviceGetClockInfo(void*, unsigned int type, unsigned int* megahertz) {
  *megahertz = type == 1 ? 1980 : 0;
  return kSuccess;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned int* count, FakeProcess* processes) {
  if (*count < 2) return kUnknownError;
  *count = 2;
  processes[0] = {1, 5, 0, 0};
  processes[1] = {static_cast<unsigned int>(::getpid()), std::getenv("TANDEM_FAKE_NVML_SILENT") ? ~0ULL : 123456789, 0, 0};
  return Answer("processes");
}

int nvmlSystemGetDriverVersion(char* text, unsigned int size) {
  std::snprintf(text, size, "580.95.05");
  return Answer("driver");
}
int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  const char* const given = std::getenv("TANDEM_FAKE_NVML_CUDA");
  *version = given != nullptr ? std::atoi(given) : 13000;
  return kSuccess;
}
int nvmlDeviceGetCount_v2(unsigned int* count) {
  *count = 1;
  return kSuccess;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void** device) {
  if (index != 0) return kNotFound;
  *device = &gpu;
  return kSuccess;
}
int nvmlDeviceGetName(void*, char* text, unsigned int size) {
  std::snprintf(text, size, "NVIDIA Fake");
  return kSuccess;
}
int nvmlDeviceGetMemoryInfo(void*, FakeMemory* memory) {
  *memory = {80ULL << 30, 60ULL << 30, 20ULL << 30};
  return Answer("memory");
}

}  // extern "C"

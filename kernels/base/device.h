// The device that a launcher runs on. One binary serves machines with and without a GPU: the choice is made at run time, once,
// and passed to every launcher.
#pragma once

#include <string>

#include "common/base/status.h"

namespace tandem {

enum class Device { kCpu, kCuda };

// Where no driver or no GPU is there: false; never throws. The answer does not change in a process's life.
bool HasCudaDevice();
// "cpu", or the first GPU's name.
std::string DeviceName(Device device);
// Why device code cannot run in this build: what every launcher answers to Device::kCuda without CUDA.
absl::Status BuiltWithoutCuda(const char* kernel);

}  // namespace tandem

#include "kernels/base/device.h"

namespace tandem {

bool HasCudaDevice() { return false; }
std::string DeviceName(Device device) { return device == Device::kCpu ? "cpu" : "none"; }

}  // namespace tandem

#include "common/torch/buffer.h"

#include <c10/core/CPUAllocator.h>

#include "common/torch/device_memory.h"

namespace tandem {

TorchBytes AllocateTorchBytes(std::size_t size_bytes, Device device) {
  c10::DataPtr pointer =
      device == Device::kCpu ? c10::GetCPUAllocator()->allocate(size_bytes) : internal::AllocateDeviceMemory(size_bytes);
  TorchBytes bytes;
  bytes.data = pointer.get();
  bytes.context = pointer.move_context();
  return bytes;
}

}  // namespace tandem

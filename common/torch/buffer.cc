#include "common/torch/buffer.h"

#include <c10/core/CPUAllocator.h>

namespace tandem {

TorchBytes AllocateTorchBytes(std::size_t size_bytes) {
  c10::DataPtr pointer = c10::GetCPUAllocator()->allocate(size_bytes);
  TorchBytes bytes;
  bytes.data = pointer.get();
  bytes.context = pointer.move_context();
  return bytes;
}

}  // namespace tandem

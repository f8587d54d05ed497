#include <cuda_runtime_api.h>

#include "common/gpu/cuda_status.h"
#include "tests/common/sharing/device_touch.h"

namespace tandem::testing {
namespace {

__global__ void Touch(volatile unsigned char* address) { *address = 1; }

}  // namespace

absl::Status TouchByte(Device device, void* address) {
  if (device == Device::kCpu) {
    *static_cast<volatile unsigned char*>(address) = 1;
    return absl::OkStatus();
  }
  Touch<<<1, 1, 0, cudaStreamPerThread>>>(static_cast<volatile unsigned char*>(address));
  TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaGetLastError(), "launching a touch"));
  return CudaToStatus(cudaStreamSynchronize(cudaStreamPerThread), "touch");
}

}  // namespace tandem::testing

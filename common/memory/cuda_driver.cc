#include "common/memory/cuda_driver.h"

#include <cuda_runtime_api.h>

#include "common/gpu/cuda_status.h"
#include "common/gpu/device.h"

namespace tandem {
namespace {

constexpr unsigned int kCudaVersion = 12000;  // whose signatures of the functions are meant

template <typename Function>
absl::Status Resolve(const char* name, Function* function) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  TANDEM_RETURN_IF_ERROR(
      CudaToStatus(cudaGetDriverEntryPointByVersion(name, &address, kCudaVersion, cudaEnableDefault, &found), name));
  if (found != cudaDriverEntryPointSuccess || address == nullptr)
    return absl::InternalError(absl::StrCat("the GPU's driver has no ", name, ": it is too old"));
  *function = reinterpret_cast<Function>(address);
  return absl::OkStatus();
}

absl::StatusOr<CudaDriver> ResolveAll() {
  if (!HasCudaDevice()) return absl::FailedPreconditionError("no GPU is visible");
  CudaDriver driver;
  TANDEM_RETURN_IF_ERROR(Resolve("cuMemGetAllocationGranularity", &driver.get_granularity));
  TANDEM_RETURN_IF_ERROR(Resolve("cuMemCreate", &driver.create));
  TANDEM_RETURN_IF_ERROR(Resolve("cuMemRelease", &driver.release));
  TANDEM_RETURN_IF_ERROR(Resolve("cuMemExportToShareableHandle", &driver.export_handle));
  TANDEM_RETURN_IF_ERROR(Resolve("cuMemImportFromShareableHandle", &driver.import_handle));
  TANDEM_RETURN_IF_ERROR(Resolve("cuMemAddressReserve", &driver.reserve_addresses));
  TANDEM_RETURN_IF_ERROR(Resolve("cuMemAddressFree", &driver.free_addresses));
  TANDEM_RETURN_IF_ERROR(Resolve("cuMemMap", &driver.map));
  TANDEM_RETURN_IF_ERROR(Resolve("cuMemUnmap", &driver.unmap));
  TANDEM_RETURN_IF_ERROR(Resolve("cuMemSetAccess", &driver.set_access));
  TANDEM_RETURN_IF_ERROR(Resolve("cuDeviceGetAttribute", &driver.get_attribute));
  TANDEM_RETURN_IF_ERROR(Resolve("cuGetErrorName", &driver.get_error_name));
  return driver;
}

}  // namespace

absl::StatusOr<const CudaDriver*> CudaDriver::Get() {
  static const absl::StatusOr<CudaDriver>* const driver = new absl::StatusOr<CudaDriver>(ResolveAll());
  if (!driver->ok()) return driver->status();
  TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaSetDevice(0), "making the GPU current"));
  return &**driver;
}

absl::Status CudaDriver::ToStatus(CUresult result, const std::string& what) const {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  const char* name = nullptr;
  if (get_error_name(result, &name) != CUDA_SUCCESS || name == nullptr) name = "an unknown error";
  const std::string message = absl::StrCat(what, ": ", name);
  switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY:
      return absl::ResourceExhaustedError(message);
    case CUDA_ERROR_INVALID_VALUE:
    case CUDA_ERROR_INVALID_HANDLE:
      return absl::InvalidArgumentError(message);
    default:
      return absl::InternalError(message);
  }
}

}  // namespace tandem

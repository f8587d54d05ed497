// The driver's functions for virtual memory. They are asked of the driver at run time: nothing links libcuda, so one binary also
// starts where no driver is.
#pragma once

#include <cudaTypedefs.h>

#include "common/base/status.h"

namespace tandem {

struct CudaDriver {
  PFN_cuMemGetAllocationGranularity_v10020 get_granularity = nullptr;
  PFN_cuMemCreate_v10020 create = nullptr;
  PFN_cuMemRelease_v10020 release = nullptr;
  PFN_cuMemExportToShareableHandle_v10020 export_handle = nullptr;
  PFN_cuMemImportFromShareableHandle_v10020 import_handle = nullptr;
  PFN_cuMemAddressReserve_v10020 reserve_addresses = nullptr;
  PFN_cuMemAddressFree_v10020 free_addresses = nullptr;
  PFN_cuMemMap_v10020 map = nullptr;
  PFN_cuMemUnmap_v10020 unmap = nullptr;
  PFN_cuMemSetAccess_v10020 set_access = nullptr;
  PFN_cuDeviceGetAttribute_v2000 get_attribute = nullptr;
  PFN_cuGetErrorName_v6000 get_error_name = nullptr;

  // Resolved once. Makes device 0 current for the calling thread. Errors: FAILED_PRECONDITION (no GPU), INTERNAL naming the
  // function that the driver lacks.
  static absl::StatusOr<const CudaDriver*> Get();
  // Errors: RESOURCE_EXHAUSTED (memory, addresses), INVALID_ARGUMENT (value, handle), else INTERNAL; with `what` and the error's
  // name.
  absl::Status ToStatus(CUresult result, const std::string& what) const;
};

}  // namespace tandem

// Stands in for cuda_chunks.cc and cuda_ipc_chunks.cc where the build has no device code.
#include "common/memory/pool_chunks.h"

namespace tandem {

absl::StatusOr<std::unique_ptr<PoolMemory>> PoolMemory::CreateCuda() { return BuiltWithoutCuda("pool in device memory"); }
absl::StatusOr<std::unique_ptr<PoolMemory>> PoolMemory::CreateCudaIpc() { return BuiltWithoutCuda("pool in device memory"); }

}  // namespace tandem

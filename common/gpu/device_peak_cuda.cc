#include <cuda_runtime_api.h>

#include <algorithm>
#include <iterator>

#include "common/gpu/cuda_status.h"
#include "common/gpu/device_peak.h"

namespace tandem {
namespace {

// FLOP of one multiprocessor in one cycle: NVIDIA's data sheets by number of multiprocessors and boost clock. Compute capability
// 8.6, 8.9 and 12.0 are those of cards whose fp32 sums run at half of the rate.
struct ArchitectureRate {
  int major, minor;
  double flops_per_cycle;
};
constexpr ArchitectureRate kRates[] = {{8, 0, 2048},  {8, 6, 512},   {8, 9, 512}, {9, 0, 4096},
                                       {10, 0, 8192}, {10, 3, 8192}, {12, 0, 512}};

}  // namespace

absl::StatusOr<double> PeakFlopsPerSecond(Device device) {
  if (device == Device::kCpu) return absl::FailedPreconditionError("peak rate: the CPU's is not known");
  if (!HasCudaDevice()) return absl::FailedPreconditionError("peak rate: no GPU is visible");
  const auto attribute = [](cudaDeviceAttr name) -> absl::StatusOr<int> {
    int value = 0;
    TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaDeviceGetAttribute(&value, name, 0), "reading the GPU's attributes"));
    return value;
  };
  TANDEM_ASSIGN_OR_RETURN(const int major, attribute(cudaDevAttrComputeCapabilityMajor));
  TANDEM_ASSIGN_OR_RETURN(const int minor, attribute(cudaDevAttrComputeCapabilityMinor));
  TANDEM_ASSIGN_OR_RETURN(const int num_multiprocessors, attribute(cudaDevAttrMultiProcessorCount));
  TANDEM_ASSIGN_OR_RETURN(const int kilohertz, attribute(cudaDevAttrClockRate));
  const auto* const rate =
      std::ranges::find_if(kRates, [&](const ArchitectureRate& row) { return row.major == major && row.minor == minor; });
  if (rate == std::end(kRates))
    return absl::UnimplementedError(absl::StrCat("peak rate: compute capability ", major, ".", minor, " is not known"));
  return rate->flops_per_cycle * num_multiprocessors * kilohertz * 1e3;
}

}  // namespace tandem

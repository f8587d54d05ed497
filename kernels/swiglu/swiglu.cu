// A thread for each packet of 16 bytes of the output. Bytes moved, with e the output's bytes: forward (8 + e) num_rows width,
// backward 6 e. Bound by memory; the exponential hides behind the loads.
#include <cuda_runtime.h>

#include "common/gpu/cuda_status.h"
#include "kernels/base/device_elements.cuh"
#include "kernels/cuda_launchers.h"

namespace tandem {
namespace {

__device__ inline float Sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

template <typename T, int kCount>
__global__ void SwigluKernel(const float* __restrict__ gate_up, T* __restrict__ output, std::int64_t width,
                             unsigned blocks_per_row) {
  const RowPlace place = PlaceInRow(blocks_per_row);
  const std::int64_t i = place.packet * kCount;
  if (i >= width) return;
  const float* const gate = gate_up + place.row * 2 * width + i;
  float gates[kCount], ups[kCount];
  LoadFloats(gate, gates);
  LoadFloats(gate + width, ups);
#pragma unroll
  for (int j = 0; j < kCount; ++j) gates[j] = gates[j] * Sigmoid(gates[j]) * ups[j];
  StoreFloats(output + place.row * width + i, gates);
}

template <typename T, int kCount>
__global__ void SwigluBackwardKernel(const T* gate_up, const T* __restrict__ grad_output, T* grad_gate_up, T* __restrict__ output,
                                     std::int64_t width, unsigned blocks_per_row) {
  const RowPlace place = PlaceInRow(blocks_per_row);
  const std::int64_t i = place.packet * kCount;
  if (i >= width) return;
  const T* const gate = gate_up + place.row * 2 * width + i;
  T* const grad_gate = grad_gate_up + place.row * 2 * width + i;
  float gates[kCount], ups[kCount], grads[kCount], outputs[kCount];
  LoadFloats(gate, gates);
  LoadFloats(gate + width, ups);
  LoadFloats(grad_output + place.row * width + i, grads);
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const float g = gates[j], s = Sigmoid(g);
    outputs[j] = g * s * ups[j];
    gates[j] = grads[j] * ups[j] * s * (1.0f + g * (1.0f - s));
    ups[j] = grads[j] * g * s;
  }
  StoreFloats(grad_gate, gates);
  StoreFloats(grad_gate + width, ups);
  StoreFloats(output + place.row * width + i, outputs);
}

}  // namespace

namespace internal {

absl::Status SwigluCuda(const SwigluParams& params, void* stream) {
  const bool is_aligned =
      IsPacketAligned({params.gate_up, params.output}, {params.width * static_cast<std::int64_t>(ElementBytes(params.dtype))});
  VisitPacketType(params.dtype, is_aligned, [&]<typename T, int kCount>() {
    const RowGrid grid = RowGridFor(params.num_rows, params.width / kCount);
    SwigluKernel<T, kCount><<<grid.blocks, grid.threads, 0, static_cast<cudaStream_t>(stream)>>>(
        params.gate_up, static_cast<T*>(params.output), params.width, grid.blocks_per_row);
  });
  return CudaToStatus(cudaGetLastError(), "swiglu launch");
}

absl::Status SwigluBackwardCuda(const SwigluBackwardParams& params, void* stream) {
  const bool is_aligned = IsPacketAligned({params.gate_up, params.grad_output, params.grad_gate_up, params.output},
                                          {params.width * static_cast<std::int64_t>(ElementBytes(params.dtype))});
  VisitPacketType(params.dtype, is_aligned, [&]<typename T, int kCount>() {
    const RowGrid grid = RowGridFor(params.num_rows, params.width / kCount);
    SwigluBackwardKernel<T, kCount><<<grid.blocks, grid.threads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const T*>(params.gate_up), static_cast<const T*>(params.grad_output), static_cast<T*>(params.grad_gate_up),
        static_cast<T*>(params.output), params.width, grid.blocks_per_row);
  });
  return CudaToStatus(cudaGetLastError(), "swiglu_backward launch");
}

}  // namespace internal
}  // namespace tandem

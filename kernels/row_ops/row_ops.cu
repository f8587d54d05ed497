// Grid-stride loops of 256 threads, one element at a time; bound by memory (SumRows: one block a row of output).
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "common/base/random.h"
#include "common/gpu/cuda_status.h"
#include "kernels/base/device_elements.cuh"
#include "kernels/row_ops/row_ops.h"

namespace tandem {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMaxBlocks = 4096;

__device__ std::int64_t FirstIndex() { return static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; }
__device__ std::int64_t Stride() { return static_cast<std::int64_t>(gridDim.x) * kThreads; }

unsigned Blocks(std::int64_t count) {
  return static_cast<unsigned>(std::min<std::int64_t>((count + kThreads - 1) / kThreads, kMaxBlocks));
}

// Four elements a thread at a time where addresses allow it: `count4` of them, then the rest one by one.
__global__ void ConvertKernel(ConvertToBf16Params params, std::int64_t count4) {
  const auto* input4 = reinterpret_cast<const float4*>(params.input);
  auto* output2 = static_cast<__nv_bfloat162*>(params.output);
  for (std::int64_t i = FirstIndex(); i < count4; i += Stride()) {
    const float4 x = input4[i];
    const __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(x.x, x.y), __floats2bfloat162_rn(x.z, x.w)};
    reinterpret_cast<uint2*>(output2)[i] = *reinterpret_cast<const uint2*>(pairs);
  }
  auto* output = static_cast<__nv_bfloat16*>(params.output);
  for (std::int64_t i = 4 * count4 + FirstIndex(); i < params.count; i += Stride()) output[i] = __float2bfloat16(params.input[i]);
}

__global__ void WidenKernel(ConvertToFp32Params params, std::int64_t count4) {
  const auto* input4 = static_cast<const uint2*>(params.input);
  auto* output4 = reinterpret_cast<float4*>(params.output);
  for (std::int64_t i = FirstIndex(); i < count4; i += Stride()) {
    const uint2 x = input4[i];
    const float2 low = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&x.x));
    const float2 high = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&x.y));
    output4[i] = make_float4(low.x, low.y, high.x, high.y);
  }
  const auto* input = static_cast<const __nv_bfloat16*>(params.input);
  for (std::int64_t i = 4 * count4 + FirstIndex(); i < params.count; i += Stride()) params.output[i] = __bfloat162float(input[i]);
}

// Groups of four that both addresses allow.
std::int64_t Fours(const float* sums, const void* elements, std::int64_t count) {
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(sums) % 16 == 0 && reinterpret_cast<std::uintptr_t>(elements) % 8 == 0;
  return is_aligned ? count / 4 : 0;
}

template <typename Element>
__global__ void AddKernel(AddParams params) {
  auto* y = static_cast<Element*>(params.y);
  const auto* x = static_cast<const Element*>(params.x);
  for (std::int64_t i = FirstIndex(); i < params.count; i += Stride()) SetElement(y + i, AsFloat(y[i]) + AsFloat(x[i]));
}

template <typename Element>
__global__ void DropoutKernel(DropoutParams params, float keep) {
  auto* x = static_cast<Element*>(params.x);
  const std::int64_t first = params.first_row * params.width;
  for (std::int64_t i = FirstIndex(); i < params.num_rows * params.width; i += Stride()) {
    const bool is_kept = RandomUniform(params.seed, static_cast<std::uint64_t>(first + i)) >= params.probability;
    SetElement(x + i, is_kept ? AsFloat(x[i]) * keep : 0.f);
  }
}

template <typename Element>
__global__ void SumRowsKernel(SumRowsParams params) {
  const auto* input = static_cast<const Element*>(params.input);
  auto* output = static_cast<Element*>(params.output) + static_cast<std::int64_t>(blockIdx.x) * params.width;
  const std::int32_t begin = params.offsets[blockIdx.x], end = params.offsets[blockIdx.x + 1];
  for (std::int64_t i = threadIdx.x; i < params.width; i += kThreads) {
    float sum = 0;
    for (std::int32_t m = begin; m < end; ++m) {
      const std::int64_t row = params.members[m];
      sum += (params.factors == nullptr ? 1.f : params.factors[row]) * AsFloat(input[row * params.width + i]);
    }
    SetElement(output + i, sum);
  }
}

__device__ float WarpSum(float value) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

// A warp a (row, head).
template <typename Element>
__global__ void NormHeadsBackwardKernel(NormHeadsBackwardParams params) {
  const std::int64_t item = FirstIndex() / 32;
  if (item >= params.num_rows * params.num_heads) return;
  const std::int64_t row = item / params.num_heads, head = item % params.num_heads;
  auto* const grad = static_cast<Element*>(params.grad) + row * params.row_stride + head * params.head_dim;
  const auto* weight = static_cast<const Element*>(params.weight);
  const auto* x = static_cast<const Element*>(params.unnormed) + row * params.unnormed_stride + head * params.head_dim;
  float squares = 0, product = 0;
  for (std::int64_t i = threadIdx.x % 32; i < params.head_dim; i += 32) {
    squares += AsFloat(x[i]) * AsFloat(x[i]);
    product += AsFloat(x[i]) * AsFloat(grad[i]) * AsFloat(weight[i]);
  }
  const float width = static_cast<float>(params.head_dim);
  const float inverse = rsqrtf(WarpSum(squares) / width + params.epsilon);
  const float along = WarpSum(product) * inverse * inverse * inverse / width;
  for (std::int64_t i = threadIdx.x % 32; i < params.head_dim; i += 32) {
    SetElement(grad + i, AsFloat(grad[i]) * AsFloat(weight[i]) * inverse - AsFloat(x[i]) * along);
  }
}

absl::Status CheckDType(DType dtype, const char* what) {
  if (dtype == DType::kFp32 || dtype == DType::kBf16) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(what, ": dtype ", static_cast<int>(dtype), "; fp32 and bf16 are known"));
}

}  // namespace

absl::Status ConvertToBf16(const ConvertToBf16Params& params, void* stream) {
  if (params.count <= 0) return absl::OkStatus();
  const std::int64_t count4 = Fours(params.input, params.output, params.count);
  ConvertKernel<<<Blocks(std::max(count4, params.count - 4 * count4)), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params,
                                                                                                                         count4);
  return CudaToStatus(cudaGetLastError(), "conversion to bf16");
}

absl::Status ConvertToFp32(const ConvertToFp32Params& params, void* stream) {
  if (params.count <= 0) return absl::OkStatus();
  const std::int64_t count4 = Fours(params.output, params.input, params.count);
  WidenKernel<<<Blocks(std::max(count4, params.count - 4 * count4)), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params,
                                                                                                                       count4);
  return CudaToStatus(cudaGetLastError(), "conversion to fp32");
}

absl::Status Add(const AddParams& params, void* stream) {
  TANDEM_RETURN_IF_ERROR(CheckDType(params.dtype, "addition"));
  if (params.count <= 0) return absl::OkStatus();
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (params.dtype == DType::kBf16) {
    AddKernel<__nv_bfloat16><<<Blocks(params.count), kThreads, 0, cuda_stream>>>(params);
  } else {
    AddKernel<float><<<Blocks(params.count), kThreads, 0, cuda_stream>>>(params);
  }
  return CudaToStatus(cudaGetLastError(), "addition");
}

absl::Status Dropout(const DropoutParams& params, void* stream) {
  TANDEM_RETURN_IF_ERROR(CheckDType(params.dtype, "dropout"));
  const std::int64_t count = params.num_rows * params.width;
  if (count <= 0) return absl::OkStatus();
  const float keep = static_cast<float>(1 / (1 - params.probability));
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (params.dtype == DType::kBf16) {
    DropoutKernel<__nv_bfloat16><<<Blocks(count), kThreads, 0, cuda_stream>>>(params, keep);
  } else {
    DropoutKernel<float><<<Blocks(count), kThreads, 0, cuda_stream>>>(params, keep);
  }
  return CudaToStatus(cudaGetLastError(), "dropout");
}

absl::Status SumRows(const SumRowsParams& params, void* stream) {
  TANDEM_RETURN_IF_ERROR(CheckDType(params.dtype, "sum of rows"));
  if (params.num_rows <= 0) return absl::OkStatus();
  const unsigned grid = static_cast<unsigned>(params.num_rows);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (params.dtype == DType::kBf16) {
    SumRowsKernel<__nv_bfloat16><<<grid, kThreads, 0, cuda_stream>>>(params);
  } else {
    SumRowsKernel<float><<<grid, kThreads, 0, cuda_stream>>>(params);
  }
  return CudaToStatus(cudaGetLastError(), "sum of rows");
}

absl::Status NormHeadsBackward(const NormHeadsBackwardParams& params, void* stream) {
  TANDEM_RETURN_IF_ERROR(CheckDType(params.dtype, "norm of heads, backward"));
  const std::int64_t threads = params.num_rows * params.num_heads * 32;
  if (threads <= 0) return absl::OkStatus();
  const unsigned grid = static_cast<unsigned>((threads + kThreads - 1) / kThreads);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (params.dtype == DType::kBf16) {
    NormHeadsBackwardKernel<__nv_bfloat16><<<grid, kThreads, 0, cuda_stream>>>(params);
  } else {
    NormHeadsBackwardKernel<float><<<grid, kThreads, 0, cuda_stream>>>(params);
  }
  return CudaToStatus(cudaGetLastError(), "norm of heads, backward");
}

}  // namespace tandem

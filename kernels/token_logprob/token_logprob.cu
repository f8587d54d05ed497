// One block of 512 threads a row. A tile of u is read twice (the second time mostly from L2) and written twice: as z, and as the
// gradient for the next product. Bound by memory: about 14 bytes a logit in bf16, beside 4 width flops a logit in the products.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <limits>

#include "common/gpu/cuda_status.h"
#include "kernels/base/device_elements.cuh"
#include "kernels/token_logprob/token_logprob.h"

namespace tandem {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;

__device__ float Logit(float u, const HeadLogitTransform& transform) {
  if (transform.softcap == 0) return u * (transform.logit_scale / transform.temperature);
  return transform.softcap * tanhf(u * transform.logit_scale / transform.softcap) / transform.temperature;
}

// dz/du where the logit is z.
template <typename Real>
__device__ Real Slope(Real z, const HeadLogitTransform& transform) {
  const Real bent = transform.softcap == 0 ? Real{0} : z * transform.temperature / transform.softcap;
  return static_cast<Real>(transform.logit_scale) / transform.temperature * (1 - bent * bent);
}

// Every thread gets the result; partial results are combined in a fixed order.
__device__ float BlockMax(float value) {
  __shared__ float partial[kWarps];
  for (int offset = 16; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  __syncthreads();
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  value = partial[0];
  for (int i = 1; i < kWarps; ++i) value = fmaxf(value, partial[i]);
  return value;
}

__device__ double BlockSum(double value) {
  __shared__ double partial[kWarps];
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  __syncthreads();
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  value = partial[0];
  for (int i = 1; i < kWarps; ++i) value += partial[i];
  return value;
}

__device__ double TargetWeight(const TokenLogprobState& state) { return exp(state.target_logit - state.top); }

template <typename Gradient>
__global__ void __launch_bounds__(kThreads) TileKernel(TokenLogprobTileParams params) {
  const std::int64_t row = blockIdx.x;
  const int columns = static_cast<int>(params.num_columns), thread = static_cast<int>(threadIdx.x);
  float* z = params.products + row * params.num_columns;
  const std::int64_t target = params.targets[row] - params.first_column;

  float largest = -std::numeric_limits<float>::infinity();
  for (int i = thread; i < columns; i += kThreads) {
    const float logit = Logit(z[i], params.transform);
    z[i] = logit;
    largest = fmaxf(largest, logit);
  }
  largest = BlockMax(largest);

  TokenLogprobState state;
  if (params.first_column == 0) {
    state.top = -std::numeric_limits<double>::infinity();
  } else {
    state = params.states[row];
  }
  double keep = 1;
  if (largest > state.top) {
    keep = state.sum == 0 ? 0 : exp(state.top - largest);
    state.shifted = state.sum == 0 ? 0 : keep * (state.shifted + (state.top - largest) * state.sum);
    state.sum *= keep;
    state.top = largest;
  }
  if (target >= 0 && target < columns) state.target_logit = z[target];  // the whole block was past its writes at BlockMax

  const float top = static_cast<float>(state.top);
  Gradient* gradient = params.gradient == nullptr ? nullptr : static_cast<Gradient*>(params.gradient) + row * params.num_columns;
  float sum = 0, shifted = 0;
  __syncthreads();  // `gradient` may be `products`: the target's logit is read by all first
  for (int i = thread; i < columns; i += kThreads) {
    const float logit = z[i], distance = logit - top;
    const float weight = i == target ? 0.f : expf(distance);
    sum += weight;
    if (weight != 0) shifted += distance * weight;
    if (gradient != nullptr) SetElement(gradient + i, weight * Slope(logit, params.transform));
  }
  state.sum += BlockSum(sum);
  state.shifted += BlockSum(shifted);
  if (thread == 0) params.states[row] = state;
  if (gradient == nullptr || params.first_column == 0 || keep == 1) return;
  float* pulled = params.pulled + row * params.width;
  const float factor = static_cast<float>(keep);
  for (int i = thread; i < static_cast<int>(params.width); i += kThreads) pulled[i] *= factor;
}

template <typename Element>
__global__ void __launch_bounds__(kThreads) FinishKernel(TokenLogprobFinishParams params) {
  const std::int64_t row = blockIdx.x;
  const TokenLogprobState state = params.states[row];
  const double target_weight = TargetWeight(state), total = state.sum + target_weight;
  const double lse = state.top + log(total);
  const double logprob = target_weight >= state.sum ? -log1p(state.sum / target_weight) : state.target_logit - lse;
  if (threadIdx.x == 0) {
    const double target_shifted = target_weight == 0 ? 0 : (state.target_logit - state.top) * target_weight;
    params.logprobs[row] = logprob;
    params.lse[row] = lse;
    params.entropies[row] = log(total) - (state.shifted + target_shifted) / total;
  }
  if (params.pulled == nullptr) return;
  const float pull = static_cast<float>(-1 / total);
  const float push = static_cast<float>(-expm1(logprob) * Slope(state.target_logit, params.transform));
  const float* pulled = params.pulled + row * params.width;
  const Element* weight = static_cast<const Element*>(params.weight) + params.targets[row] * params.width;
  Element* unit = static_cast<Element*>(params.unit_gradient) + row * params.width;
  for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(params.width); i += kThreads) {
    SetElement(unit + i, pulled[i] * pull + push * AsFloat(weight[i]));
  }
}

template <typename Gradient>
__global__ void __launch_bounds__(kThreads) GradientKernel(TokenLogprobGradientParams params) {
  const std::int64_t row = blockIdx.x;
  const int columns = static_cast<int>(params.num_columns);
  const float* products = params.products + row * params.num_columns;
  Gradient* gradient = static_cast<Gradient*>(params.gradient) + row * params.num_columns;
  const std::int64_t target = params.targets[row] - params.first_column;
  const double g = params.grad_logprobs[row], e = params.grad_entropies == nullptr ? 0 : params.grad_entropies[row];
  const double entropy = params.entropies[row], logprob = params.logprobs[row];
  const float lse = static_cast<float>(params.lse[row]);
  const float g0 = static_cast<float>(-g - e * entropy), g1 = static_cast<float>(-e);
  for (int i = static_cast<int>(threadIdx.x); i < columns; i += kThreads) {
    const float logit = Logit(products[i], params.transform);
    if (i == target) {
      const double slope = Slope(static_cast<double>(logit), params.transform);
      SetElement(gradient + i, static_cast<float>((-expm1(logprob) * g - exp(logprob) * e * (logprob + entropy)) * slope));
      continue;
    }
    const float distance = logit - lse, weight = expf(distance);
    const float bracket = weight == 0 ? 0.f : weight * (g0 + g1 * distance);
    SetElement(gradient + i, bracket * Slope(logit, params.transform));
  }
}

absl::Status CheckTile(std::int64_t rows, std::int64_t columns, DType dtype, const char* what) {
  if (rows < 0 || rows > std::numeric_limits<std::int32_t>::max() || columns < 1 ||
      columns > std::numeric_limits<std::int32_t>::max() || dtype == DType::kFp8E3m4) {
    return absl::InvalidArgumentError(
        absl::StrCat("token_logprob ", what, ": tile of [", rows, ", ", columns, "], dtype ", static_cast<int>(dtype)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status TokenLogprobTile(const TokenLogprobTileParams& params, void* stream) {
  TANDEM_RETURN_IF_ERROR(CheckTile(params.num_rows, params.num_columns, params.gradient_dtype, "tile"));
  if (params.num_rows == 0) return absl::OkStatus();
  const unsigned grid = static_cast<unsigned>(params.num_rows);
  if (params.gradient_dtype == DType::kBf16) {
    TileKernel<__nv_bfloat16><<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  } else {
    TileKernel<float><<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  }
  return CudaToStatus(cudaGetLastError(), "token_logprob tile launch");
}

absl::Status TokenLogprobFinish(const TokenLogprobFinishParams& params, void* stream) {
  TANDEM_RETURN_IF_ERROR(CheckTile(params.num_rows, 1, params.dtype, "finish"));
  if (params.num_rows == 0) return absl::OkStatus();
  const unsigned grid = static_cast<unsigned>(params.num_rows);
  if (params.dtype == DType::kBf16) {
    FinishKernel<__nv_bfloat16><<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  } else {
    FinishKernel<float><<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  }
  return CudaToStatus(cudaGetLastError(), "token_logprob finish launch");
}

absl::Status TokenLogprobGradient(const TokenLogprobGradientParams& params, void* stream) {
  TANDEM_RETURN_IF_ERROR(CheckTile(params.num_rows, params.num_columns, params.gradient_dtype, "gradient"));
  if (params.num_rows == 0) return absl::OkStatus();
  const unsigned grid = static_cast<unsigned>(params.num_rows);
  if (params.gradient_dtype == DType::kBf16) {
    GradientKernel<__nv_bfloat16><<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  } else {
    GradientKernel<float><<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  }
  return CudaToStatus(cudaGetLastError(), "token_logprob gradient launch");
}

}  // namespace tandem

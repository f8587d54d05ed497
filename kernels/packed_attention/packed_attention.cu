// One warp a (row, head), four warps a block; a lane holds every 32nd feature. The forward pass walks over the row's keys with an
// online softmax, four keys at a time to hide the reductions; the backward pass walks over them again for dq, then one warp a
// (key, KV head) walks over the rows that see the key for dk and dv. Each key is read by every row that sees it, mostly from L2:
// right before fast.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <limits>

#include "common/gpu/cuda_status.h"
#include "kernels/base/device_elements.cuh"
#include "kernels/packed_attention/packed_attention.h"

namespace tandem {
namespace {

constexpr int kWarps = 4;
constexpr int kKeys = 4;  // of one round of the online softmax
constexpr int kMaxHeadDim = 256;
constexpr std::int64_t kMaxRows = std::numeric_limits<std::int32_t>::max() / 1024;

__device__ float WarpSum(float value) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

// A head's features of one row, spread over the lanes.
template <int kFeatures>
struct Lane {
  float values[kFeatures];

  __device__ void Clear() {
    for (int i = 0; i < kFeatures; ++i) values[i] = 0;
  }
  template <typename Element>
  __device__ void LoadFrom(const Element* row, int lane, int head_dim) {
#pragma unroll
    for (int i = 0; i < kFeatures; ++i) values[i] = i * 32 + lane < head_dim ? AsFloat(row[i * 32 + lane]) : 0.f;
  }
  template <typename Element>
  __device__ void StoreTo(Element* row, int lane, int head_dim, float factor) const {
#pragma unroll
    for (int i = 0; i < kFeatures; ++i) {
      if (i * 32 + lane < head_dim) SetElement(row + i * 32 + lane, values[i] * factor);
    }
  }
  __device__ void AddScaled(const Lane& other, float factor) {
#pragma unroll
    for (int i = 0; i < kFeatures; ++i) values[i] += factor * other.values[i];
  }
  // Of this lane alone; WarpSum makes it whole.
  __device__ float Dot(const Lane& other) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kFeatures; ++i) sum += values[i] * other.values[i];
    return sum;
  }
};

// Where the parts of one row lie.
template <typename Element>
struct Places {
  const Element* qkv;
  std::int64_t width;
  std::int64_t q_size, kv_size;
  int head_dim;

  __device__ explicit Places(const PackedAttentionParams& params)
      : qkv(static_cast<const Element*>(params.qkv)),
        width((params.num_heads + 2 * params.num_kv_heads) * params.head_dim),
        q_size(params.num_heads * params.head_dim),
        kv_size(params.num_kv_heads * params.head_dim),
        head_dim(static_cast<int>(params.head_dim)) {}
  __device__ const Element* query(std::int64_t row, std::int64_t head) const { return qkv + row * width + head * head_dim; }
  __device__ const Element* key(std::int64_t row, std::int64_t kv_head) const {
    return qkv + row * width + q_size + kv_head * head_dim;
  }
  __device__ const Element* value(std::int64_t row, std::int64_t kv_head) const { return key(row, kv_head) + kv_size; }
};

// The item of this warp, or -1 beyond the last. Neighbouring warps take neighbouring heads of one row.
__device__ std::int64_t Item(std::int64_t count) {
  const std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  return item < count ? item : -1;
}

template <typename Element, int kFeatures>
__global__ void __launch_bounds__(kWarps * 32) ForwardKernel(PackedAttentionParams params) {
  const std::int64_t item = Item(params.rows.num_rows * params.num_heads);
  if (item < 0) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t row = item / params.num_heads, head = item % params.num_heads;
  const std::int64_t kv_head = head / (params.num_heads / params.num_kv_heads);
  const Places<Element> places(params);
  const int head_dim = places.head_dim;
  Element* output = static_cast<Element*>(params.output) + row * places.q_size + head * head_dim;
  Lane<kFeatures> sum;
  sum.Clear();
  const std::int32_t own_begin = params.rows.own_begin[row];
  if (own_begin < 0) {
    sum.StoreTo(output, lane, head_dim, 0);
    if (lane == 0) params.lse[row * params.num_heads + head] = 0;
    return;
  }
  Lane<kFeatures> query;
  query.LoadFrom(places.query(row, head), lane, head_dim);
  const float scale = rsqrtf(static_cast<float>(head_dim));
  float top = -std::numeric_limits<float>::infinity(), weight_sum = 0;
  const std::int64_t begins[2] = {params.rows.prompt_begin[row], own_begin}, ends[2] = {params.rows.prompt_end[row], row + 1};
  for (int range = 0; range < 2; ++range) {
    for (std::int64_t first = begins[range]; first < ends[range]; first += kKeys) {
      float scores[kKeys];
      float new_top = top;
#pragma unroll
      for (int k = 0; k < kKeys; ++k) {
        Lane<kFeatures> key;
        const std::int64_t at = first + k < ends[range] ? first + k : first;
        key.LoadFrom(places.key(at, kv_head), lane, head_dim);
        scores[k] = WarpSum(query.Dot(key)) * scale;
        if (first + k >= ends[range]) scores[k] = -std::numeric_limits<float>::infinity();
        new_top = fmaxf(new_top, scores[k]);
      }
      const float keep = expf(top - new_top);
      weight_sum *= keep;
#pragma unroll
      for (int i = 0; i < kFeatures; ++i) sum.values[i] *= keep;
      top = new_top;
#pragma unroll
      for (int k = 0; k < kKeys; ++k) {
        if (first + k >= ends[range]) break;
        Lane<kFeatures> value;
        value.LoadFrom(places.value(first + k, kv_head), lane, head_dim);
        const float weight = expf(scores[k] - top);
        weight_sum += weight;
        sum.AddScaled(value, weight);
      }
    }
  }
  sum.StoreTo(output, lane, head_dim, 1 / weight_sum);
  if (lane == 0) params.lse[row * params.num_heads + head] = top + logf(weight_sum);
}

// dq and delta = sum of output x grad_output.
template <typename Element, int kFeatures>
__global__ void __launch_bounds__(kWarps * 32) GradQueryKernel(PackedAttentionBackwardParams params) {
  const PackedAttentionParams& forward = params.forward;
  const std::int64_t item = Item(forward.rows.num_rows * forward.num_heads);
  if (item < 0) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t row = item / forward.num_heads, head = item % forward.num_heads;
  const std::int64_t kv_head = head / (forward.num_heads / forward.num_kv_heads);
  const Places<Element> places(forward);
  const int head_dim = places.head_dim;
  Element* place = static_cast<Element*>(params.grad_qkv) + row * places.width + head * head_dim;
  Lane<kFeatures> grad_query;
  grad_query.Clear();
  const std::int32_t own_begin = forward.rows.own_begin[row];
  if (own_begin < 0) {
    grad_query.StoreTo(place, lane, head_dim, 0);
    return;
  }
  Lane<kFeatures> query, output, grad_output;
  query.LoadFrom(places.query(row, head), lane, head_dim);
  output.LoadFrom(static_cast<const Element*>(forward.output) + row * places.q_size + head * head_dim, lane, head_dim);
  grad_output.LoadFrom(static_cast<const Element*>(params.grad_output) + row * places.q_size + head * head_dim, lane, head_dim);
  const float delta = WarpSum(output.Dot(grad_output)), lse = forward.lse[row * forward.num_heads + head];
  if (lane == 0) params.delta[row * forward.num_heads + head] = delta;
  const float scale = rsqrtf(static_cast<float>(head_dim));
  const std::int64_t begins[2] = {forward.rows.prompt_begin[row], own_begin}, ends[2] = {forward.rows.prompt_end[row], row + 1};
  for (int range = 0; range < 2; ++range) {
#pragma unroll 4
    for (std::int64_t at = begins[range]; at < ends[range]; ++at) {
      Lane<kFeatures> key, value;
      key.LoadFrom(places.key(at, kv_head), lane, head_dim);
      value.LoadFrom(places.value(at, kv_head), lane, head_dim);
      const float weight = expf(WarpSum(query.Dot(key)) * scale - lse);
      grad_query.AddScaled(key, weight * (WarpSum(grad_output.Dot(value)) - delta));
    }
  }
  grad_query.StoreTo(place, lane, head_dim, scale);
}

// dk and dv. After GradQueryKernel, for its delta.
template <typename Element, int kFeatures>
__global__ void __launch_bounds__(kWarps * 32) GradKeyValueKernel(PackedAttentionBackwardParams params) {
  const PackedAttentionParams& forward = params.forward;
  const std::int64_t item = Item(forward.rows.num_rows * forward.num_kv_heads);
  if (item < 0) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t at = item / forward.num_kv_heads, kv_head = item % forward.num_kv_heads;
  const std::int64_t heads = forward.num_heads / forward.num_kv_heads;
  const Places<Element> places(forward);
  const int head_dim = places.head_dim;
  Element* grad_key_place = static_cast<Element*>(params.grad_qkv) + at * places.width + places.q_size + kv_head * head_dim;
  Element* grad_value_place = grad_key_place + places.kv_size;
  Lane<kFeatures> grad_key, grad_value;
  grad_key.Clear();
  grad_value.Clear();
  if (forward.rows.own_begin[at] >= 0) {
    Lane<kFeatures> key, value;
    key.LoadFrom(places.key(at, kv_head), lane, head_dim);
    value.LoadFrom(places.value(at, kv_head), lane, head_dim);
    const float scale = rsqrtf(static_cast<float>(head_dim));
    const auto add_rows = [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
#pragma unroll 4
        for (std::int64_t head = kv_head * heads; head < (kv_head + 1) * heads; ++head) {
          Lane<kFeatures> query, grad_output;
          query.LoadFrom(places.query(row, head), lane, head_dim);
          grad_output.LoadFrom(static_cast<const Element*>(params.grad_output) + row * places.q_size + head * head_dim, lane,
                               head_dim);
          const float lse = forward.lse[row * forward.num_heads + head], delta = params.delta[row * forward.num_heads + head];
          const float weight = expf(WarpSum(query.Dot(key)) * scale - lse);
          grad_value.AddScaled(grad_output, weight);
          grad_key.AddScaled(query, weight * (WarpSum(grad_output.Dot(value)) - delta));
        }
      }
    };
    add_rows(at, forward.rows.own_end[at]);
    if (const std::int32_t group = forward.rows.group[at]; group >= 0) {
      for (std::int32_t i = forward.rows.readers_begin[group]; i < forward.rows.readers_begin[group + 1]; ++i) {
        add_rows(forward.rows.readers[2 * i], forward.rows.readers[2 * i + 1]);
      }
    }
    grad_key.StoreTo(grad_key_place, lane, head_dim, scale);
  } else {
    grad_key.StoreTo(grad_key_place, lane, head_dim, 0);
  }
  grad_value.StoreTo(grad_value_place, lane, head_dim, 1);
}

absl::Status Check(const PackedAttentionParams& params) {
  if (params.head_dim < 1 || params.head_dim > kMaxHeadDim || params.num_kv_heads < 1 ||
      params.num_heads % params.num_kv_heads != 0 || params.dtype == DType::kFp8E3m4 || params.rows.num_rows < 0 ||
      params.rows.num_rows > kMaxRows) {
    return absl::InvalidArgumentError(absl::StrCat("packed attention: ", params.rows.num_rows, " rows (at most ", kMaxRows, "), ",
                                                   params.num_heads, " heads over ", params.num_kv_heads, " KV heads of ",
                                                   params.head_dim, " (1 to ", kMaxHeadDim, "), dtype ",
                                                   static_cast<int>(params.dtype)));
  }
  return absl::OkStatus();
}

unsigned Blocks(std::int64_t items) { return static_cast<unsigned>((items + kWarps - 1) / kWarps); }

// Calls `launch` with the number type and features a lane of `params`.
template <typename Launch>
void Dispatch(const PackedAttentionParams& params, const Launch& launch) {
  const auto by_type = [&]<int kFeatures>() {
    if (params.dtype == DType::kBf16) {
      launch.template operator()<__nv_bfloat16, kFeatures>();
    } else {
      launch.template operator()<float, kFeatures>();
    }
  };
  if (params.head_dim <= 32) {
    by_type.template operator()<1>();
  } else if (params.head_dim <= 64) {
    by_type.template operator()<2>();
  } else if (params.head_dim <= 128) {
    by_type.template operator()<4>();
  } else {
    by_type.template operator()<8>();
  }
}

}  // namespace

absl::Status PackedAttentionForward(const PackedAttentionParams& params, void* stream) {
  TANDEM_RETURN_IF_ERROR(Check(params));
  if (params.rows.num_rows == 0) return absl::OkStatus();
  const unsigned blocks = Blocks(params.rows.num_rows * params.num_heads);
  Dispatch(params, [&]<typename Element, int kFeatures>() {
    ForwardKernel<Element, kFeatures><<<blocks, kWarps * 32, 0, static_cast<cudaStream_t>(stream)>>>(params);
  });
  return CudaToStatus(cudaGetLastError(), "packed attention launch");
}

absl::Status PackedAttentionBackward(const PackedAttentionBackwardParams& params, void* stream) {
  const PackedAttentionParams& forward = params.forward;
  TANDEM_RETURN_IF_ERROR(Check(forward));
  if (forward.rows.num_rows == 0) return absl::OkStatus();
  Dispatch(forward, [&]<typename Element, int kFeatures>() {
    GradQueryKernel<Element, kFeatures>
        <<<Blocks(forward.rows.num_rows * forward.num_heads), kWarps * 32, 0, static_cast<cudaStream_t>(stream)>>>(params);
    GradKeyValueKernel<Element, kFeatures>
        <<<Blocks(forward.rows.num_rows * forward.num_kv_heads), kWarps * 32, 0, static_cast<cudaStream_t>(stream)>>>(params);
  });
  return CudaToStatus(cudaGetLastError(), "packed attention backward launch");
}

}  // namespace tandem

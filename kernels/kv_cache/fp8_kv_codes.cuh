// Numbers into E4M3 and back, as the host's RoundToFp8Kv and FloatToFp8E4m3 do it.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

namespace tandem {

__device__ inline std::uint8_t ToFp8KvCode(float value, float scale) {
  return __nv_cvt_float_to_fp8(__fdiv_rn(value, scale), __NV_SATFINITE, __NV_E4M3);
}

__device__ inline float RoundedToFp8Kv(float value, float scale) {
  if (!isfinite(value)) return value;
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(ToFp8KvCode(value, scale), __NV_E4M3))) * scale;
}

}  // namespace tandem

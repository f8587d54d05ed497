// Row kernels of the linear log-prob head on the device: what stands between the two matrix products of one tile of (rows x
// vocabulary columns). Formulas, and the CPU path that the tests compare with: trainer_server/policy/linear_logprob.h. The target
// column stays out of all sums and comes in once at the end, in the form 1 - p = -expm1(logp).
//
// u = h . w_j; z = softcap tanh(logit_scale u / softcap) / temperature (no softcap: logit_scale u / temperature). Device only;
// all pointers are device memory. `stream` is a cudaStream_t. Errors: INVALID_ARGUMENT (shape), UNIMPLEMENTED (no device code in
// this build), INTERNAL (launch).
#pragma once

#include <cstdint>

#include "common/gpu/device.h"
#include "common/gpu/dtype.h"

namespace tandem {

struct HeadLogitTransform {
  float temperature = 1;
  float logit_scale = 1;
  float softcap = 0;  // 0: none
};

// What one row has seen of the vocabulary. sum and shifted: e^{z - top} and (z - top) e^{z - top} over all columns but the
// target.
struct TokenLogprobState {
  double top = 0;
  double sum = 0;
  double shifted = 0;
  double target_logit = 0;
};

// Takes one tile of u into the states. With `gradient`, e^{z - top} dz/du goes there (0 in the target's column), and rows of
// `pulled` shrink as `top` rises, so that pulled += gradient W_tile may follow.
struct TokenLogprobTileParams {
  float* products = nullptr;  // [num_rows, num_columns] u; left as z
  std::int64_t num_rows = 0;
  std::int64_t num_columns = 0;
  std::int64_t first_column = 0;          // of the tile in the vocabulary; at 0 the states begin
  const std::int32_t* targets = nullptr;  // [num_rows], in the vocabulary
  TokenLogprobState* states = nullptr;    // [num_rows]
  HeadLogitTransform transform;
  DType gradient_dtype = DType::kFp32;  // or bf16
  void* gradient = nullptr;             // [num_rows, num_columns] or null; fp32: may be `products`
  float* pulled = nullptr;              // [num_rows, width]; read and written from the second tile on; required with `gradient`
  std::int64_t width = 0;
};
absl::Status TokenLogprobTile(const TokenLogprobTileParams& params, void* stream);

// After the last tile: log-prob, log-sum-exp and entropy in nats; with `unit_gradient`, d logp / dh of each row.
struct TokenLogprobFinishParams {
  std::int64_t num_rows = 0;
  const std::int32_t* targets = nullptr;
  const TokenLogprobState* states = nullptr;
  HeadLogitTransform transform;
  double* logprobs = nullptr;  // [num_rows]
  double* lse = nullptr;
  double* entropies = nullptr;
  DType dtype = DType::kFp32;     // of weight and unit gradient: fp32, bf16
  const float* pulled = nullptr;  // [num_rows, width]; null: no gradient is wanted
  const void* weight = nullptr;   // [vocab_size, width]
  void* unit_gradient = nullptr;  // [num_rows, width]
  std::int64_t width = 0;
};
absl::Status TokenLogprobFinish(const TokenLogprobFinishParams& params, void* stream);

// The second pass, for an entropy bonus: dL/du_j = [-g p_j - e p_j (z_j - lse + H)] dz_j/du_j, and g more in the target's column.
struct TokenLogprobGradientParams {
  float* products = nullptr;  // [num_rows, num_columns] u; left undefined
  std::int64_t num_rows = 0;
  std::int64_t num_columns = 0;
  std::int64_t first_column = 0;
  const std::int32_t* targets = nullptr;
  HeadLogitTransform transform;
  const double* logprobs = nullptr;  // [num_rows], as TokenLogprobFinish gave them
  const double* lse = nullptr;
  const double* entropies = nullptr;
  const double* grad_logprobs = nullptr;   // [num_rows]: g
  const double* grad_entropies = nullptr;  // [num_rows]: e; null: zero
  DType gradient_dtype = DType::kFp32;
  void* gradient = nullptr;  // [num_rows, num_columns]; fp32: may be `products`
};
absl::Status TokenLogprobGradient(const TokenLogprobGradientParams& params, void* stream);

}  // namespace tandem

// The loops between the GEMMs of a transformer on the CPU: norm, rotary embedding, SwiGLU, attention tiles, softmax of head
// tiles. Written once with vector types, compiled for three instruction sets, chosen at run time. Both daemons run these same
// loops, so that their log-probs agree. Each function is serial over the rows given; callers split rows among threads. Pure;
// thread-safe.
//
// T is float, or double for tests against finite differences. Sums run in a fixed order: the same input gives the same bits on
// the same machine.
#pragma once

#include <cstdint>

namespace tandem {

inline constexpr int kAttentionTileRows = 48;  // rows of one attention tile: query rows x query heads of one KV head
inline constexpr int kAttentionTileKeys = 64;  // keys of one pass of the online softmax

// Up to kAttentionTileKeys keys and values of one KV head.
template <typename T>
struct KvBlock {
  const T* keys_t = nullptr;  // [head_dim, width], rows key_t_stride apart: keys stand in columns
  std::int64_t key_t_stride = 0;
  const T* values = nullptr;  // [count, head_dim], rows row_stride apart
  std::int64_t row_stride = 0;
  std::int32_t width = 0;  // columns of keys_t that may be read; those beyond `count` may hold anything
  std::int32_t count = 0;  // keys in use
  // Only the backward pass reads these.
  const T* keys = nullptr;      // [count, head_dim], rows row_stride apart
  const T* values_t = nullptr;  // [head_dim, width], rows key_t_stride apart
  T* grad_keys = nullptr;       // [count, head_dim], rows grad_stride apart; added to
  T* grad_values = nullptr;
  std::int64_t grad_stride = 0;
};

// Queries of one KV head against one sequence of keys. Row r sees the first limits[r] keys of the blocks in order.
template <typename T>
struct AttentionTile {
  const T* queries = nullptr;  // [rows, head_dim], already times 1 / sqrt(head_dim)
  const std::int32_t* limits = nullptr;
  std::int32_t rows = 0;  // <= kAttentionTileRows
  std::int32_t head_dim = 0;
  const KvBlock<T>* blocks = nullptr;
  std::int32_t num_blocks = 0;
  T* scores = nullptr;  // scratch [kAttentionTileRows, kAttentionTileKeys]
  T* output = nullptr;  // forward: [rows, head_dim]
  T* lse = nullptr;     // [rows]; forward writes it, backward reads it
  // Only the backward pass uses these.
  const T* grad_output = nullptr;  // [rows, head_dim]
  const T* delta = nullptr;        // [rows]: sum of output x grad_output
  T* grad_scores = nullptr;        // scratch as `scores`
  T* grad_queries = nullptr;       // [rows, head_dim], with respect to `queries`; overwritten
};

// A tile of one row of the head: u holds `count` products h . w_j, from vocabulary column 0 of the tile.
template <typename T>
struct HeadTransform {
  T scale = 1;    // logit_scale / temperature
  T softcap = 0;  // 0: none; else z = softcap tanh(u logit_scale / softcap) / temperature
  T logit_scale = 1;
  T temperature = 1;
};

template <typename T>
struct VectorOps {
  // y = x / rms(x) * weight. x, y: [rows, width]; may be the same memory.
  void (*rms_norm)(const T* x, const T* weight, T* y, std::int64_t rows, std::int64_t width, T epsilon);
  // grad_x += d(rms_norm)/dx . grad_y.
  void (*rms_norm_backward)(const T* x, const T* weight, const T* grad_y, T* grad_x, std::int64_t rows, std::int64_t width,
                            T epsilon);
  // Rotates `heads` heads of head_dim from `x` on, in place, pairs (i, i + head_dim / 2). cosines, sines: [head_dim / 2] of the
  // row's position; `sign` -1 rotates back.
  void (*rotate)(T* x, std::int64_t heads, std::int64_t head_dim, const T* cosines, const T* sines, T sign);
  // out = silu(gate) * up. gate_up: [rows, 2 width], gate first; out: [rows, width].
  void (*swiglu)(const T* gate_up, T* out, std::int64_t rows, std::int64_t width);
  // Replaces gate_up by its gradient, given that of `out`.
  void (*swiglu_backward)(T* gate_up, const T* grad_out, std::int64_t rows, std::int64_t width);
  void (*attention_forward)(const AttentionTile<T>& tile);
  void (*attention_backward)(const AttentionTile<T>& tile);
  // Turns u into logits z in place; the largest is returned.
  T (*head_logits)(T* u, std::int64_t count, const HeadTransform<T>& transform);
  // Adds sum e^{z - top} and sum (z - top) e^{z - top} to *sum and *shifted.
  void (*exp_sums)(const T* z, std::int64_t count, T top, double* sum, double* shifted);
  // z_j <- e^{z_j - top} (g0 + g1 (z_j - top)) dz_j/du_j.
  void (*head_gradient)(T* z, std::int64_t count, T top, T g0, T g1, const HeadTransform<T>& transform);
  void (*scale)(T* x, std::int64_t count, T factor);                   // x *= factor
  void (*add_scaled)(T* y, const T* x, std::int64_t count, T factor);  // y += factor x
};

// The best set for this processor. T: float, double.
template <typename T>
const VectorOps<T>& vector_ops();

}  // namespace tandem

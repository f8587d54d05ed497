// FusedAttention by cuDNN's ragged attention: tensor cores near their peak on Hopper, and scratch that is bounded. Keys and
// values are read where they lie, by strides, queries too in the forward pass. Not deterministic: the backward pass adds up the
// queries' gradients in any order.
//
// Scratch. Forward writes the call over prompts into an array of its own, 2 D + 4 bytes a row and head of D, for some key-value
// heads at a time. Backward runs once for each query head of a key-value head, so that cuDNN need not keep gradients of keys and
// values for every query head, and for as many key-value heads at a time as the bound allows: a head takes 4 D + 4 bytes a row
// for cuDNN's fp32 sum of the queries' gradients (rows rounded up to a bucket), 2 D + 4 for its queries and log-sum-exps, and 6 D
// for its gradients, which are then added into grad_qkv: those of keys and values are rounded to bf16 once a query head. One head
// is the least: 1.5 KiB a row at heads of 128.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "common/gpu/device.h"
#include "common/model/model_config.h"
#include "common/torch/buffer.h"
#include "trainer_server/policy/fused_attention.h"

namespace tandem {

// A handle of cuDNN and the graphs that were built for one model: building takes a second for the first one, 70 ms for each later
// shape, so shapes are rounded up to buckets and the kMostKept graphs used last are kept. Confined to one thread.
class CudnnGraphs {
 public:
  static constexpr std::size_t kMostKept = 128;

  explicit CudnnGraphs(const ModelConfig& config);
  ~CudnnGraphs();
  CudnnGraphs(const CudnnGraphs&) = delete;
  CudnnGraphs& operator=(const CudnnGraphs&) = delete;
  std::size_t num_kept() const;

 private:
  friend class CudnnAttention;
  struct State;
  std::unique_ptr<State> state_;
};

class CudnnAttention : public FusedAttention {
 public:
  // Whether this card and these heads are served, and the library is there.
  static bool Serves(const ModelConfig& config);
  // Requires: rows.is_served, Serves(config). `graphs` is of the same model and outlives this.
  CudnnAttention(const ModelConfig& config, const AttentionRows& rows, std::int64_t scratch_limit_bytes, CudnnGraphs* graphs,
                 void* stream);

  void Forward(const void* qkv, void* output, float* lse) const override;
  void Backward(const void* qkv, const void* output, const float* lse, const void* grad_output, void* grad_qkv) const override;

 private:
  template <typename T>
  using DeviceBuffer = Buffer<T, Device::kCuda>;
  // One of the two calls: its shape, and its arrays on the device. Offsets are in elements, one a sequence and the end; rows
  // null: row i itself.
  struct Call {
    bool is_causal = false;
    std::int64_t num_queries = 0, num_keys = 0;          // rows
    std::int64_t batch = 0;                              // of this and the next two: the buckets that graphs are built for
    std::int64_t longest_query = 0, longest_key = 0;     // of one sequence
    std::int64_t total_queries = 0, total_keys = 0;      // of all
    std::int64_t forward_heads = 0, backward_heads = 0;  // key-value heads at a time
    const std::int32_t *query_lengths = nullptr, *key_lengths = nullptr;
    const std::int32_t *query_rows = nullptr, *key_rows = nullptr;
    const std::int64_t *query_offsets = nullptr, *key_offsets = nullptr, *output_offsets = nullptr;  // in the pack's arrays
    const std::int64_t *part_offsets = nullptr, *part_lse_offsets = nullptr;                         // in Forward's results
    const std::int64_t *part_query_offsets = nullptr, *part_key_offsets = nullptr, *lse_offsets = nullptr;  // in Backward's
  };
  struct Sequences;
  void RunForward(const Call& call, const void* qkv, std::int64_t first_head, void* output, float* lse) const;
  void RunBackward(const Call& call, const void* qkv, const void* output, const float* lse, const void* grad_output,
                   void* grad_qkv, bool is_added) const;

  std::int64_t num_heads_, num_kv_heads_, group_, head_dim_;  // group_: query heads of a key-value head
  std::int64_t num_rows_, num_own_;
  CudnnGraphs* graphs_;
  void* stream_;
  DeviceBuffer<std::int64_t> offsets_;
  DeviceBuffer<std::int32_t> indices_;
  Call own_, prompt_;
};

}  // namespace tandem

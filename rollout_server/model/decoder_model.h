// The forward pass of the rollout server: one call runs one step plan over the paged KV cache and returns logits of the rows
// asked for. No torch type crosses this interface, so the scheduler and engine are tested without LibTorch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/time/time.h"
#include "common/base/status.h"
#include "common/gpu/device.h"
#include "common/gpu/dtype.h"
#include "common/model/model_config.h"
#include "common/model/weight_layout.h"

namespace tandem {

// An adapter as it lies in a slot of the pool; the bytes must stay until no batch names it.
struct AdapterView {
  const std::byte* slot = nullptr;
  const AdapterLayout* layout = nullptr;
  float scale = 0;
  std::uint64_t activation_id = 0;  // a slot's bytes change only when this changes; 0: they may have changed, look again
};

// One step's work, ragged. Example: sequence 0 prefills 3 tokens from position 0, sequence 1 decodes its 9th token:
//   token_ids [a b c d], cu_query_lens [0 3 4], context_lens [3 9], positions [0 1 2 8].
struct StepBatch {
  std::vector<std::uint32_t> token_ids;  // [num_tokens]
  // [num_tokens], or empty. Where not null: on the model's device, where the row's id will lie when the step runs, drawn by a
  // step before it (PendingDraw); its token_ids entry is then read by nobody.
  std::vector<const std::uint32_t*> token_places;
  std::vector<std::int32_t> positions;                  // [num_tokens]
  std::vector<std::int32_t> cu_query_lens;              // [num_sequences + 1]
  std::vector<std::int32_t> context_lens;               // [num_sequences]: keys in the cache after this step
  std::vector<std::int64_t> slot_mapping;               // [num_tokens]: block * block_tokens + offset, where K and V are written
  std::vector<std::vector<std::int32_t>> block_tables;  // [num_sequences][ceil(context_len / block_tokens)]
  std::vector<std::int32_t> logit_rows;                 // token rows whose logits are wanted
  std::vector<std::int32_t> adapter_of;                 // [num_sequences]: index into adapters, or -1
  std::vector<AdapterView> adapters;
};

// What a step is made of, by kernel family. kElementwise: embedding, norms, rope and writing to the cache, activation.
enum class StepPart { kLinear, kAttention, kElementwise, kHead };

struct DecoderModelOptions {
  Device device = Device::kCpu;
  StorageFormat weight_format = StorageFormat::kFp32;  // the layout's: kFp32 on the CPU, any other on the GPU
  DType kv_dtype = DType::kFp32;                       // kFp32 on the CPU, kBf16 or kFp8E3m4 on the GPU
  int block_tokens = 16;
  int num_blocks = 0;
  // The largest step, on the GPU: the CPU's activations grow with the step.
  int max_batch_tokens = 2048;
  int max_sequences = 256;
  int max_logit_rows = 256;
  int max_adapters = 4;       // in one step
  int max_adapter_rank = 64;  // of any of them
  // On the GPU, WorkspaceBytes of device memory for everything but weights and KV cache; outlives the model. Unused on the CPU.
  std::span<std::byte> workspace = {};
  // On the GPU: how long Create may capture decode steps without an adapter beforehand. What it does not come to, and steps under
  // adapters, are captured as they come.
  absl::Duration max_capture_time = absl::ZeroDuration();
  // On the GPU, for benches: called as the part that comes next is about to be put into the step's stream, a cudaStream_t. Steps
  // are not captured then.
  std::function<void(StepPart part, void* stream)> on_part = {};
};

// What the workspace is for, part by part: its owners in ledgers and plans.
struct WorkspacePart {
  const char* owner = "";
  std::uint64_t size_bytes = 0;
};

// A step's logits where they were made. On the GPU they are there when the stream has come so far.
struct Logits {
  const float* data = nullptr;  // [num_rows, vocab_size] fp32
  std::int64_t num_rows = 0;
  std::int64_t vocab_size = 0;
  Device device = Device::kCpu;
  void* stream = nullptr;  // cudaStream_t; nullptr on the CPU

  std::span<const float> row(std::int64_t i) const { return {data + i * vocab_size, static_cast<std::size_t>(vocab_size)}; }
};

// Decode steps that are one launch, of so many bytes of device memory outside the pool.
struct CapturedSteps {
  std::size_t count = 0;
  std::uint64_t size_bytes = 0;
};

class DecoderModel {
 public:
  // Bytes of K and V of one block over all layers.
  static std::uint64_t BlockBytes(const ModelConfig& config, int block_tokens, DType kv_dtype);
  // 0 on the CPU.
  static std::uint64_t WorkspaceBytes(const ModelConfig& config, const DecoderModelOptions& options);
  // They add up to WorkspaceBytes.
  static std::vector<WorkspacePart> WorkspaceParts(const ModelConfig& config, const DecoderModelOptions& options);
  // `weights` as `layout` says and `kv_cache` (>= num_blocks x BlockBytes) lie in the pool, on
  // `options.device`, and outlive the model. Errors: INVALID_ARGUMENT (model, sizes, types), UNIMPLEMENTED (no device code).
  static absl::StatusOr<std::unique_ptr<DecoderModel>> Create(const ModelConfig& config, const WeightLayout& layout,
                                                              const std::byte* weights, std::span<std::byte> kv_cache,
                                                              const DecoderModelOptions& options);
  virtual ~DecoderModel() = default;
  // One row of logits for each of batch.logit_rows, valid until the next call, in the order of the stream. On the GPU it only
  // enqueues, on one stream that the model owns, so that a step can be put behind one that runs, but for the first step into a
  // cache in fp8, which waits for the cache's scales. Errors: INVALID_ARGUMENT (the batch), FAILED_PRECONDITION (it reads a cache
  // in fp8 that has no scales), OUT_OF_RANGE (scales cannot be found: a head has infinite or NaN keys or values in every row),
  // INTERNAL (LibTorch's or CUDA's words). A row's logits do not depend on the other sequences of the batch beyond the rounding
  // of the GEMM.
  virtual absl::StatusOr<Logits> Run(const StepBatch& batch) = 0;
  // Copies one block's K and V (a shared prompt's last, partly filled block, before a member writes to it). On the GPU enqueued.
  virtual absl::Status CopyBlock(std::int32_t from, std::int32_t to) = 0;
  // Returns when nothing enqueued so far runs or will run any more: before memory that steps use goes to somebody else.
  // Errors: INTERNAL (a kernel failed).
  virtual absl::Status Fence() = 0;
  // None on the CPU.
  virtual CapturedSteps captured_steps() const { return {}; }
};

}  // namespace tandem

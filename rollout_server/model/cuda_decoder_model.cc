// The forward pass on the GPU: weights in bf16 or codes of bf16 values, bf16 activations and KV cache, fp32 residual stream, sums
// and logits. A step is packed into page-locked memory, copied once, and enqueued on one stream, behind the step before it;
// device memory comes from the workspace alone.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/units.h"
#include "common/gpu/cuda_status.h"
#include "common/gpu/stream.h"
#include "common/model/kv_scale_table.h"
#include "common/torch/rope_table.h"
#include "kernels/attention/paged_attention.h"
#include "kernels/embedding/embedding.h"
#include "kernels/gemm/gemm.h"
#include "kernels/kv_cache/fp8_kv.h"
#include "kernels/kv_cache/kv_cache.h"
#include "kernels/quantize/quantized_matrix.h"
#include "kernels/rms_norm/rms_norm.h"
#include "kernels/swiglu/swiglu.h"
#include "rollout_server/model/cuda_decoder_places.h"
#include "rollout_server/model/cuda_step_graphs.h"
#include "rollout_server/model/cuda_step_packer.h"
#include "rollout_server/model/decoder_backends.h"
#include "rollout_server/model/device_adapters.h"

namespace tandem {
namespace {

// Rows [begin, end) of the step's tokens that run under one adapter.
struct AdapterRun {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  const DeviceAdapter* adapter = nullptr;
};

// What the kernels of a step are launched with, besides the contents of the index arrays.
struct StepShape {
  std::int64_t num_rows = 0;  // tokens, padding included
  std::int64_t num_sequences = 0;
  std::int64_t num_logits = 0;
  bool is_every_row_wanted = false;  // logit row i is token row i
  std::vector<AdapterRun> runs;
  PagedAttentionPlan plan;
};

// Sizes of an eighth of a power of two apart: padding costs at most that much of what grows with the batch.
std::int64_t BucketOf(std::int64_t num_sequences) {
  std::int64_t step = 1;
  while (16 * step < num_sequences) step *= 2;
  return (num_sequences + step - 1) / step * step;
}

class CudaDecoderModel : public DecoderModel {
 public:
  CudaDecoderModel(const ModelConfig& config, const WeightLayout& layout, const std::byte* weights, std::span<std::byte> kv_cache,
                   const DecoderModelOptions& options, std::unique_ptr<Stream> stream, std::unique_ptr<Gemm> gemm,
                   std::unique_ptr<StepPacker> packer)
      : config_(config),
        layout_(layout),
        weights_(weights),
        cache_(kv_cache.data()),
        options_(options),
        places_(config, options),
        stream_(std::move(stream)),
        gemm_(std::move(gemm)),
        packer_(std::move(packer)),
        kv_scales_(config, layout.digest, Device::kCuda, options.workspace.subspan(places_.kv_scales)),
        adapters_(config, options.max_adapters, options.max_adapter_rank, at(places_.adapters)),
        graphs_(stream_->handle(), {}) {}
  ~CudaDecoderModel() override {
    if (const absl::Status status = stream_->Synchronize(); !status.ok()) TANDEM_LOG(kError, "model", status.ToString());
  }

  absl::Status Prepare();
  // Captures decode steps without an adapter, the smallest first, until all are, the time is over or half of the room for graphs
  // is taken; none while the cache has no scales. They run on padding alone: the cache is neither read nor written.
  absl::Status CaptureSteps(absl::Duration time_limit);
  absl::StatusOr<Logits> Run(const StepBatch& batch) override;
  absl::Status CopyBlock(std::int32_t from, std::int32_t to) override {
    TANDEM_RETURN_IF_ERROR(CheckBlockCopy(from, to, options_.num_blocks));
    if (from == to) return absl::OkStatus();
    const std::uint64_t bytes = DecoderModel::BlockBytes(config_, options_.block_tokens, options_.kv_dtype);
    return CudaToStatus(
        cudaMemcpyAsync(cache_ + static_cast<std::uint64_t>(to) * bytes, cache_ + static_cast<std::uint64_t>(from) * bytes, bytes,
                        cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream())),
        "copying a KV block");
  }
  absl::Status Fence() override { return stream_->Synchronize(); }
  CapturedSteps captured_steps() const override { return {.count = graphs_.num_graphs(), .size_bytes = graphs_.bytes()}; }

 private:
  void* stream() const { return stream_->handle(); }
  float* hidden() const { return reinterpret_cast<float*>(at(places_.hidden)); }
  float* qkv() const { return reinterpret_cast<float*>(at(places_.qkv)); }
  float* gate_up() const { return reinterpret_cast<float*>(at(places_.gate_up)); }
  bool is_quantized() const { return IsQuantized(layout_.format); }
  std::byte* at(std::uint64_t begin) const { return options_.workspace.data() + begin; }
  const std::byte* Weight(const TensorPlace& place) const { return weights_ + place.begin_bytes; }
  const void* WeightOrNull(const std::optional<TensorPlace>& place) const { return place.has_value() ? Weight(*place) : nullptr; }
  template <typename T>
  T* Index(std::int64_t begin) const {
    return reinterpret_cast<T*>(at(places_.step_indices) + begin * static_cast<std::int64_t>(sizeof(std::int32_t)));
  }
  PagedAttentionScratch scratch() {
    return {.partials = {at(places_.attention_partials), places_.attention_partial_bytes},
            .indices = {at(places_.attention_indices), places_.attention_index_bytes},
            .staging = packer_->plan()};
  }
  bool is_kv_fp8() const { return options_.kv_dtype == DType::kFp8E3m4; }
  // This step finds the scales of the cache.
  bool is_measuring() const { return is_kv_fp8() && !are_kv_scales_set_; }
  std::int64_t page_elements() const { return std::int64_t{options_.block_tokens} * config_.kv_size(); }

  absl::Status CheckCapacity(const StepBatch& batch) const;
  absl::Status CheckScales(const StepBatch& batch) const;
  absl::Status FreezeScales();
  // The bucket of a step in which every sequence decodes one token, draws, and runs under one adapter or none.
  std::optional<std::int64_t> GraphBucket(const StepBatch& batch, const StepShape& shape) const;
  std::int64_t max_bucket() const {
    return std::min({options_.max_sequences, options_.max_logit_rows, options_.max_batch_tokens});
  }
  // Puts the step into the stream, padded to the bucket where it has one.
  absl::Status Submit(const StepBatch& batch, std::optional<std::int64_t> bucket, StepShape* shape);
  void Begin(StepPart part) const {
    if (options_.on_part) options_.on_part(part, stream());
  }
  absl::Status FindRuns(const StepBatch& batch, StepShape* shape);
  absl::Status Enqueue(const StepShape& shape);
  absl::Status EnqueueLayer(const StepShape& shape, int layer);
  absl::Status StoreKv(const StepShape& shape, int layer, std::byte* keys, std::byte* values, std::int64_t page_stride);
  absl::Status Linear(const StepShape& shape, const void* x, const LinearPlace& weight, int layer, LinearGroup group, float* y,
                      float beta);
  absl::Status Norm(const TensorPlace& weight, const std::int32_t* rows, std::int64_t num_rows);
  absl::Status Head(const StepShape& shape);

  const ModelConfig config_;
  const WeightLayout layout_;
  const std::byte* const weights_;
  std::byte* const cache_;
  const DecoderModelOptions options_;
  const WorkspacePlaces places_;
  const std::unique_ptr<Stream> stream_;
  const std::unique_ptr<Gemm> gemm_;
  const std::unique_ptr<StepPacker> packer_;
  KvScaleTable kv_scales_;
  bool are_kv_scales_set_ = false;
  DeviceAdapters adapters_;
  StepGraphs graphs_;
};

absl::Status CudaDecoderModel::Prepare() {
  const std::vector<double> frequencies = RopeFrequencies(config_);
  TANDEM_RETURN_IF_ERROR(FillRopeTable({.frequencies = frequencies.data(),
                                        .half = config_.head_dim / 2,
                                        .num_positions = config_.max_positions,
                                        .cosines = reinterpret_cast<float*>(at(places_.cosines)),
                                        .sines = reinterpret_cast<float*>(at(places_.sines))},
                                       Device::kCuda, stream()));
  if (is_kv_fp8()) {
    TANDEM_ASSIGN_OR_RETURN(are_kv_scales_set_, kv_scales_.AreSet());
  } else {
    TANDEM_RETURN_IF_ERROR(kv_scales_.Withdraw());
  }
  return Fence();
}

absl::Status CudaDecoderModel::CheckScales(const StepBatch& batch) const {
  if (!is_measuring()) return absl::OkStatus();
  for (std::size_t s = 0; s < batch.context_lens.size(); ++s) {
    const std::int32_t num_new = batch.cu_query_lens[s + 1] - batch.cu_query_lens[s];
    if (batch.context_lens[s] == num_new) continue;
    return absl::FailedPreconditionError(absl::StrCat("KV cache in fp8: sequence ", s, " reads ", batch.context_lens[s] - num_new,
                                                      " tokens of a cache that has no scales yet"));
  }
  return absl::OkStatus();
}

// What the step in the stream has measured stands from now on. A head without a number has none in any row of the step.
absl::Status CudaDecoderModel::FreezeScales() {
  TANDEM_RETURN_IF_ERROR(Fence());
  TANDEM_RETURN_IF_ERROR(Annotate(kv_scales_.Set(), "measuring the first prompts (NaN: infinite or NaN in every row)"));
  are_kv_scales_set_ = true;
  return absl::OkStatus();
}

absl::Status CudaDecoderModel::CheckCapacity(const StepBatch& batch) const {
  const auto check = [](const char* what, std::size_t count, std::int64_t limit) {
    if (count <= static_cast<std::size_t>(limit)) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("step batch: ", count, " ", what, ", the model was made for ", limit));
  };
  std::size_t num_pages = 0;
  for (const auto& table : batch.block_tables) num_pages += table.size();
  TANDEM_RETURN_IF_ERROR(check("tokens", batch.token_ids.size(), options_.max_batch_tokens));
  TANDEM_RETURN_IF_ERROR(check("sequences", batch.context_lens.size(), options_.max_sequences));
  TANDEM_RETURN_IF_ERROR(check("logit rows", batch.logit_rows.size(), options_.max_logit_rows));
  return check("blocks in all sequences together", num_pages, places_.step.max_pages);
}

absl::Status CudaDecoderModel::FindRuns(const StepBatch& batch, StepShape* shape) {
  std::vector<const DeviceAdapter*> adapters;
  TANDEM_RETURN_IF_ERROR(adapters_.Load(batch.adapters, stream(), &adapters));
  for (const std::uint64_t graph_id : adapters_.TakeFormerGraphIds()) graphs_.Forget(graph_id);
  for (std::size_t s = 0; s < batch.context_lens.size(); ++s) {
    const std::int64_t begin = batch.cu_query_lens[s], end = batch.cu_query_lens[s + 1];
    const DeviceAdapter* adapter = batch.adapter_of[s] < 0 ? nullptr : adapters[static_cast<std::size_t>(batch.adapter_of[s])];
    if (!shape->runs.empty() && shape->runs.back().adapter == adapter) {
      shape->runs.back().end = end;
    } else {
      shape->runs.push_back({begin, end, adapter});
    }
  }
  return absl::OkStatus();
}

std::optional<std::int64_t> CudaDecoderModel::GraphBucket(const StepBatch& batch, const StepShape& shape) const {
  const auto num_sequences = static_cast<std::int64_t>(batch.context_lens.size());
  if (is_measuring() || static_cast<std::int64_t>(batch.token_ids.size()) != num_sequences || !shape.is_every_row_wanted ||
      shape.runs.size() != 1) {
    return std::nullopt;
  }
  const std::int64_t bucket = BucketOf(num_sequences);
  return bucket <= max_bucket() ? std::optional(bucket) : std::nullopt;
}

absl::StatusOr<Logits> CudaDecoderModel::Run(const StepBatch& batch) {
  TANDEM_RETURN_IF_ERROR(CheckStepBatch(batch, config_, options_.num_blocks, options_.block_tokens));
  TANDEM_RETURN_IF_ERROR(CheckCapacity(batch));
  TANDEM_RETURN_IF_ERROR(CheckScales(batch));
  StepShape shape;
  shape.num_rows = static_cast<std::int64_t>(batch.token_ids.size());
  shape.num_sequences = static_cast<std::int64_t>(batch.context_lens.size());
  shape.num_logits = static_cast<std::int64_t>(batch.logit_rows.size());
  shape.is_every_row_wanted = shape.num_logits == shape.num_rows;
  for (std::int64_t i = 0; i < shape.num_logits && shape.is_every_row_wanted; ++i) {
    shape.is_every_row_wanted = batch.logit_rows[static_cast<std::size_t>(i)] == i;
  }
  TANDEM_RETURN_IF_ERROR(FindRuns(batch, &shape));
  TANDEM_RETURN_IF_ERROR(Submit(batch, GraphBucket(batch, shape), &shape));
  return Logits{.data = reinterpret_cast<const float*>(at(places_.logits)),
                .num_rows = static_cast<std::int64_t>(batch.logit_rows.size()),
                .vocab_size = config_.vocab_size,
                .device = Device::kCuda,
                .stream = stream()};
}

absl::Status CudaDecoderModel::Submit(const StepBatch& batch, std::optional<std::int64_t> bucket, StepShape* shape) {
  TANDEM_RETURN_IF_ERROR(packer_->Begin());
  if (bucket.has_value()) {
    shape->num_rows = shape->num_sequences = shape->num_logits = *bucket;
    shape->runs.front().end = *bucket;
  }
  packer_->Pack(batch, shape->num_rows, shape->num_sequences);
  TANDEM_RETURN_IF_ERROR(packer_->Copy(at(places_.step_indices), stream()));
  TANDEM_RETURN_IF_ERROR(PlanPagedAttention({.shape = AttentionShapeOf(config_, options_.block_tokens),
                                             .query_indptr = packer_->query_indptr(),
                                             .page_indptr = packer_->page_indptr(),
                                             .num_sequences = shape->num_sequences,
                                             .num_rows = shape->num_rows,
                                             .is_fixed_shape = bucket.has_value()},
                                            scratch(), &shape->plan, stream()));
  TANDEM_RETURN_IF_ERROR(packer_->End(stream()));
  if (!bucket.has_value() || options_.on_part) {
    TANDEM_RETURN_IF_ERROR(Enqueue(*shape));
    return is_measuring() ? FreezeScales() : absl::OkStatus();
  }
  const StepGraphKey key = {.num_rows = *bucket,
                            .adapter = shape->runs.front().adapter == nullptr ? 0 : shape->runs.front().adapter->graph_id,
                            .plan = shape->plan.values};
  return graphs_.Run(key, [&] { return Enqueue(*shape); });
}

absl::Status CudaDecoderModel::CaptureSteps(absl::Duration time_limit) {
  if (is_measuring() || options_.on_part || time_limit <= absl::ZeroDuration()) return absl::OkStatus();
  const MonotonicTime begin = MonotonicTime::Now();
  StepBatch padding;
  padding.cu_query_lens = {0};
  for (std::int64_t bucket = 1; bucket <= max_bucket(); bucket = BucketOf(bucket + 1)) {
    if (!graphs_.has_room_ahead() || MonotonicTime::Now() - begin >= time_limit) break;
    for (int run = 0; run < 2; ++run) {  // the second is captured
      StepShape shape;
      shape.is_every_row_wanted = true;
      shape.runs = {AdapterRun{}};
      TANDEM_RETURN_IF_ERROR(Annotate(Submit(padding, bucket, &shape), absl::StrCat("capturing decode steps of ", bucket)));
    }
    TANDEM_RETURN_IF_ERROR(Fence());  // so that the time is what the device takes too
  }
  return absl::OkStatus();
}

absl::Status CudaDecoderModel::Enqueue(const StepShape& shape) {
  Begin(StepPart::kElementwise);
  TANDEM_RETURN_IF_ERROR(Embedding({.dtype = DType::kBf16,
                                    .table = Weight(layout_.embedding),
                                    .token_ids = Index<std::uint32_t>(places_.step.token_ids),
                                    .token_places = Index<const std::uint32_t* const>(places_.step.token_places),
                                    .output = hidden(),
                                    .num_rows = shape.num_rows,
                                    .width = config_.hidden_size},
                                   Device::kCuda, stream()));
  for (int layer = 0; layer < config_.num_layers; ++layer) TANDEM_RETURN_IF_ERROR(EnqueueLayer(shape, layer));
  return Head(shape);
}

// normed <- RMSNorm(hidden), of the rows named, or of the first num_rows where `rows` is null.
absl::Status CudaDecoderModel::Norm(const TensorPlace& weight, const std::int32_t* rows, std::int64_t num_rows) {
  return RmsNorm({.dtype = DType::kBf16,
                  .input = hidden(),
                  .weight = Weight(weight),
                  .output = at(places_.normed),
                  .rows = rows,
                  .num_rows = num_rows,
                  .width = config_.hidden_size,
                  .epsilon = config_.rms_norm_epsilon},
                 Device::kCuda, stream());
}

absl::Status CudaDecoderModel::EnqueueLayer(const StepShape& shape, int layer) {
  const LayerPlaces& layer_places = layout_.layers[static_cast<std::size_t>(layer)];
  const StepPlaces& step = places_.step;
  const auto kv_bytes = static_cast<std::int64_t>(ElementBytes(options_.kv_dtype));
  std::byte* const keys = cache_ + kv_bytes * 2 * layer * page_elements();
  std::byte* const values = keys + kv_bytes * page_elements();
  const std::int64_t page_stride = 2 * config_.num_layers * page_elements();
  const bool is_fp8 = is_kv_fp8();

  Begin(StepPart::kElementwise);
  TANDEM_RETURN_IF_ERROR(Norm(layer_places.input_norm, nullptr, shape.num_rows));
  TANDEM_RETURN_IF_ERROR(Linear(shape, at(places_.normed), layer_places.qkv, layer, LinearGroup::kQkv, qkv(), 0));
  Begin(StepPart::kElementwise);
  TANDEM_RETURN_IF_ERROR(RopeAndCache({.dtype = DType::kBf16,
                                       .qkv = qkv(),
                                       .queries = at(places_.queries),
                                       .query_row_stride = config_.q_size(),
                                       .bias = WeightOrNull(layer_places.qkv_bias),
                                       .q_norm = WeightOrNull(layer_places.q_norm),
                                       .k_norm = WeightOrNull(layer_places.k_norm),
                                       .epsilon = config_.rms_norm_epsilon,
                                       .num_rows = shape.num_rows,
                                       .num_heads = config_.num_heads,
                                       .num_kv_heads = config_.num_kv_heads,
                                       .head_dim = config_.head_dim,
                                       .positions = Index<const std::int32_t>(step.positions),
                                       .cosines = reinterpret_cast<const float*>(at(places_.cosines)),
                                       .sines = reinterpret_cast<const float*>(at(places_.sines)),
                                       .slots = is_fp8 ? nullptr : Index<const std::int32_t>(step.slots),
                                       .keys = is_fp8 ? at(places_.key_rows) : keys,
                                       .values = is_fp8 ? at(places_.value_rows) : values,
                                       .page_stride = is_fp8 ? config_.kv_size() : page_stride,
                                       .page_tokens = is_fp8 ? 1 : options_.block_tokens},
                                      Device::kCuda, stream()));
  if (is_fp8) TANDEM_RETURN_IF_ERROR(StoreKv(shape, layer, keys, values, page_stride));
  Begin(StepPart::kAttention);
  TANDEM_RETURN_IF_ERROR(PagedAttention({.shape = AttentionShapeOf(config_, options_.block_tokens),
                                         .query = at(places_.queries),
                                         .query_row_stride = config_.q_size(),
                                         .keys = keys,
                                         .values = values,
                                         .page_stride = page_stride,
                                         .key_scales = is_fp8 ? kv_scales_.layer(layer) : nullptr,
                                         .value_scales = is_fp8 ? kv_scales_.layer(layer) + config_.num_kv_heads : nullptr,
                                         .output = at(places_.attention),
                                         .query_indptr = Index<const std::int32_t>(step.query_indptr),
                                         .page_indptr = Index<const std::int32_t>(step.page_indptr),
                                         .page_indices = Index<const std::int32_t>(step.page_indices),
                                         .last_page_tokens = Index<const std::int32_t>(step.last_page_tokens),
                                         .num_sequences = shape.num_sequences},
                                        shape.plan, scratch(), Device::kCuda, stream()));
  TANDEM_RETURN_IF_ERROR(Linear(shape, at(places_.attention), layer_places.o, layer, LinearGroup::kO, hidden(), 1));
  Begin(StepPart::kElementwise);
  TANDEM_RETURN_IF_ERROR(Norm(layer_places.post_norm, nullptr, shape.num_rows));
  TANDEM_RETURN_IF_ERROR(Linear(shape, at(places_.normed), layer_places.gate_up, layer, LinearGroup::kGateUp, gate_up(), 0));
  Begin(StepPart::kElementwise);
  TANDEM_RETURN_IF_ERROR(Swiglu({.dtype = DType::kBf16,
                                 .gate_up = gate_up(),
                                 .output = at(places_.activated),
                                 .num_rows = shape.num_rows,
                                 .width = config_.intermediate_size},
                                Device::kCuda, stream()));
  return Linear(shape, at(places_.activated), layer_places.down, layer, LinearGroup::kDown, hidden(), 1);
}

// y = beta y + x W^T, then for each run under an adapter y += scale (x A^T) B^T, where A and B are those of all its parts
// together.
absl::Status CudaDecoderModel::Linear(const StepShape& shape, const void* x, const LinearPlace& weight, int layer,
                                      LinearGroup group, float* y, float beta) {
  Begin(StepPart::kLinear);
  const std::int64_t outputs = weight.shape[0], inputs = weight.shape[1];
  const auto y_rows = [&](std::int64_t begin, std::int64_t end) {
    return MatrixView{.data = y + begin * outputs, .rows = end - begin, .columns = outputs, .row_stride = outputs};
  };
  const auto rows_of = [](const void* data, std::int64_t begin, std::int64_t end, std::int64_t width) {
    return MatrixView{.data = static_cast<const std::byte*>(data) + begin * width * static_cast<std::int64_t>(kBf16Bytes),
                      .dtype = DType::kBf16,
                      .rows = end - begin,
                      .columns = width,
                      .row_stride = width};
  };
  if (is_quantized() && shape.num_rows <= kFewRows) {
    TANDEM_RETURN_IF_ERROR(MultiplyFew({.weight = QuantizedMatrixAt(layout_, weight, weights_),
                                        .x = x,
                                        .y = y,
                                        .y_dtype = DType::kFp32,
                                        .is_added = beta != 0,
                                        .num_rows = shape.num_rows},
                                       Device::kCuda, stream()));
  } else {
    const std::byte* values = Weight(weight);
    if (is_quantized()) {
      values = at(places_.dense);
      TANDEM_RETURN_IF_ERROR(
          Dequantize(QuantizedMatrixAt(layout_, weight, weights_), at(places_.dense), Device::kCuda, stream()));
    }
    TANDEM_RETURN_IF_ERROR(gemm_->Run({.a = rows_of(x, 0, shape.num_rows, inputs),
                                       .b = rows_of(values, 0, outputs, inputs).Transposed(),
                                       .c = y_rows(0, shape.num_rows),
                                       .beta = beta},
                                      stream()));
  }
  for (const AdapterRun& run : shape.runs) {
    if (run.adapter == nullptr) continue;
    const DeviceAdapter::Pair& pair = run.adapter->pair(layer, group);
    if (pair.width == 0) continue;
    const MatrixView xa = rows_of(at(places_.adapter_x), 0, run.end - run.begin, pair.width);
    TANDEM_RETURN_IF_ERROR(gemm_->Run(
        {.a = rows_of(x, run.begin, run.end, inputs), .b = rows_of(pair.a, 0, pair.width, inputs).Transposed(), .c = xa},
        stream()));
    TANDEM_RETURN_IF_ERROR(gemm_->Run({.a = xa,
                                       .b = rows_of(pair.b, 0, outputs, pair.width).Transposed(),
                                       .c = y_rows(run.begin, run.end),
                                       .alpha = run.adapter->scale,
                                       .beta = 1},
                                      stream()));
  }
  return absl::OkStatus();
}

// Finished rows of keys and values into pages of codes.
absl::Status CudaDecoderModel::StoreKv(const StepShape& shape, int layer, std::byte* keys, std::byte* values,
                                       std::int64_t page_stride) {
  const Fp8KvParams params = {.keys = at(places_.key_rows),
                              .values = at(places_.value_rows),
                              .num_rows = shape.num_rows,
                              .num_kv_heads = config_.num_kv_heads,
                              .head_dim = config_.head_dim,
                              .slots = Index<const std::int32_t>(places_.step.slots),
                              .scales = kv_scales_.layer(layer),
                              .queries = at(places_.queries),
                              .query_row_stride = config_.q_size(),
                              .key_pages = keys,
                              .value_pages = values,
                              .page_stride = page_stride,
                              .page_tokens = options_.block_tokens};
  if (is_measuring()) TANDEM_RETURN_IF_ERROR(MeasureFp8KvScales(params, Device::kCuda, stream()));
  return StoreFp8Kv(params, Device::kCuda, stream());
}

absl::Status CudaDecoderModel::Head(const StepShape& shape) {
  if (shape.num_logits == 0) return absl::OkStatus();
  Begin(StepPart::kHead);
  const auto* rows = shape.is_every_row_wanted ? nullptr : Index<const std::int32_t>(places_.step.logit_rows);
  TANDEM_RETURN_IF_ERROR(Norm(layout_.final_norm, rows, shape.num_logits));
  const std::int64_t d = config_.hidden_size, vocab = config_.vocab_size;
  const MatrixView head = {.data = Weight(layout_.head), .dtype = DType::kBf16, .rows = vocab, .columns = d, .row_stride = d};
  return gemm_->Run(
      {.a = {.data = at(places_.normed), .dtype = DType::kBf16, .rows = shape.num_logits, .columns = d, .row_stride = d},
       .b = head.Transposed(),
       .c = {.data = at(places_.logits), .dtype = DType::kFp32, .rows = shape.num_logits, .columns = vocab, .row_stride = vocab}},
      stream());
}

}  // namespace

absl::StatusOr<std::unique_ptr<DecoderModel>> CreateCudaDecoderModel(const ModelConfig& config, const WeightLayout& layout,
                                                                     const std::byte* weights, std::span<std::byte> kv_cache,
                                                                     const DecoderModelOptions& options) {
  TANDEM_RETURN_IF_ERROR(CheckCudaDecoderOptions(config, layout, options));
  const WorkspacePlaces places(config, options);
  TANDEM_ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, Stream::Create(Device::kCuda));
  TANDEM_ASSIGN_OR_RETURN(std::unique_ptr<Gemm> gemm,
                          Gemm::Create(Device::kCuda, {options.workspace.data() + places.gemm, kGemmWorkspaceBytes}));
  TANDEM_ASSIGN_OR_RETURN(std::unique_ptr<StepPacker> packer,
                          StepPacker::Create(places.step, options.block_tokens, places.attention_index_bytes));
  auto model = std::make_unique<CudaDecoderModel>(config, layout, weights, kv_cache, options, std::move(stream), std::move(gemm),
                                                  std::move(packer));
  TANDEM_RETURN_IF_ERROR(model->Prepare());
  TANDEM_RETURN_IF_ERROR(model->CaptureSteps(options.max_capture_time));
  return model;
}

}  // namespace tandem

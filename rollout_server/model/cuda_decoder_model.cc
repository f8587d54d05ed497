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

#include "common/base/log.h"
#include "common/base/units.h"
#include "common/gpu/cuda_event.h"
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
#include "rollout_server/model/cuda_step_graphs.h"
#include "rollout_server/model/decoder_backends.h"
#include "rollout_server/model/device_adapters.h"

namespace tandem {
namespace {

constexpr std::uint64_t kAlignment = 256;
constexpr std::size_t kBf16Bytes = 2;

PagedAttentionShape AttentionShape(const ModelConfig& config, int block_tokens) {
  return {.dtype = DType::kBf16,
          .num_heads = config.num_heads,
          .num_kv_heads = config.num_kv_heads,
          .head_dim = config.head_dim,
          .page_tokens = block_tokens};
}

// The step's index arrays, int32 but for the pointers of token_places, each at a place that depends on the options alone: a
// captured step finds the next one's there. The longest comes last, so that the copy ends with what the step uses.
struct StepPlaces {
  StepPlaces(const ModelConfig& config, const DecoderModelOptions& options) {
    const auto put = [this](std::int64_t count) {
      const std::int64_t begin = size;
      size = static_cast<std::int64_t>(RoundUp(static_cast<std::uint64_t>(size + count), kAlignment / 4));
      return begin;
    };
    token_ids = put(options.max_batch_tokens);
    token_places = put(2 * std::int64_t{options.max_batch_tokens});
    positions = put(options.max_batch_tokens);
    slots = put(options.max_batch_tokens);
    logit_rows = put(options.max_logit_rows);
    query_indptr = put(options.max_sequences + 1);
    page_indptr = put(options.max_sequences + 1);
    last_page_tokens = put(options.max_sequences);
    max_pages = std::int64_t{options.max_sequences} * ((config.max_positions + options.block_tokens - 1) / options.block_tokens);
    page_indices = put(max_pages);
  }
  std::int64_t token_ids, token_places, positions, slots, logit_rows, query_indptr, page_indptr, last_page_tokens, page_indices;
  std::int64_t max_pages;
  std::int64_t size = 0;  // elements
};

// Where everything lies in the workspace. bf16 unless said otherwise.
struct WorkspacePlaces {
  WorkspacePlaces(const ModelConfig& config, const DecoderModelOptions& options) : step(config, options) {
    const auto put = [this](std::uint64_t bytes) {
      const std::uint64_t begin = total_bytes;
      total_bytes = RoundUp(total_bytes + bytes, kAlignment);
      return begin;
    };
    const bool is_fp8 = options.kv_dtype == DType::kFp8E3m4;
    kv_scales = put(KvScaleTable::Bytes(config));  // first: the trainer and the next process look for them here
    const auto tokens = static_cast<std::uint64_t>(options.max_batch_tokens);
    const auto d = static_cast<std::uint64_t>(config.hidden_size), f = static_cast<std::uint64_t>(config.intermediate_size);
    const auto q = static_cast<std::uint64_t>(config.q_size()), kv = static_cast<std::uint64_t>(config.kv_size());
    const auto put_rows = [&](std::uint64_t width) { return put(tokens * width * kBf16Bytes); };
    hidden = put(tokens * d * sizeof(float));
    normed = put_rows(d);
    qkv = put(tokens * (q + 2 * kv) * sizeof(float));
    queries = put_rows(q);
    attention = put_rows(q);
    key_rows = put_rows(is_fp8 ? kv : 0);
    value_rows = put_rows(is_fp8 ? kv : 0);
    gate_up = put(tokens * 2 * f * sizeof(float));
    activated = put_rows(f);
    adapter_x = put_rows(DeviceAdapters::MaxWidth(options.max_adapter_rank));
    logits =
        put(static_cast<std::uint64_t>(options.max_logit_rows) * static_cast<std::uint64_t>(config.vocab_size) * sizeof(float));
    const std::uint64_t table =
        static_cast<std::uint64_t>(config.max_positions) * static_cast<std::uint64_t>(config.head_dim / 2);
    cosines = put(table * sizeof(float));
    sines = put(table * sizeof(float));
    step_indices = put(static_cast<std::uint64_t>(step.size) * sizeof(std::int32_t));
    const PagedAttentionShape shape = AttentionShape(config, options.block_tokens);
    attention_partial_bytes = PagedAttentionPartialBytes(shape, options.max_batch_tokens, options.max_sequences);
    attention_partials = put(attention_partial_bytes);
    attention_index_bytes = PagedAttentionIndexBytes(shape, options.max_batch_tokens, options.max_sequences);
    attention_indices = put(attention_index_bytes);
    gemm = put(kGemmWorkspaceBytes);
    dense = put(IsQuantized(options.weight_format) ? std::max({d * (q + 2 * kv), d * q, d * 2 * f}) * kBf16Bytes : 0);
    adapter_bytes = DeviceAdapters::Bytes(config, options.max_adapters, options.max_adapter_rank);
    adapters = put(adapter_bytes);
  }
  StepPlaces step;
  std::uint64_t hidden;                                 // fp32 [max_batch_tokens, hidden_size]: the residual stream
  std::uint64_t qkv, gate_up;                           // fp32 [max_batch_tokens, width]: products
  std::uint64_t normed, queries, attention, activated;  // [max_batch_tokens, width]
  std::uint64_t adapter_x;
  std::uint64_t logits;          // fp32 [max_logit_rows, vocab_size]
  std::uint64_t cosines, sines;  // fp32 [max_positions, head_dim / 2]
  std::uint64_t step_indices, attention_partials, attention_partial_bytes, attention_indices, attention_index_bytes;
  std::uint64_t gemm, adapters, adapter_bytes;
  std::uint64_t dense;                            // values of the weight in codes that is multiplied with
  std::uint64_t kv_scales, key_rows, value_rows;  // of a cache in fp8; rows: [max_batch_tokens, kv_size] on their way to it
  std::uint64_t total_bytes = 0;
};

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

// Page-locked memory that a step is packed into while the one before it may still wait for its copy.
struct StepStaging {
  std::unique_ptr<HostBuffer> indices, plan;
  std::unique_ptr<CudaEvent> copied;  // both are on the device

  static absl::StatusOr<StepStaging> Create(std::uint64_t index_bytes, std::uint64_t plan_bytes) {
    StepStaging staging;
    TANDEM_ASSIGN_OR_RETURN(staging.indices, HostBuffer::Create(Device::kCuda, index_bytes));
    TANDEM_ASSIGN_OR_RETURN(staging.plan, HostBuffer::Create(Device::kCuda, plan_bytes));
    TANDEM_ASSIGN_OR_RETURN(staging.copied, CudaEvent::Create());
    return staging;
  }
};

class CudaDecoderModel : public DecoderModel {
 public:
  CudaDecoderModel(const ModelConfig& config, const WeightLayout& layout, const std::byte* weights, std::span<std::byte> kv_cache,
                   const DecoderModelOptions& options, std::unique_ptr<Stream> stream, std::unique_ptr<Gemm> gemm,
                   std::array<StepStaging, 2> staging)
      : config_(config),
        layout_(layout),
        weights_(weights),
        cache_(kv_cache.data()),
        options_(options),
        places_(config, options),
        stream_(std::move(stream)),
        gemm_(std::move(gemm)),
        staging_(std::move(staging)),
        kv_scales_(config, layout.digest, Device::kCuda, options.workspace.subspan(places_.kv_scales)),
        adapters_(config, options.max_adapters, options.max_adapter_rank, at(places_.adapters)),
        graphs_(stream_->handle(), {}) {}
  ~CudaDecoderModel() override {
    if (const absl::Status status = stream_->Synchronize(); !status.ok()) TANDEM_LOG(kError, "model", status.ToString());
  }

  absl::Status Prepare();
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
  StepStaging& staging() { return staging_[num_steps_ % staging_.size()]; }
  std::int32_t* Staged(std::int64_t begin) { return reinterpret_cast<std::int32_t*>(staging().indices->bytes().data()) + begin; }
  PagedAttentionScratch scratch() {
    return {.partials = {at(places_.attention_partials), places_.attention_partial_bytes},
            .indices = {at(places_.attention_indices), places_.attention_index_bytes},
            .staging = staging().plan->bytes()};
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
  void Begin(StepPart part) const {
    if (options_.on_part) options_.on_part(part, stream());
  }
  void Pack(const StepBatch& batch, const StepShape& shape);
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
  std::array<StepStaging, 2> staging_;
  std::uint64_t num_steps_ = 0;
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
  // Steps of an eighth of the size: padding costs at most that much of what grows with the batch.
  std::int64_t step = 1;
  while (16 * step < num_sequences) step *= 2;
  const std::int64_t bucket = (num_sequences + step - 1) / step * step;
  const std::int64_t limit = std::min({options_.max_sequences, options_.max_logit_rows, options_.max_batch_tokens});
  return bucket <= limit ? std::optional(bucket) : std::nullopt;
}

void CudaDecoderModel::Pack(const StepBatch& batch, const StepShape& shape) {
  const StepPlaces& step = places_.step;
  const auto num_tokens = static_cast<std::int64_t>(batch.token_ids.size());
  const auto num_sequences = static_cast<std::int64_t>(batch.context_lens.size());
  std::memcpy(Staged(step.token_ids), batch.token_ids.data(), batch.token_ids.size() * sizeof(std::int32_t));
  auto* const token_places = reinterpret_cast<const std::uint32_t**>(Staged(step.token_places));
  std::fill_n(token_places, shape.num_rows, nullptr);
  std::copy(batch.token_places.begin(), batch.token_places.end(), token_places);
  std::copy(batch.positions.begin(), batch.positions.end(), Staged(step.positions));
  std::transform(batch.slot_mapping.begin(), batch.slot_mapping.end(), Staged(step.slots),
                 [](std::int64_t slot) { return static_cast<std::int32_t>(slot); });
  for (std::int64_t row = num_tokens; row < shape.num_rows; ++row) {
    Staged(step.token_ids)[row] = 0;
    Staged(step.positions)[row] = 0;
    Staged(step.slots)[row] = -1;
  }
  std::copy(batch.logit_rows.begin(), batch.logit_rows.end(), Staged(step.logit_rows));
  std::copy(batch.cu_query_lens.begin(), batch.cu_query_lens.end(), Staged(step.query_indptr));
  std::int32_t* const page_indptr = Staged(step.page_indptr);
  std::int32_t* pages = Staged(step.page_indices);
  page_indptr[0] = 0;
  for (std::int64_t s = 0; s < num_sequences; ++s) {
    const auto index = static_cast<std::size_t>(s);
    const std::int32_t context = batch.context_lens[index];
    const std::int32_t num_pages = (context + options_.block_tokens - 1) / options_.block_tokens;
    pages = std::copy_n(batch.block_tables[index].begin(), num_pages, pages);
    page_indptr[s + 1] = page_indptr[s] + num_pages;
    Staged(step.last_page_tokens)[s] = context - (num_pages - 1) * options_.block_tokens;
  }
  for (std::int64_t s = num_sequences; s < shape.num_sequences; ++s) {
    Staged(step.query_indptr)[s + 1] = static_cast<std::int32_t>(num_tokens);
    page_indptr[s + 1] = page_indptr[s];
    Staged(step.last_page_tokens)[s] = 0;
  }
}

absl::StatusOr<Logits> CudaDecoderModel::Run(const StepBatch& batch) {
  TANDEM_RETURN_IF_ERROR(CheckStepBatch(batch, config_, options_.num_blocks, options_.block_tokens));
  TANDEM_RETURN_IF_ERROR(CheckCapacity(batch));
  TANDEM_RETURN_IF_ERROR(CheckScales(batch));
  ++num_steps_;
  TANDEM_RETURN_IF_ERROR(staging().copied->Wait());  // of the step before the last
  StepShape shape;
  shape.num_rows = static_cast<std::int64_t>(batch.token_ids.size());
  shape.num_sequences = static_cast<std::int64_t>(batch.context_lens.size());
  shape.num_logits = static_cast<std::int64_t>(batch.logit_rows.size());
  shape.is_every_row_wanted = shape.num_logits == shape.num_rows;
  for (std::int64_t i = 0; i < shape.num_logits && shape.is_every_row_wanted; ++i) {
    shape.is_every_row_wanted = batch.logit_rows[static_cast<std::size_t>(i)] == i;
  }
  TANDEM_RETURN_IF_ERROR(FindRuns(batch, &shape));
  const std::optional<std::int64_t> bucket = GraphBucket(batch, shape);
  if (bucket.has_value()) {
    shape.num_rows = shape.num_sequences = shape.num_logits = *bucket;
    shape.runs.front().end = *bucket;
  }
  Pack(batch, shape);
  const StepPlaces& step = places_.step;
  const std::size_t used = static_cast<std::size_t>(step.page_indices + Staged(step.page_indptr)[shape.num_sequences]);
  TANDEM_RETURN_IF_ERROR(
      CudaToStatus(cudaMemcpyAsync(at(places_.step_indices), staging().indices->bytes().data(), used * sizeof(std::int32_t),
                                   cudaMemcpyHostToDevice, static_cast<cudaStream_t>(stream())),
                   "copying a step's indices"));
  TANDEM_RETURN_IF_ERROR(PlanPagedAttention({.shape = AttentionShape(config_, options_.block_tokens),
                                             .query_indptr = Staged(step.query_indptr),
                                             .page_indptr = Staged(step.page_indptr),
                                             .num_sequences = shape.num_sequences,
                                             .num_rows = shape.num_rows,
                                             .is_fixed_shape = bucket.has_value()},
                                            scratch(), &shape.plan, stream()));
  TANDEM_RETURN_IF_ERROR(staging().copied->Record(stream()));
  if (bucket.has_value() && !options_.on_part) {
    const StepGraphKey key = {.num_rows = *bucket,
                              .adapter = shape.runs.front().adapter == nullptr ? 0 : shape.runs.front().adapter->graph_id,
                              .plan = shape.plan.values};
    TANDEM_RETURN_IF_ERROR(graphs_.Run(key, [&] { return Enqueue(shape); }));
  } else {
    TANDEM_RETURN_IF_ERROR(Enqueue(shape));
    if (is_measuring()) TANDEM_RETURN_IF_ERROR(FreezeScales());
  }
  return Logits{.data = reinterpret_cast<const float*>(at(places_.logits)),
                .num_rows = static_cast<std::int64_t>(batch.logit_rows.size()),
                .vocab_size = config_.vocab_size,
                .device = Device::kCuda,
                .stream = stream()};
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
  TANDEM_RETURN_IF_ERROR(PagedAttention({.shape = AttentionShape(config_, options_.block_tokens),
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

absl::Status CheckOptions(const ModelConfig& config, const WeightLayout& layout, const DecoderModelOptions& options) {
  const auto fault = [&](const auto&... parts) {
    return absl::InvalidArgumentError(absl::StrCat("model '", config.name, "' on the GPU: ", parts...));
  };
  if (layout.format == StorageFormat::kFp32 || layout.format != options.weight_format) {
    return fault("weights are ", StorageFormatName(layout.format), ", the workspace is for ",
                 StorageFormatName(options.weight_format), "; bf16, fp8, fp8_block and nf4 are supported");
  }
  if (options.kv_dtype == DType::kFp32) return fault("the KV cache is bf16 or fp8");
  if (config.head_dim != 64 && config.head_dim != 128 && config.head_dim != 256) {
    return fault("head_dim ", config.head_dim, "; 64, 128 and 256 are supported");
  }
  if (options.max_batch_tokens < 1 || options.max_sequences < 1 || options.max_logit_rows < 1 || options.max_adapters < 0 ||
      options.max_adapter_rank < 0) {
    return fault("max_batch_tokens ", options.max_batch_tokens, ", max_sequences ", options.max_sequences, ", max_logit_rows ",
                 options.max_logit_rows, ", max_adapters ", options.max_adapters, ", max_adapter_rank ",
                 options.max_adapter_rank);
  }
  if (std::int64_t{options.num_blocks} * options.block_tokens > INT32_MAX) {
    return fault(options.num_blocks, " blocks of ", options.block_tokens, " tokens; slots are counted in 31 bits");
  }
  const std::uint64_t needed = WorkspacePlaces(config, options).total_bytes;
  if (options.workspace.size() < needed || reinterpret_cast<std::uintptr_t>(options.workspace.data()) % kAlignment != 0) {
    return fault("a workspace of ", options.workspace.size(), " bytes; ", needed, " on a ", kAlignment,
                 "-byte boundary are needed");
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<WorkspacePart> CudaDecoderWorkspaceParts(const ModelConfig& config, const DecoderModelOptions& options) {
  const WorkspacePlaces places(config, options);
  return {{"rollout_kv_scales", places.hidden - places.kv_scales},
          {"rollout_activations", places.logits - places.hidden},
          {"rollout_logits", places.cosines - places.logits},
          {"rollout_step_arrays", places.attention_partials - places.cosines},
          {"rollout_attention", places.gemm - places.attention_partials},
          {"rollout_gemm_workspace", places.dense - places.gemm},
          {"rollout_dense_weight", places.adapters - places.dense},
          {"rollout_adapters", places.total_bytes - places.adapters}};
}

absl::StatusOr<std::unique_ptr<DecoderModel>> CreateCudaDecoderModel(const ModelConfig& config, const WeightLayout& layout,
                                                                     const std::byte* weights, std::span<std::byte> kv_cache,
                                                                     const DecoderModelOptions& options) {
  TANDEM_RETURN_IF_ERROR(CheckOptions(config, layout, options));
  const WorkspacePlaces places(config, options);
  TANDEM_ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, Stream::Create(Device::kCuda));
  TANDEM_ASSIGN_OR_RETURN(std::unique_ptr<Gemm> gemm,
                          Gemm::Create(Device::kCuda, {options.workspace.data() + places.gemm, kGemmWorkspaceBytes}));
  std::array<StepStaging, 2> staging;
  for (StepStaging& one : staging) {
    TANDEM_ASSIGN_OR_RETURN(one, StepStaging::Create(static_cast<std::uint64_t>(places.step.size) * sizeof(std::int32_t),
                                                     places.attention_index_bytes));
  }
  auto model = std::make_unique<CudaDecoderModel>(config, layout, weights, kv_cache, options, std::move(stream), std::move(gemm),
                                                  std::move(staging));
  TANDEM_RETURN_IF_ERROR(model->Prepare());
  return model;
}

}  // namespace tandem

// The forward pass on the CPU, in fp32.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>

#include "common/torch/buffer.h"
#include "common/torch/matrix.h"
#include "common/torch/parallel.h"
#include "common/torch/rope_table.h"
#include "common/torch/run_torch.h"
#include "common/torch/vector_ops.h"
#include "rollout_server/model/decoder_backends.h"
#include "rollout_server/model/paged_kv_cache.h"

namespace tandem {

void PagedKvCache::Write(std::int64_t layer, std::int64_t slot, const float* key_row, const float* value_row) const {
  const std::int64_t block = slot / block_tokens_, offset = slot % block_tokens_;
  float* key = keys(layer, block, 0) + offset;
  for (std::int64_t i = 0; i < num_kv_heads_ * head_dim_; ++i) key[i * block_tokens_] = key_row[i];
  float* value = values(layer, block, 0) + offset * head_dim_;
  for (std::int64_t head = 0; head < num_kv_heads_; ++head) {
    std::memcpy(value + head * head_dim_ * block_tokens_, value_row + head * head_dim_,
                static_cast<std::size_t>(head_dim_) * sizeof(float));
  }
}

namespace {

constexpr std::int64_t kRowGrain = 16;  // rows of a norm or an activation that one thread takes at least
constexpr std::int64_t kPassKeys = kAttentionTileKeys;

// Rows [begin, end) of the step's tokens that run under one adapter.
struct AdapterRun {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  const AdapterView* adapter = nullptr;
};

// Part of one sequence's attention that one thread computes: one KV head, up to kAttentionTileRows query rows x heads.
struct AttentionItem {
  std::int32_t sequence = 0;
  std::int32_t kv_head = 0;
  std::int32_t query_begin = 0;  // token rows
  std::int32_t query_end = 0;
};

class CpuDecoderModel : public DecoderModel {
 public:
  CpuDecoderModel(const ModelConfig& config, const WeightLayout& layout, const std::byte* weights, std::span<std::byte> kv_cache,
                  const DecoderModelOptions& options)
      : config_(config),
        layout_(layout),
        weights_(weights),
        cache_(config, kv_cache.data(), options.num_blocks, options.block_tokens),
        ops_(vector_ops<float>()),
        rope_(config) {}

  absl::StatusOr<Logits> Run(const StepBatch& batch) override {
    TANDEM_RETURN_IF_ERROR(CheckStepBatch(batch, config_, cache_.num_blocks(), cache_.block_tokens()));
    const std::string what = absl::StrCat("decoder step of ", batch.token_ids.size(), " tokens");
    TANDEM_RETURN_IF_ERROR(RunTorch(what, [&] {
      RunStep(batch);
      return absl::OkStatus();
    }));
    return Logits{
        .data = logits_.data(), .num_rows = static_cast<std::int64_t>(batch.logit_rows.size()), .vocab_size = config_.vocab_size};
  }

  absl::Status CopyBlock(std::int32_t from, std::int32_t to) override {
    TANDEM_RETURN_IF_ERROR(CheckBlockCopy(from, to, cache_.num_blocks()));
    if (from == to) return absl::OkStatus();
    const std::size_t bytes = static_cast<std::size_t>(cache_.block_size()) * sizeof(float);
    for (int layer = 0; layer < config_.num_layers; ++layer) {
      std::memcpy(cache_.keys(layer, to, 0), cache_.keys(layer, from, 0), bytes);
      std::memcpy(cache_.values(layer, to, 0), cache_.values(layer, from, 0), bytes);
    }
    return absl::OkStatus();
  }

  absl::Status Fence() override { return absl::OkStatus(); }

 private:
  const float* Weight(const TensorPlace& place) const { return reinterpret_cast<const float*>(weights_ + place.begin_bytes); }
  Matrix<const float> WeightMatrix(const TensorPlace& place) const { return {Weight(place), place.shape[0], place.shape[1]}; }

  void RunStep(const StepBatch& batch);
  void PlanStep(const StepBatch& batch);
  void RunLayer(const StepBatch& batch, int layer);
  // Bias and norms of q and k where the family has them, rotary embedding, K and V into the cache.
  void FinishQkv(const StepBatch& batch, int layer);
  void Attend(const StepBatch& batch, int layer);
  void AttendItem(const StepBatch& batch, int layer, const AttentionItem& item);
  // y = x W^T, then each run's adapters on the linear layers `kinds`, which lie side by side in y's columns.
  void Linear(Matrix<const float> x, const TensorPlace& weight, int layer, std::span<const LinearKind> kinds, Matrix<float> y,
              double beta = 0);
  void ApplyAdapter(Matrix<const float> x, const AdapterView& adapter, int layer, std::span<const LinearKind> kinds,
                    Matrix<float> y);
  void Norm(const float* x, const TensorPlace& weight, float* y, std::int64_t rows);
  void NormHeads(float* heads, const TensorPlace& weight, std::int64_t num_heads) const {
    ops_.rms_norm(heads, Weight(weight), heads, num_heads, config_.head_dim, config_.rms_norm_epsilon);
  }

  const ModelConfig config_;
  const WeightLayout layout_;
  const std::byte* const weights_;
  const PagedKvCache cache_;
  const VectorOps<float>& ops_;
  RopeTable<float> rope_;

  // The plan of the current step.
  std::vector<AdapterRun> runs_;
  std::vector<AttentionItem> items_;
  // Activations of the current step, [num_tokens, width] each; they grow to the largest step.
  std::int64_t num_tokens_ = 0;
  Buffer<float> hidden_, normed_, qkv_, attention_, gate_up_, activated_, adapter_a_, adapter_x_, logits_;
};

// Splits the step into runs of rows under one adapter and into attention items. Depends on the batch's shape alone.
void CpuDecoderModel::PlanStep(const StepBatch& batch) {
  runs_.clear();
  items_.clear();
  const std::int32_t group = config_.num_heads / config_.num_kv_heads;
  const std::int32_t tile_queries = kAttentionTileRows / group;
  for (std::size_t s = 0; s < batch.context_lens.size(); ++s) {
    const std::int32_t begin = batch.cu_query_lens[s], end = batch.cu_query_lens[s + 1];
    const AdapterView* adapter =
        batch.adapter_of[s] < 0 ? nullptr : &batch.adapters[static_cast<std::size_t>(batch.adapter_of[s])];
    if (!runs_.empty() && runs_.back().adapter == adapter) {
      runs_.back().end = end;
    } else {
      runs_.push_back({begin, end, adapter});
    }
    for (std::int32_t q = begin; q < end; q += tile_queries) {
      for (std::int32_t kv_head = 0; kv_head < config_.num_kv_heads; ++kv_head) {
        items_.push_back({static_cast<std::int32_t>(s), kv_head, q, std::min(q + tile_queries, end)});
      }
    }
  }
}

void CpuDecoderModel::RunStep(const StepBatch& batch) {
  num_tokens_ = static_cast<std::int64_t>(batch.token_ids.size());
  PlanStep(batch);
  const std::int64_t d = config_.hidden_size, f = config_.intermediate_size;
  hidden_.Reserve(num_tokens_ * d);
  normed_.Reserve(num_tokens_ * d);
  qkv_.Reserve(num_tokens_ * (config_.q_size() + 2 * config_.kv_size()));
  attention_.Reserve(num_tokens_ * config_.q_size());
  gate_up_.Reserve(num_tokens_ * 2 * f);
  activated_.Reserve(num_tokens_ * f);
  rope_.Ensure(*std::max_element(batch.positions.begin(), batch.positions.end()) + 1);

  const float* embedding = Weight(layout_.embedding);
  for (std::int64_t i = 0; i < num_tokens_; ++i) {
    std::memcpy(hidden_.data() + i * d, embedding + TokenOf(batch, static_cast<std::size_t>(i)) * d,
                static_cast<std::size_t>(d) * sizeof(float));
  }
  for (int layer = 0; layer < config_.num_layers; ++layer) RunLayer(batch, layer);

  const std::int64_t num_logits = static_cast<std::int64_t>(batch.logit_rows.size());
  logits_.Reserve(num_logits * config_.vocab_size);
  float* head_input = normed_.data();
  for (std::int64_t i = 0; i < num_logits; ++i) {
    ops_.rms_norm(hidden_.data() + batch.logit_rows[static_cast<std::size_t>(i)] * d, Weight(layout_.final_norm),
                  head_input + i * d, 1, d, config_.rms_norm_epsilon);
  }
  Multiply(Matrix<float>(head_input, num_logits, d), WeightMatrix(layout_.head).Transposed(),
           Matrix<float>(logits_.data(), num_logits, config_.vocab_size));
}

void CpuDecoderModel::RunLayer(const StepBatch& batch, int layer) {
  const LayerPlaces& places = layout_.layers[static_cast<std::size_t>(layer)];
  const std::int64_t rows = num_tokens_, d = config_.hidden_size, f = config_.intermediate_size, q = config_.q_size();
  const Matrix<float> hidden(hidden_.data(), rows, d), normed(normed_.data(), rows, d);
  const Matrix<float> qkv(qkv_.data(), rows, q + 2 * config_.kv_size()), attention(attention_.data(), rows, q);
  const Matrix<float> gate_up(gate_up_.data(), rows, 2 * f), activated(activated_.data(), rows, f);
  static constexpr std::array kQkv = {LinearKind::kQProj, LinearKind::kKProj, LinearKind::kVProj};
  static constexpr std::array kO = {LinearKind::kOProj}, kDown = {LinearKind::kDownProj};
  static constexpr std::array kGateUp = {LinearKind::kGateProj, LinearKind::kUpProj};

  Norm(hidden.data, places.input_norm, normed.data, rows);
  Linear(normed, places.qkv, layer, kQkv, qkv);
  FinishQkv(batch, layer);
  Attend(batch, layer);
  Linear(attention, places.o, layer, kO, hidden, /*beta=*/1);
  Norm(hidden.data, places.post_norm, normed.data, rows);
  Linear(normed, places.gate_up, layer, kGateUp, gate_up);
  ParallelFor(rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    ops_.swiglu(gate_up.data + begin * 2 * f, activated.data + begin * f, end - begin, f);
  });
  Linear(activated, places.down, layer, kDown, hidden, /*beta=*/1);
}

void CpuDecoderModel::Norm(const float* x, const TensorPlace& weight, float* y, std::int64_t rows) {
  const std::int64_t d = config_.hidden_size;
  ParallelFor(rows, 8 * kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    ops_.rms_norm(x + begin * d, Weight(weight), y + begin * d, end - begin, d, config_.rms_norm_epsilon);
  });
}

void CpuDecoderModel::Linear(Matrix<const float> x, const TensorPlace& weight, int layer, std::span<const LinearKind> kinds,
                             Matrix<float> y, double beta) {
  Multiply(x, WeightMatrix(weight).Transposed(), y, 1, beta);
  for (const AdapterRun& run : runs_) {
    if (run.adapter != nullptr) ApplyAdapter(x.Rows(run.begin, run.end), *run.adapter, layer, kinds, y.Rows(run.begin, run.end));
  }
}

// y += scale (x A^T) B^T. The A of all kinds are put together first: one GEMM of their whole rank instead of thin ones.
void CpuDecoderModel::ApplyAdapter(Matrix<const float> x, const AdapterView& adapter, int layer,
                                   std::span<const LinearKind> kinds, Matrix<float> y) {
  struct Part {
    const float* b;
    std::int64_t first_column, outputs;
  };
  const AdapterLayout& layout = *adapter.layout;
  const std::int64_t rank = layout.rank;
  adapter_a_.Reserve(static_cast<std::int64_t>(kinds.size()) * rank * x.columns);
  std::array<Part, kNumLinearKinds> parts;
  std::size_t num_parts = 0;
  std::int64_t column = 0;
  for (const LinearKind kind : kinds) {
    const std::int64_t outputs = ShapeOf(config_, kind).outputs;
    const auto target = std::lower_bound(layout.targets.begin(), layout.targets.end(), kind);
    if (target != layout.targets.end() && *target == kind) {
      const std::size_t index =
          static_cast<std::size_t>(layer) * layout.targets.size() + static_cast<std::size_t>(target - layout.targets.begin());
      const AdapterPlace& place = layout.places[index];
      std::memcpy(adapter_a_.data() + static_cast<std::int64_t>(num_parts) * rank * x.columns, adapter.slot + place.a_begin_bytes,
                  static_cast<std::size_t>(rank * x.columns) * sizeof(float));
      parts[num_parts++] = {reinterpret_cast<const float*>(adapter.slot + place.b_begin_bytes), column, outputs};
    }
    column += outputs;
  }
  if (num_parts == 0) return;
  const std::int64_t width = static_cast<std::int64_t>(num_parts) * rank;
  adapter_x_.Reserve(x.rows * width);
  const Matrix<float> xa(adapter_x_.data(), x.rows, width);
  Multiply(x, Matrix<float>(adapter_a_.data(), width, x.columns).Transposed(), xa);
  for (std::size_t i = 0; i < num_parts; ++i) {
    const std::int64_t begin = static_cast<std::int64_t>(i) * rank;
    Multiply(xa.Columns(begin, begin + rank), Matrix<const float>(parts[i].b, parts[i].outputs, rank).Transposed(),
             y.Columns(parts[i].first_column, parts[i].first_column + parts[i].outputs), static_cast<double>(adapter.scale), 1);
  }
}

void CpuDecoderModel::FinishQkv(const StepBatch& batch, int layer) {
  const LayerPlaces& places = layout_.layers[static_cast<std::size_t>(layer)];
  const std::int64_t q = config_.q_size(), kv = config_.kv_size(), stride = q + 2 * kv;
  const std::int64_t heads = config_.num_heads + config_.num_kv_heads;  // q and k lie side by side
  ParallelFor(num_tokens_, 4 * kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      float* row = qkv_.data() + i * stride;
      if (places.qkv_bias.has_value()) ops_.add_scaled(row, Weight(*places.qkv_bias), stride, 1);
      if (places.q_norm.has_value()) NormHeads(row, *places.q_norm, config_.num_heads);
      if (places.k_norm.has_value()) NormHeads(row + q, *places.k_norm, config_.num_kv_heads);
      const std::int64_t position = batch.positions[static_cast<std::size_t>(i)];
      ops_.rotate(row, heads, config_.head_dim, rope_.cosines(position), rope_.sines(position), 1);
      cache_.Write(layer, batch.slot_mapping[static_cast<std::size_t>(i)], row + q, row + q + kv);
    }
  });
}

void CpuDecoderModel::Attend(const StepBatch& batch, int layer) {
  ParallelFor(static_cast<std::int64_t>(items_.size()), 8, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) AttendItem(batch, layer, items_[static_cast<std::size_t>(i)]);
  });
}

void CpuDecoderModel::AttendItem(const StepBatch& batch, int layer, const AttentionItem& item) {
  const std::size_t sequence = static_cast<std::size_t>(item.sequence);
  const std::int64_t head_dim = config_.head_dim, group = config_.num_heads / config_.num_kv_heads;
  const std::int64_t stride = config_.q_size() + 2 * config_.kv_size(), block_tokens = cache_.block_tokens();
  const std::size_t row_bytes = static_cast<std::size_t>(head_dim) * sizeof(float);

  // Kept by each thread for its life: no allocation a step.
  thread_local std::vector<KvBlock<float>> blocks;
  thread_local std::vector<float> queries, output, scores(kAttentionTileRows * kAttentionTileKeys);
  std::int32_t limits[kAttentionTileRows];
  queries.resize(static_cast<std::size_t>(kAttentionTileRows * head_dim));
  output.resize(queries.size());

  const std::int32_t rows = static_cast<std::int32_t>((item.query_end - item.query_begin) * group);
  const std::int32_t first_limit = batch.context_lens[sequence] - (batch.cu_query_lens[sequence + 1] - item.query_begin) + 1;
  for (std::int32_t r = 0; r < rows; ++r) {
    const std::int64_t token = item.query_begin + r / group, head = item.kv_head * group + r % group;
    std::memcpy(queries.data() + r * head_dim, qkv_.data() + token * stride + head * head_dim, row_bytes);
    limits[r] = first_limit + static_cast<std::int32_t>(r / group);
  }
  ops_.scale(queries.data(), rows * head_dim, static_cast<float>(1 / std::sqrt(static_cast<double>(head_dim))));

  blocks.clear();
  const std::int64_t num_keys = limits[rows - 1];
  for (std::int64_t first = 0; first < num_keys; first += block_tokens) {
    const std::int64_t block = batch.block_tables[sequence][static_cast<std::size_t>(first / block_tokens)];
    const float *keys = cache_.keys(layer, block, item.kv_head), *values = cache_.values(layer, block, item.kv_head);
    const std::int64_t used = std::min(block_tokens, num_keys - first);
    for (std::int64_t begin = 0; begin < used; begin += kPassKeys) {
      KvBlock<float> part;
      part.keys_t = keys + begin;
      part.key_t_stride = block_tokens;
      part.values = values + begin * head_dim;
      part.row_stride = head_dim;
      part.width = static_cast<std::int32_t>(std::min(kPassKeys, block_tokens - begin));
      part.count = static_cast<std::int32_t>(std::min<std::int64_t>(part.width, used - begin));
      blocks.push_back(part);
    }
  }

  AttentionTile<float> tile;
  tile.queries = queries.data();
  tile.limits = limits;
  tile.rows = rows;
  tile.head_dim = static_cast<std::int32_t>(head_dim);
  tile.blocks = blocks.data();
  tile.num_blocks = static_cast<std::int32_t>(blocks.size());
  tile.scores = scores.data();
  tile.output = output.data();
  ops_.attention_forward(tile);
  for (std::int32_t r = 0; r < rows; ++r) {
    const std::int64_t token = item.query_begin + r / group, head = item.kv_head * group + r % group;
    std::memcpy(attention_.data() + token * config_.q_size() + head * head_dim, output.data() + r * head_dim, row_bytes);
  }
}

absl::Status CheckModel(const ModelConfig& config, const WeightLayout& layout, const DecoderModelOptions& options) {
  const auto fault = [&](const auto&... parts) {
    return absl::InvalidArgumentError(absl::StrCat("model '", config.name, "': ", parts...));
  };
  if (layout.format != StorageFormat::kFp32) return fault("the CPU computes with fp32 weights only");
  if (config.num_heads / config.num_kv_heads > kAttentionTileRows) {
    return fault(config.num_heads, " heads over ", config.num_kv_heads, " KV heads; the quotient is at most ",
                 kAttentionTileRows);
  }
  if (options.kv_dtype != DType::kFp32) return fault("the KV cache of the CPU is fp32");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<DecoderModel>> CreateCpuDecoderModel(const ModelConfig& config, const WeightLayout& layout,
                                                                    const std::byte* weights, std::span<std::byte> kv_cache,
                                                                    const DecoderModelOptions& options) {
  TANDEM_RETURN_IF_ERROR(CheckModel(config, layout, options));
  return std::make_unique<CpuDecoderModel>(config, layout, weights, kv_cache, options);
}

}  // namespace tandem

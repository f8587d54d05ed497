#include "trainer_server/policy/cudnn_attention.h"

#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>
#include <cudnn_frontend.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <map>
#include <unordered_map>
#include <vector>

#include "common/torch/check_status.h"
#include "kernels/packed_attention/attention_parts.h"
#include "trainer_server/policy/device_arrays.h"

// Found beside LibTorch, which has loaded it already; null where it is absent.
void* cudnn_frontend::cudnn_dlhandle = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL);

namespace tandem {
namespace {

namespace fe = cudnn_frontend;
using Graph = fe::graph::Graph;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

std::int64_t PowerOfTwo(std::int64_t least) {
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(least)));
}

// The most key-value heads at a time within the limit that divide their number.
std::int64_t HeadsAtOnce(std::int64_t num_kv_heads, std::int64_t bytes_of_head, std::int64_t limit_bytes) {
  std::int64_t heads = num_kv_heads;
  while (heads > 1 && (num_kv_heads % heads != 0 || heads * bytes_of_head > limit_bytes)) --heads;
  return heads;
}

enum Uid : std::int64_t {
  kQuery = 1,
  kKey,
  kValue,
  kOutput,
  kLse,
  kGradOutput,
  kGradQuery,
  kGradKey,
  kGradValue,
  kQueryLengths,
  kKeyLengths,
  kQueryOffsets,
  kKeyOffsets,
  kOutputOffsets,
  kLseOffsets,
  kGradKeyOffsets,
};
using Pointers = std::unordered_map<std::int64_t, void*>;

void* Mutable(const void* pointer) { return const_cast<void*>(pointer); }
const std::uint16_t* At(const void* elements, std::int64_t offset) {
  return static_cast<const std::uint16_t*>(elements) + offset;
}
std::uint16_t* At(void* elements, std::int64_t offset) { return static_cast<std::uint16_t*>(elements) + offset; }

struct Shape {
  bool is_backward = false, is_causal = false;
  std::int64_t kv_heads = 0, batch = 0, longest_query = 0, longest_key = 0;
  std::int64_t total_queries = 0, total_keys = 0;  // 0 in the forward pass, whose graph does not depend on them
  bool operator<(const Shape& other) const { return Tie() < other.Tie(); }
  std::array<std::int64_t, 8> Tie() const {
    return {is_backward, is_causal, kv_heads, batch, longest_query, longest_key, total_queries, total_keys};
  }
};

// Tensors of one graph. A bf16 tensor of heads is [batch, heads, length, head_dim]; where sequence n of it begins is in
// `offsets`.
class GraphBuilder {
 public:
  GraphBuilder(const ModelConfig& config, const Shape& shape)
      : config_(config), shape_(shape), graph_(std::make_shared<Graph>()) {
    graph_->set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
  }

  std::shared_ptr<Graph> Build() {
    const std::int64_t d = config_.head_dim, group = config_.num_heads / config_.num_kv_heads, heads = shape_.kv_heads;
    const std::int64_t width = config_.q_size() + 2 * config_.kv_size();
    const Tensor query_lengths = Index("query_lengths", kQueryLengths, fe::DataType_t::INT32, shape_.batch),
                 key_lengths = Index("key_lengths", kKeyLengths, fe::DataType_t::INT32, shape_.batch);
    const Tensor query_offsets = Offsets("query_offsets", kQueryOffsets), key_offsets = Offsets("key_offsets", kKeyOffsets),
                 output_offsets = Offsets("output_offsets", kOutputOffsets), lse_offsets = Offsets("lse_offsets", kLseOffsets);
    const Tensor key = Heads("key", kKey, shape_.longest_key, {heads, d, width}, key_offsets),
                 value = Heads("value", kValue, shape_.longest_key, {heads, d, width}, key_offsets);
    const auto configure = [&](auto options) {
      options.set_name("attention")
          .set_attn_scale(static_cast<float>(1 / std::sqrt(static_cast<double>(d))))
          .set_padding_mask(true)
          .set_seq_len_q(query_lengths)
          .set_seq_len_kv(key_lengths);
      if (shape_.is_causal) {
        options.set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT).set_diagonal_band_right_bound(0);
      }
      return options;
    };
    if (!shape_.is_backward) {
      const std::int64_t query_heads = heads * group;
      const Tensor query = Heads("query", kQuery, shape_.longest_query, {query_heads, d, width}, query_offsets);
      auto options = configure(fe::graph::SDPA_attributes());
      options.set_generate_stats(true).set_implementation(fe::AttentionImplementation_t::COMPOSITE);
      const auto outputs = graph_->sdpa(query, key, value, options);
      Describe(outputs[0], kOutput, shape_.longest_query, {query_heads, d, query_heads * d}, output_offsets);
      outputs[0]->set_output(true);
      DescribeLse(outputs[1], query_heads, lse_offsets);
      outputs[1]->set_output(true);
      return graph_;
    }
    // Every group-th query head: as many as key-value heads. The queries' layout is their gradient's: cuDNN (9.19) adds up the
    // one by the strides and offsets of the other.
    const std::int64_t output_width = config_.q_size();
    const Layout compact{heads, d, heads * d};
    const Tensor query = Heads("query", kQuery, shape_.longest_query, compact, query_offsets);
    const Tensor output = Heads("output", kOutput, shape_.longest_query, {heads, group * d, output_width}, output_offsets);
    const Tensor grad_output =
        Heads("grad_output", kGradOutput, shape_.longest_query, {heads, group * d, output_width}, output_offsets);
    const Tensor lse = graph_->tensor(fe::graph::Tensor_attributes().set_name("lse"));
    DescribeLse(lse, heads, lse_offsets);
    auto options = configure(fe::graph::SDPA_backward_attributes());
    options.set_max_total_seq_len_q(shape_.total_queries).set_max_total_seq_len_kv(shape_.total_keys);
    const auto gradients = graph_->sdpa_backward(query, key, value, output, grad_output, lse, options);
    const Tensor grad_key_offsets = Offsets("grad_key_offsets", kGradKeyOffsets);
    Describe(gradients[0], kGradQuery, shape_.longest_query, compact, query_offsets);
    Describe(gradients[1], kGradKey, shape_.longest_key, compact, grad_key_offsets);
    Describe(gradients[2], kGradValue, shape_.longest_key, compact, grad_key_offsets);
    for (const Tensor& gradient : gradients) gradient->set_output(true);
    return graph_;
  }

 private:
  struct Layout {
    std::int64_t heads, head_stride, row_stride;
  };

  Tensor Index(const char* name, Uid uid, fe::DataType_t type, std::int64_t count) {
    return graph_->tensor(fe::graph::Tensor_attributes()
                              .set_name(name)
                              .set_uid(uid)
                              .set_data_type(type)
                              .set_dim({count, 1, 1, 1})
                              .set_stride({1, 1, 1, 1}));
  }
  Tensor Offsets(const char* name, Uid uid) { return Index(name, uid, fe::DataType_t::INT64, shape_.batch + 1); }
  Tensor Heads(const char* name, Uid uid, std::int64_t length, const Layout& layout, const Tensor& offsets) {
    const Tensor tensor = graph_->tensor(fe::graph::Tensor_attributes().set_name(name));
    Describe(tensor, uid, length, layout, offsets);
    return tensor;
  }
  void Describe(const Tensor& tensor, Uid uid, std::int64_t length, const Layout& layout, const Tensor& offsets) {
    tensor->set_uid(uid)
        .set_dim({shape_.batch, layout.heads, length, config_.head_dim})
        .set_stride({length * layout.row_stride, layout.head_stride, layout.row_stride, 1})
        .set_ragged_offset(offsets);
  }
  void DescribeLse(const Tensor& tensor, std::int64_t heads, const Tensor& offsets) {
    tensor->set_uid(kLse)
        .set_data_type(fe::DataType_t::FLOAT)
        .set_dim({shape_.batch, heads, shape_.longest_query, 1})
        .set_stride({heads * shape_.longest_query, 1, heads, 1})
        .set_ragged_offset(offsets);
  }

  const ModelConfig& config_;
  const Shape& shape_;
  std::shared_ptr<Graph> graph_;
};

}  // namespace

struct CudnnGraphs::State {
  struct Entry {
    std::shared_ptr<Graph> graph;
    std::int64_t workspace_bytes = 0;
    std::int64_t last_use = 0;
  };

  ModelConfig config;
  cudnnHandle_t handle = nullptr;
  std::map<Shape, Entry> graphs;
  std::int64_t num_uses = 0;

  const Entry& Find(const Shape& shape) {
    auto place = graphs.find(shape);
    if (place == graphs.end()) {
      if (graphs.size() == kMostKept) {
        graphs.erase(std::min_element(graphs.begin(), graphs.end(),
                                      [](const auto& a, const auto& b) { return a.second.last_use < b.second.last_use; }));
      }
      Entry entry;
      entry.graph = GraphBuilder(config, shape).Build();
      CheckGraph(entry.graph->build(handle, {fe::HeurMode_t::A}), shape, "building");
      CheckGraph(entry.graph->get_workspace_size(entry.workspace_bytes), shape, "sizing");
      place = graphs.emplace(shape, std::move(entry)).first;
    }
    place->second.last_use = ++num_uses;
    return place->second;
  }
  void Run(const Shape& shape, Pointers pointers, void* stream) {
    const Entry& entry = Find(shape);
    const Buffer<std::byte, Device::kCuda> workspace(entry.workspace_bytes);
    TORCH_CHECK(fe::detail::set_stream(handle, static_cast<cudaStream_t>(stream)) == CUDNN_STATUS_SUCCESS,
                "cuDNN takes no stream");
    CheckGraph(entry.graph->execute(handle, pointers, workspace.data()), shape, "running");
  }
  void CheckGraph(fe::error_t error, const Shape& shape, const char* what) const {
    TORCH_CHECK(error.is_good(), what, " cuDNN's attention: ", shape.is_backward ? "backward" : "forward",
                shape.is_causal ? ", causal" : "", ", heads of ", config.head_dim, ", ", shape.kv_heads, " of ",
                config.num_kv_heads, " key-value heads, ", shape.batch, " sequences of at most ", shape.longest_query, " x ",
                shape.longest_key, ": ", error.get_message());
  }
};

CudnnGraphs::CudnnGraphs(const ModelConfig& config) : state_(std::make_unique<State>()) {
  state_->config = config;
  TORCH_CHECK(fe::detail::create_handle(&state_->handle) == CUDNN_STATUS_SUCCESS, "cuDNN gives no handle");
}

CudnnGraphs::~CudnnGraphs() {
  state_->graphs.clear();
  fe::detail::destroy_handle(state_->handle);
}

std::size_t CudnnGraphs::num_kept() const { return state_->graphs.size(); }

bool CudnnAttention::Serves(const ModelConfig& config) {
  int major = 0;
  const bool is_known = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess;
  if (cudnn_frontend::cudnn_dlhandle == nullptr || !is_known) return false;
  const int head_dim = config.head_dim;
  return ((major == 9 || major == 10) && (head_dim == 64 || head_dim == 128)) || (major == 9 && head_dim == 256);
}

// Rows of a call's sequences.
struct CudnnAttention::Sequences {
  std::vector<std::int64_t> query_begins, query_lengths, key_begins, key_lengths;
  std::vector<std::int64_t> part_query_begins, part_key_begins;  // in arrays of the call's own rows
};

CudnnAttention::CudnnAttention(const ModelConfig& config, const AttentionRows& rows, std::int64_t scratch_limit_bytes,
                               CudnnGraphs* graphs, void* stream)
    : num_heads_(config.num_heads),
      num_kv_heads_(config.num_kv_heads),
      group_(config.num_heads / config.num_kv_heads),
      head_dim_(config.head_dim),
      num_rows_(rows.num_rows),
      num_own_(rows.num_own()),
      graphs_(graphs),
      stream_(stream) {
  DeviceArrays<std::int64_t> offsets;
  DeviceArrays<std::int32_t> indices;
  const std::int64_t width = config.q_size() + 2 * config.kv_size();
  // Sequences beyond the call's are empty and begin at its end.
  const auto add_offsets = [&](const std::int64_t** place, const std::vector<std::int64_t>& begins, std::int64_t end,
                               std::int64_t row_stride, std::int64_t batch) {
    std::vector<std::int64_t> array(static_cast<std::size_t>(batch) + 1, end * row_stride);
    for (std::size_t n = 0; n < begins.size(); ++n) array[n] = begins[n] * row_stride;
    offsets.Add(place, array);
  };
  const auto add_lengths = [&](const std::int32_t** place, const std::vector<std::int64_t>& lengths, std::int64_t batch) {
    std::vector<std::int32_t> array(lengths.begin(), lengths.end());
    array.resize(static_cast<std::size_t>(batch), 0);
    indices.Add(place, array);
  };
  const auto fill = [&](Call* call, const Sequences& sequences) {
    for (const std::int64_t length : sequences.query_lengths) {
      call->num_queries += length;
      call->longest_query = std::max(call->longest_query, length);
    }
    for (const std::int64_t length : sequences.key_lengths) {
      call->num_keys += length;
      call->longest_key = std::max(call->longest_key, length);
    }
    call->backward_heads =
        HeadsAtOnce(num_kv_heads_, CudnnBackwardBytes(config, call->num_queries, call->num_keys), scratch_limit_bytes);
    call->batch = PowerOfTwo(static_cast<std::int64_t>(sequences.query_lengths.size()));
    call->longest_query = AttentionRowsBucket(call->longest_query);
    call->longest_key = AttentionRowsBucket(call->longest_key);
    call->total_queries = AttentionRowsBucket(call->num_queries);
    call->total_keys = PowerOfTwo(AttentionRowsBucket(call->num_keys));  // sizes nothing: as few graphs as can be
    add_lengths(&call->query_lengths, sequences.query_lengths, call->batch);
    add_lengths(&call->key_lengths, sequences.key_lengths, call->batch);
    const std::int64_t forward_heads = call->forward_heads * group_, backward_width = call->backward_heads * head_dim_;
    add_offsets(&call->query_offsets, sequences.query_begins, num_own_, width, call->batch);
    add_offsets(&call->key_offsets, sequences.key_begins, num_own_, width, call->batch);
    add_offsets(&call->output_offsets, sequences.query_begins, num_own_, config.q_size(), call->batch);
    add_offsets(&call->part_offsets, sequences.part_query_begins, call->num_queries, forward_heads * head_dim_, call->batch);
    add_offsets(&call->part_lse_offsets, sequences.part_query_begins, call->num_queries, forward_heads, call->batch);
    add_offsets(&call->part_query_offsets, sequences.part_query_begins, call->num_queries, backward_width, call->batch);
    add_offsets(&call->part_key_offsets, sequences.part_key_begins, call->num_keys, backward_width, call->batch);
    add_offsets(&call->lse_offsets, sequences.part_query_begins, call->num_queries, call->backward_heads, call->batch);
  };

  Sequences own;
  for (std::size_t n = 0; n + 1 < rows.own_begins.size(); ++n) {
    own.query_begins.push_back(rows.own_begins[n]);
    own.query_lengths.push_back(rows.own_begins[n + 1] - rows.own_begins[n]);
  }
  own.key_begins = own.part_query_begins = own.part_key_begins = own.query_begins;
  own.key_lengths = own.query_lengths;
  own_.is_causal = true;
  own_.forward_heads = num_kv_heads_;
  fill(&own_, own);
  if (rows.num_queries() > 0) {
    Sequences prompts;
    for (std::size_t n = 0; n + 1 < rows.query_begins.size(); ++n) {
      const std::int32_t query_begin = rows.query_begins[n], key_begin = rows.key_begins[n];
      prompts.query_begins.push_back(rows.query_rows[static_cast<std::size_t>(query_begin)]);
      prompts.query_lengths.push_back(rows.query_begins[n + 1] - query_begin);
      prompts.key_begins.push_back(rows.key_rows[static_cast<std::size_t>(key_begin)]);
      prompts.key_lengths.push_back(rows.key_begins[n + 1] - key_begin);
      prompts.part_query_begins.push_back(query_begin);
      prompts.part_key_begins.push_back(key_begin);
    }
    prompt_.forward_heads = HeadsAtOnce(num_kv_heads_, CudnnForwardBytes(config, rows.num_queries()), scratch_limit_bytes);
    fill(&prompt_, prompts);
    indices.Add(&prompt_.query_rows, rows.query_rows);
    indices.Add(&prompt_.key_rows, rows.key_rows);
  }
  offsets_ = offsets.Upload(stream);
  indices_ = indices.Upload(stream);
}

void CudnnAttention::RunForward(const Call& call, const void* qkv, std::int64_t first_head, void* output, float* lse) const {
  const std::int64_t q = num_heads_ * head_dim_, kv = num_kv_heads_ * head_dim_, first_column = first_head * head_dim_;
  graphs_->state_->Run({.is_causal = call.is_causal,
                        .kv_heads = call.forward_heads,
                        .batch = call.batch,
                        .longest_query = call.longest_query,
                        .longest_key = call.longest_key},
                       {{kQuery, Mutable(At(qkv, first_column * group_))},
                        {kKey, Mutable(At(qkv, q + first_column))},
                        {kValue, Mutable(At(qkv, q + kv + first_column))},
                        {kOutput, output},
                        {kLse, lse},
                        {kQueryLengths, Mutable(call.query_lengths)},
                        {kKeyLengths, Mutable(call.key_lengths)},
                        {kQueryOffsets, Mutable(call.query_offsets)},
                        {kKeyOffsets, Mutable(call.key_offsets)},
                        {kOutputOffsets, Mutable(call.part_offsets)},
                        {kLseOffsets, Mutable(call.part_lse_offsets)}},
                       stream_);
}

void CudnnAttention::Forward(const void* qkv, void* output, float* lse) const {
  const std::int64_t q = num_heads_ * head_dim_;
  CheckStatus(ZeroRows({.output = output, .row_stride = q, .begin = num_own_, .end = num_rows_}, stream_));
  RunForward(own_, qkv, 0, output, lse);
  if (prompt_.num_queries == 0) return;
  const std::int64_t heads = prompt_.forward_heads * group_;
  const DeviceBuffer<std::uint16_t> part(prompt_.num_queries * heads * head_dim_);
  const DeviceBuffer<float> part_lse(prompt_.num_queries * heads);
  for (std::int64_t first = 0; first < num_kv_heads_; first += prompt_.forward_heads) {
    RunForward(prompt_, qkv, first, part.data(), part_lse.data());
    CheckStatus(MergeAttention({.part = part.data(),
                                .part_lse = {part_lse.data(), heads, 1},
                                .rows = prompt_.query_rows,
                                .output = At(output, first * group_ * head_dim_),
                                .output_row_stride = q,
                                .lse = {lse + first * group_, num_heads_, 1},
                                .num_rows = prompt_.num_queries,
                                .num_heads = heads,
                                .head_dim = head_dim_},
                               stream_));
  }
}

void CudnnAttention::RunBackward(const Call& call, const void* qkv, const void* output, const float* lse, const void* grad_output,
                                 void* grad_qkv, bool is_added) const {
  const std::int64_t q = num_heads_ * head_dim_, kv = num_kv_heads_ * head_dim_, heads = call.backward_heads;
  const DeviceBuffer<float> part_lse(call.num_queries * heads);
  const DeviceBuffer<std::uint16_t> query(call.num_queries * heads * head_dim_), grad_query(call.num_queries * heads * head_dim_),
      grad_key(call.num_keys * heads * head_dim_), grad_value(call.num_keys * heads * head_dim_);
  const Shape shape{.is_backward = true,
                    .is_causal = call.is_causal,
                    .kv_heads = heads,
                    .batch = call.batch,
                    .longest_query = call.longest_query,
                    .longest_key = call.longest_key,
                    .total_queries = call.total_queries,
                    .total_keys = call.total_keys};
  const auto write = [&](const DeviceBuffer<std::uint16_t>& gradient, std::int64_t column, std::int64_t head_stride,
                         const std::int32_t* rows, std::int64_t num_rows, bool adds) {
    CheckStatus(CopyHeads({.input = {gradient.data(), heads * head_dim_, head_dim_},
                           .output = {At(grad_qkv, column), q + 2 * kv, head_stride},
                           .output_rows = rows,
                           .num_rows = num_rows,
                           .num_heads = heads,
                           .head_dim = head_dim_,
                           .is_added = adds},
                          stream_));
  };
  for (std::int64_t first = 0; first < num_kv_heads_; first += heads) {
    for (std::int64_t member = 0; member < group_; ++member) {
      const std::int64_t query_head = first * group_ + member, query_column = query_head * head_dim_;
      const std::int64_t key_column = q + first * head_dim_;
      CheckStatus(GatherLse({.input = {const_cast<float*>(lse) + query_head, num_heads_, group_},
                             .rows = call.query_rows,
                             .output = {part_lse.data(), heads, 1},
                             .num_rows = call.num_queries,
                             .num_heads = heads},
                            stream_));
      CheckStatus(CopyHeads({.input = {Mutable(At(qkv, query_column)), q + 2 * kv, group_ * head_dim_},
                             .input_rows = call.query_rows,
                             .output = {query.data(), heads * head_dim_, head_dim_},
                             .num_rows = call.num_queries,
                             .num_heads = heads,
                             .head_dim = head_dim_},
                            stream_));
      graphs_->state_->Run(shape,
                           {{kQuery, query.data()},
                            {kKey, Mutable(At(qkv, key_column))},
                            {kValue, Mutable(At(qkv, key_column + kv))},
                            {kOutput, Mutable(At(output, query_column))},
                            {kLse, part_lse.data()},
                            {kGradOutput, Mutable(At(grad_output, query_column))},
                            {kGradQuery, grad_query.data()},
                            {kGradKey, grad_key.data()},
                            {kGradValue, grad_value.data()},
                            {kQueryLengths, Mutable(call.query_lengths)},
                            {kKeyLengths, Mutable(call.key_lengths)},
                            {kQueryOffsets, Mutable(call.part_query_offsets)},
                            {kKeyOffsets, Mutable(call.key_offsets)},
                            {kOutputOffsets, Mutable(call.output_offsets)},
                            {kLseOffsets, Mutable(call.lse_offsets)},
                            {kGradKeyOffsets, Mutable(call.part_key_offsets)}},
                           stream_);
      write(grad_query, query_column, group_ * head_dim_, call.query_rows, call.num_queries, is_added);
      write(grad_key, key_column, head_dim_, call.key_rows, call.num_keys, is_added || member > 0);
      write(grad_value, key_column + kv, head_dim_, call.key_rows, call.num_keys, is_added || member > 0);
    }
  }
}

void CudnnAttention::Backward(const void* qkv, const void* output, const float* lse, const void* grad_output,
                              void* grad_qkv) const {
  const std::int64_t width = (num_heads_ + 2 * num_kv_heads_) * head_dim_;
  CheckStatus(ZeroRows({.output = grad_qkv, .row_stride = width, .begin = num_own_, .end = num_rows_}, stream_));
  RunBackward(own_, qkv, output, lse, grad_output, grad_qkv, /*is_added=*/false);
  if (prompt_.num_queries > 0) RunBackward(prompt_, qkv, output, lse, grad_output, grad_qkv, /*is_added=*/true);
}

}  // namespace tandem

#include "trainer_server/policy/packed_attention.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "common/base/units.h"
#include "common/torch/parallel.h"

namespace tandem {
namespace {

constexpr std::int64_t kColumnAlignment = 16;  // columns a block is padded to: a whole number of vectors
constexpr std::int64_t kPassKeys = kAttentionTileKeys;

}  // namespace

// Kept by each thread for its life.
template <typename T>
struct PackedAttention<T>::Scratch {
  std::vector<T> queries, output, grad_output, grad_queries, lse, delta, scores, grad_scores;
  std::vector<KvBlock<T>> blocks;
  std::vector<std::int32_t> limits;

  static Scratch& ForThread(std::int64_t head_dim) {
    thread_local Scratch scratch;
    const std::size_t rows = kAttentionTileRows, tile = rows * static_cast<std::size_t>(head_dim);
    for (std::vector<T>* part : {&scratch.queries, &scratch.output, &scratch.grad_output, &scratch.grad_queries})
      part->resize(tile);
    for (std::vector<T>* part : {&scratch.scores, &scratch.grad_scores}) part->resize(rows * kAttentionTileKeys);
    for (std::vector<T>* part : {&scratch.lse, &scratch.delta}) part->resize(rows);
    scratch.limits.resize(rows);
    return scratch;
  }
};

template <typename T>
PackedAttention<T>::PackedAttention(const ModelConfig& config, const MicroBatch& batch)
    : num_rows_(static_cast<std::int64_t>(batch.token_ids.size())),
      num_heads_(config.num_heads),
      num_kv_heads_(config.num_kv_heads),
      head_dim_(config.head_dim),
      q_size_(config.q_size()),
      kv_size_(config.kv_size()),
      row_width_(q_size_ + 2 * kv_size_),
      ops_(vector_ops<T>()) {
  std::map<std::pair<std::int32_t, std::int32_t>, std::size_t> group_of_prompt;
  for (const PackedCompletion& completion : batch.completions) {
    const auto [place, is_new] = group_of_prompt.try_emplace({completion.prompt_begin, completion.prompt_end}, groups_.size());
    if (is_new) groups_.push_back({PlaceSegment(completion.prompt_begin, completion.prompt_end), {}});
    if (completion.begin < completion.end) {
      groups_[place->second].completions.push_back(PlaceSegment(completion.begin, completion.end));
    }
  }
  const std::int32_t tile_rows = static_cast<std::int32_t>(kAttentionTileRows / (num_heads_ / num_kv_heads_));
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
    for (std::int32_t kv_head = 0; kv_head < num_kv_heads_; ++kv_head) {
      chains_.push_back(static_cast<std::int64_t>(items_.size()));
      const auto add = [&](const Segment& segment, std::int32_t completion) {
        for (std::int32_t row = segment.begin; row < segment.end; row += tile_rows) {
          items_.push_back({static_cast<std::int32_t>(g), completion, kv_head, row, std::min(row + tile_rows, segment.end)});
        }
      };
      add(group.prompt, -1);
      for (std::size_t c = 0; c < group.completions.size(); ++c) add(group.completions[c], static_cast<std::int32_t>(c));
    }
  }
  chains_.push_back(static_cast<std::int64_t>(items_.size()));
  keys_t_ = Buffer<T>(kv_size_ * num_columns_);
}

template <typename T>
typename PackedAttention<T>::Segment PackedAttention<T>::PlaceSegment(std::int32_t begin, std::int32_t end) {
  const Segment segment{begin, end, num_columns_};
  num_columns_ += static_cast<std::int64_t>(RoundUp(static_cast<std::uint64_t>(end - begin), kColumnAlignment));
  return segment;
}

template <typename T>
void PackedAttention<T>::ForEachSegment(auto body) const {
  for (const Group& group : groups_) {
    body(group.prompt);
    for (const Segment& segment : group.completions) body(segment);
  }
}

// Transposes `kv_size` features of each row, from `first_feature` on, into blocks of columns; padding becomes zero.
template <typename T>
void PackedAttention<T>::PackColumns(const T* qkv, std::int64_t first_feature, T* columns) const {
  ParallelFor(num_kv_heads_, 1, [&](std::int64_t head_begin, std::int64_t head_end) {
    for (std::int64_t kv_head = head_begin; kv_head < head_end; ++kv_head) {
      ForEachSegment([&](const Segment& segment) {
        T* block = columns + head_dim_ * (kv_head * num_columns_ + segment.first_column);
        for (std::int64_t first = segment.begin; first < segment.end; first += kPassKeys) {
          const std::int64_t count = std::min<std::int64_t>(kPassKeys, segment.end - first);
          const std::int64_t width = static_cast<std::int64_t>(RoundUp(static_cast<std::uint64_t>(count), kColumnAlignment));
          std::fill_n(block, head_dim_ * width, T{0});
          for (std::int64_t key = 0; key < count; ++key) {
            const T* row = qkv + (first + key) * row_width_ + first_feature + kv_head * head_dim_;
            for (std::int64_t i = 0; i < head_dim_; ++i) block[i * width + key] = row[i];
          }
          block += head_dim_ * width;
        }
      });
    }
  });
}

template <typename T>
void PackedAttention<T>::AppendBlocks(const Segment& segment, std::int32_t kv_head, const T* qkv, T* grad_qkv,
                                      std::vector<KvBlock<T>>* blocks) const {
  std::int64_t offset = head_dim_ * (kv_head * num_columns_ + segment.first_column);
  const std::int64_t key_feature = q_size_ + kv_head * head_dim_, value_feature = key_feature + kv_size_;
  for (std::int64_t first = segment.begin; first < segment.end; first += kPassKeys) {
    KvBlock<T> block;
    block.count = static_cast<std::int32_t>(std::min<std::int64_t>(kPassKeys, segment.end - first));
    block.width = static_cast<std::int32_t>(RoundUp(static_cast<std::uint64_t>(block.count), kColumnAlignment));
    block.keys_t = keys_t_.data() + offset;
    block.key_t_stride = block.width;
    block.keys = qkv + first * row_width_ + key_feature;
    block.values = qkv + first * row_width_ + value_feature;
    block.row_stride = row_width_;
    if (grad_qkv != nullptr) {
      block.values_t = values_t_.data() + offset;
      block.grad_keys = grad_qkv + first * row_width_ + key_feature;
      block.grad_values = grad_qkv + first * row_width_ + value_feature;
      block.grad_stride = row_width_;
    }
    offset += head_dim_ * block.width;
    blocks->push_back(block);
  }
}

template <typename T>
void PackedAttention<T>::FillBlocks(const Item& item, const T* qkv, T* grad_qkv, std::vector<KvBlock<T>>* blocks) const {
  const Group& group = groups_[static_cast<std::size_t>(item.group)];
  blocks->clear();
  AppendBlocks(group.prompt, item.kv_head, qkv, grad_qkv, blocks);
  if (item.completion >= 0) {
    AppendBlocks(group.completions[static_cast<std::size_t>(item.completion)], item.kv_head, qkv, grad_qkv, blocks);
  }
}

// Rows of the tile: for each row of the item, the query heads of its KV head.
template <typename T>
AttentionTile<T> PackedAttention<T>::GatherTile(const Item& item, const T* qkv, T* grad_qkv, Scratch* scratch) const {
  const Group& group = groups_[static_cast<std::size_t>(item.group)];
  const std::int64_t heads = num_heads_ / num_kv_heads_;
  std::int32_t before = 1 - group.prompt.begin;  // keys seen by row r: r + before
  if (item.completion >= 0) {
    before = group.prompt.end - group.prompt.begin + 1 - group.completions[static_cast<std::size_t>(item.completion)].begin;
  }
  FillBlocks(item, qkv, grad_qkv, &scratch->blocks);
  AttentionTile<T> tile;
  tile.rows = static_cast<std::int32_t>((item.row_end - item.row_begin) * heads);
  tile.head_dim = static_cast<std::int32_t>(head_dim_);
  tile.blocks = scratch->blocks.data();
  tile.num_blocks = static_cast<std::int32_t>(scratch->blocks.size());
  for (std::int64_t r = 0; r < tile.rows; ++r) {
    const std::int64_t row = item.row_begin + r / heads, head = item.kv_head * heads + r % heads;
    std::copy_n(qkv + row * row_width_ + head * head_dim_, head_dim_, scratch->queries.data() + r * head_dim_);
    scratch->limits[static_cast<std::size_t>(r)] = static_cast<std::int32_t>(row) + before;
  }
  ops_.scale(scratch->queries.data(), tile.rows * head_dim_, static_cast<T>(1 / std::sqrt(static_cast<double>(head_dim_))));
  tile.queries = scratch->queries.data();
  tile.limits = scratch->limits.data();
  tile.scores = scratch->scores.data();
  tile.output = scratch->output.data();
  tile.lse = scratch->lse.data();
  return tile;
}

template <typename T>
void PackedAttention<T>::ForwardItem(const Item& item, const T* qkv, T* output, T* lse) const {
  Scratch& scratch = Scratch::ForThread(head_dim_);
  const AttentionTile<T> tile = GatherTile(item, qkv, nullptr, &scratch);
  ops_.attention_forward(tile);
  const std::int64_t heads = num_heads_ / num_kv_heads_;
  for (std::int64_t r = 0; r < tile.rows; ++r) {
    const std::int64_t row = item.row_begin + r / heads, head = item.kv_head * heads + r % heads;
    std::copy_n(tile.output + r * head_dim_, head_dim_, output + row * q_size_ + head * head_dim_);
    lse[row * num_heads_ + head] = tile.lse[r];
  }
}

template <typename T>
void PackedAttention<T>::BackwardItem(const Item& item, const T* qkv, const T* output, const T* lse, const T* grad_output,
                                      T* grad_qkv) const {
  Scratch& scratch = Scratch::ForThread(head_dim_);
  AttentionTile<T> tile = GatherTile(item, qkv, grad_qkv, &scratch);
  const std::int64_t heads = num_heads_ / num_kv_heads_;
  for (std::int64_t r = 0; r < tile.rows; ++r) {
    const std::int64_t row = item.row_begin + r / heads, head = item.kv_head * heads + r % heads;
    const T *out = output + row * q_size_ + head * head_dim_, *grad = grad_output + row * q_size_ + head * head_dim_;
    T delta = 0;
    for (std::int64_t i = 0; i < head_dim_; ++i) delta += out[i] * grad[i];
    scratch.delta[static_cast<std::size_t>(r)] = delta;
    scratch.lse[static_cast<std::size_t>(r)] = lse[row * num_heads_ + head];
    std::copy_n(grad, head_dim_, scratch.grad_output.data() + r * head_dim_);
  }
  tile.delta = scratch.delta.data();
  tile.grad_output = scratch.grad_output.data();
  tile.grad_scores = scratch.grad_scores.data();
  tile.grad_queries = scratch.grad_queries.data();
  ops_.attention_backward(tile);
  const T scale = static_cast<T>(1 / std::sqrt(static_cast<double>(head_dim_)));
  for (std::int64_t r = 0; r < tile.rows; ++r) {
    const std::int64_t row = item.row_begin + r / heads, head = item.kv_head * heads + r % heads;
    T* place = grad_qkv + row * row_width_ + head * head_dim_;
    for (std::int64_t i = 0; i < head_dim_; ++i) place[i] = tile.grad_queries[r * head_dim_ + i] * scale;
  }
}

template <typename T>
void PackedAttention<T>::Forward(const T* qkv, T* output, T* lse) {
  PackColumns(qkv, q_size_, keys_t_.data());
  std::fill_n(output, num_rows_ * q_size_, T{0});
  std::fill_n(lse, num_rows_ * num_heads_, T{0});
  ParallelFor(static_cast<std::int64_t>(items_.size()), 4, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) ForwardItem(items_[static_cast<std::size_t>(i)], qkv, output, lse);
  });
}

template <typename T>
void PackedAttention<T>::Backward(const T* qkv, const T* output, const T* lse, const T* grad_output, T* grad_qkv) {
  values_t_.Reserve(kv_size_ * num_columns_);
  PackColumns(qkv, q_size_ + kv_size_, values_t_.data());
  std::fill_n(grad_qkv, num_rows_ * row_width_, T{0});
  // Items of one chain add to the same keys and values: one thread, in order.
  ParallelFor(static_cast<std::int64_t>(chains_.size()) - 1, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = chains_[static_cast<std::size_t>(begin)]; i < chains_[static_cast<std::size_t>(end)]; ++i) {
      BackwardItem(items_[static_cast<std::size_t>(i)], qkv, output, lse, grad_output, grad_qkv);
    }
  });
}

template class PackedAttention<float>;
template class PackedAttention<double>;

}  // namespace tandem

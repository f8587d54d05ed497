#include "kernels/attention/paged_attention.h"

#include <algorithm>
#include <cmath>

#include "kernels/base/elements.h"
#include "kernels/kv_cache/fp8_kv.h"

namespace tandem {
namespace {

constexpr std::int64_t kMaxMultiprocessors = 192;  // of any card
constexpr std::int64_t kBlocksPerMultiprocessor = 2;
constexpr std::int64_t kLargestTile = 128, kSmallestTile = 16;  // query rows x heads of a group, of one block

std::int64_t GroupOf(const PagedAttentionShape& shape) { return shape.num_heads / shape.num_kv_heads; }

absl::Status CheckShape(const PagedAttentionShape& shape) {
  if (shape.num_kv_heads < 1 || shape.num_heads < 1 || shape.num_heads % shape.num_kv_heads != 0 || shape.head_dim < 1 ||
      shape.page_tokens < 1) {
    return absl::InvalidArgumentError(absl::StrCat("paged attention: ", shape.num_heads, " heads over ", shape.num_kv_heads,
                                                   " KV heads of ", shape.head_dim, ", pages of ", shape.page_tokens, " tokens"));
  }
  return CheckComputeType("paged attention", shape.dtype);
}

// An element of the cache. A code stands for the product of its number with the scale of its head.
template <typename T>
double CacheValue(const void* array, std::int64_t i, const float* scales, std::int64_t kv_head) {
  if (scales == nullptr) return static_cast<double>(ToFloat(static_cast<const T*>(array)[i]));
  const float number = Fp8KvNumber(static_cast<const std::uint8_t*>(array)[i]);
  return static_cast<double>(number) * static_cast<double>(scales[kv_head]);
}

// One query row and head: softmax of its scores over `num_keys` keys, in double.
template <typename T>
void AttendRow(const PagedAttentionParams& params, std::int64_t sequence, std::int64_t row, std::int64_t head,
               std::int64_t num_keys, std::vector<double>* scores) {
  const PagedAttentionShape& shape = params.shape;
  const std::int64_t dim = shape.head_dim, kv_head = head / GroupOf(shape);
  const T* query = static_cast<const T*>(params.query) + row * params.query_row_stride + head * dim;
  const std::int32_t* pages = params.page_indices + params.page_indptr[sequence];
  const auto offset = [&](std::int64_t key) {
    return pages[key / shape.page_tokens] * params.page_stride + (key % shape.page_tokens * shape.num_kv_heads + kv_head) * dim;
  };
  scores->assign(static_cast<std::size_t>(num_keys), 0);
  double largest = -INFINITY;
  for (std::int64_t key = 0; key < num_keys; ++key) {
    double score = 0;
    for (std::int64_t i = 0; i < dim; ++i) {
      score += static_cast<double>(ToFloat(query[i])) * CacheValue<T>(params.keys, offset(key) + i, params.key_scales, kv_head);
    }
    (*scores)[static_cast<std::size_t>(key)] = score /= std::sqrt(static_cast<double>(dim));
    largest = std::max(largest, score);
  }
  double total = 0;
  std::vector<double> sums(static_cast<std::size_t>(dim), 0);
  for (std::int64_t key = 0; key < num_keys; ++key) {
    const double weight = std::exp((*scores)[static_cast<std::size_t>(key)] - largest);
    total += weight;
    for (std::int64_t i = 0; i < dim; ++i) {
      sums[static_cast<std::size_t>(i)] += weight * CacheValue<T>(params.values, offset(key) + i, params.value_scales, kv_head);
    }
  }
  T* output = static_cast<T*>(params.output) + (row * shape.num_heads + head) * dim;
  for (std::int64_t i = 0; i < dim; ++i) {
    output[i] = FromFloat<T>(static_cast<float>(sums[static_cast<std::size_t>(i)] / total));
  }
}

template <typename T>
void PagedAttentionReference(const PagedAttentionParams& params) {
  std::vector<double> scores;
  for (std::int64_t s = 0; s < params.num_sequences; ++s) {
    const std::int64_t num_pages = params.page_indptr[s + 1] - params.page_indptr[s];
    const std::int64_t context = (num_pages - 1) * params.shape.page_tokens + params.last_page_tokens[s];
    for (std::int64_t row = params.query_indptr[s]; row < params.query_indptr[s + 1]; ++row) {
      const std::int64_t num_keys = context - (params.query_indptr[s + 1] - 1 - row);
      for (std::int64_t head = 0; head < params.shape.num_heads; ++head) {
        AttendRow<T>(params, s, row, head, num_keys, &scores);
      }
    }
  }
}

}  // namespace

std::uint64_t PagedAttentionPartialBytes(const PagedAttentionShape& shape, std::int64_t max_rows, std::int64_t max_sequences) {
  // Where keys are split, every block leaves a tile of outputs and their sums. In batches of any shape no more blocks than run at
  // a time split; a fixed shape splits always, with as many small tiles as its rows can fill.
  const std::int64_t at_once = kBlocksPerMultiprocessor * kMaxMultiprocessors / shape.num_kv_heads + 1;
  const std::int64_t fixed_rows = std::min(max_rows, max_sequences);
  const std::int64_t fixed = (fixed_rows * GroupOf(shape) + kSmallestTile - 1) / kSmallestTile + max_sequences;
  const std::int64_t fixed_tile = std::max(kSmallestTile, GroupOf(shape) > kSmallestTile ? kLargestTile : kSmallestTile);
  const std::int64_t rows = std::max(at_once * kLargestTile, fixed * fixed_tile);
  return static_cast<std::uint64_t>(shape.num_heads * rows * (shape.head_dim + 1)) * sizeof(float) + 256;
}

std::uint64_t PagedAttentionIndexBytes(const PagedAttentionShape& shape, std::int64_t max_rows, std::int64_t max_sequences) {
  const std::int64_t tiles = (max_rows * GroupOf(shape) + kSmallestTile - 1) / kSmallestTile + max_sequences +
                             kBlocksPerMultiprocessor * kMaxMultiprocessors;
  return static_cast<std::uint64_t>(tiles * 13 + (max_rows + max_sequences + 2) * 4 + 256);
}

absl::Status PlanPagedAttention(const PagedAttentionPlanParams& params, const PagedAttentionScratch& scratch,
                                PagedAttentionPlan* plan, void* stream) {
  TANDEM_RETURN_IF_ERROR(CheckShape(params.shape));
  return internal::PlanPagedAttentionCuda(params, scratch, plan, stream);
}

absl::Status PagedAttention(const PagedAttentionParams& params, const PagedAttentionPlan& plan,
                            const PagedAttentionScratch& scratch, Device device, void* stream) {
  TANDEM_RETURN_IF_ERROR(CheckShape(params.shape));
  if ((params.key_scales == nullptr) != (params.value_scales == nullptr)) {
    return absl::InvalidArgumentError("paged attention: scales of keys or of values alone");
  }
  if (params.num_sequences == 0) return absl::OkStatus();
  if (device == Device::kCuda) return internal::PagedAttentionCuda(params, plan, scratch, stream);
  VisitElementType(params.shape.dtype, [&]<typename T>(T) { PagedAttentionReference<T>(params); });
  return absl::OkStatus();
}

}  // namespace tandem

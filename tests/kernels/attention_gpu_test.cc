#include <algorithm>
#include <numeric>

#include "kernels/attention/paged_attention.h"
#include "kernels/kv_cache/kv_cache.h"
#include "tests/kernels/device_array.h"

namespace tandem {
namespace {

using Int32s = std::vector<std::int32_t>;

struct Lengths {
  std::int32_t queries, context;
};

// A batch over a cache whose pages lie in no order; pages hold keys, then values.
struct Batch {
  PagedAttentionShape shape;
  Int32s query_indptr = {0}, page_indptr = {0}, page_indices, last_page_tokens;
  std::int64_t page_stride;
  HostArray qkv, cache;

  Batch(const PagedAttentionShape& shape_in, const std::vector<Lengths>& sequences)
      : shape(shape_in),
        page_stride(2 * std::int64_t{shape.page_tokens} * shape.num_kv_heads * shape.head_dim),
        qkv(shape.dtype, 0),
        cache(shape.dtype, 0) {
    for (const Lengths& sequence : sequences) {
      query_indptr.push_back(query_indptr.back() + sequence.queries);
      const std::int32_t pages = (sequence.context + shape.page_tokens - 1) / shape.page_tokens;
      page_indptr.push_back(page_indptr.back() + pages);
      last_page_tokens.push_back(sequence.context - (pages - 1) * shape.page_tokens);
    }
    const std::int32_t num_pages = page_indptr.back();
    for (std::int32_t page = 0; page < num_pages; ++page) page_indices.push_back(page);
    for (std::size_t i = page_indices.size(); i > 1; --i) std::swap(page_indices[i - 1], page_indices[RandomBelow(7, i, i)]);
    qkv = HostArray::Random(shape.dtype, query_indptr.back() * row_stride(), 1, 2);
    cache = HostArray::Random(shape.dtype, num_pages * page_stride, 2);
    // Behind a sequence's last token lies what a former holder of the memory left.
    for (std::size_t s = 0; s < last_page_tokens.size(); ++s) {
      const std::int64_t page = page_indices[static_cast<std::size_t>(page_indptr[s + 1] - 1)];
      const std::int64_t token = shape.num_kv_heads * shape.head_dim, half = page_stride / 2;
      for (std::int64_t i = last_page_tokens[s] * token; i < half; ++i) {
        cache.Set(page * page_stride + i, NAN);
        cache.Set(page * page_stride + half + i, NAN);
      }
    }
  }
  std::int64_t row_stride() const { return (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim; }
  std::int64_t num_sequences() const { return static_cast<std::int64_t>(last_page_tokens.size()); }
  std::int64_t output_count() const { return query_indptr.back() * shape.num_heads * shape.head_dim; }

  // With padding to `padded` sequences that have neither queries nor keys.
  void Pad(std::int64_t padded) {
    while (num_sequences() < padded) {
      query_indptr.push_back(query_indptr.back());
      page_indptr.push_back(page_indptr.back());
      last_page_tokens.push_back(0);
    }
  }
  PagedAttentionParams Params(const void* q, const void* kv, void* output, const Int32s& query_ptr, const Int32s& page_ptr,
                              const Int32s& pages, const Int32s& last) const {
    return {.shape = shape,
            .query = q,
            .query_row_stride = row_stride(),
            .keys = kv,
            .values = static_cast<const std::byte*>(kv) + page_stride / 2 * static_cast<std::int64_t>(ElementBytes(shape.dtype)),
            .page_stride = page_stride,
            .output = output,
            .query_indptr = query_ptr.data(),
            .page_indptr = page_ptr.data(),
            .page_indices = pages.data(),
            .last_page_tokens = last.data(),
            .num_sequences = num_sequences()};
  }
};

const std::vector<Lengths> kRagged = {{1, 1},   {1, 16},  {1, 17},    {5, 5},  {33, 100}, {1, 300},
                                      {16, 16}, {64, 64}, {130, 200}, {2, 33}, {1, 2049}, {300, 300}};

class PagedAttentionGpuTest : public DeviceKernelTest {
 protected:
  // `padded` > 0: a fixed shape of so many sequences.
  void Check(Batch batch, std::int64_t padded, const std::string& what) {
    HostArray expected(batch.shape.dtype, batch.output_count());
    ASSERT_EQ(PagedAttention(batch.Params(batch.qkv.data(), batch.cache.data(), expected.data(), batch.query_indptr,
                                          batch.page_indptr, batch.page_indices, batch.last_page_tokens),
                             {}, {}, Device::kCpu, nullptr),
              absl::OkStatus());
    const std::int64_t rows = padded > 0 ? padded : batch.query_indptr.back();
    batch.Pad(padded);
    const std::uint64_t partial_bytes = PagedAttentionPartialBytes(batch.shape, rows, batch.num_sequences());
    const std::uint64_t index_bytes = PagedAttentionIndexBytes(batch.shape, rows, batch.num_sequences());
    const DeviceArray partials((std::vector<std::byte>(partial_bytes))), indices((std::vector<std::byte>(index_bytes)));
    const auto staging = HostBuffer::Create(Device::kCuda, index_bytes);
    ASSERT_TRUE(staging.ok()) << staging.status();
    const PagedAttentionScratch scratch = {.partials = {static_cast<std::byte*>(partials.data()), partial_bytes},
                                           .indices = {static_cast<std::byte*>(indices.data()), index_bytes},
                                           .staging = (*staging)->bytes()};
    const DeviceArray qkv(batch.qkv), cache(batch.cache), output(HostArray(batch.shape.dtype, batch.output_count()));
    const auto query_indptr = DeviceArray::Of(batch.query_indptr), page_indptr = DeviceArray::Of(batch.page_indptr);
    const auto page_indices = DeviceArray::Of(batch.page_indices), last = DeviceArray::Of(batch.last_page_tokens);
    PagedAttentionPlan plan;
    ASSERT_TRUE(Fence(PlanPagedAttention({.shape = batch.shape,
                                          .query_indptr = batch.query_indptr.data(),
                                          .page_indptr = batch.page_indptr.data(),
                                          .num_sequences = batch.num_sequences(),
                                          .num_rows = rows,
                                          .is_fixed_shape = padded > 0},
                                         scratch, &plan, stream()),
                      what + " plan"));
    PagedAttentionParams params = batch.Params(qkv.data(), cache.data(), output.data(), {}, {}, {}, {});
    params.query_indptr = static_cast<const std::int32_t*>(query_indptr->data());
    params.page_indptr = static_cast<const std::int32_t*>(page_indptr->data());
    params.page_indices = static_cast<const std::int32_t*>(page_indices->data());
    params.last_page_tokens = static_cast<const std::int32_t*>(last->data());
    if (!Fence(PagedAttention(params, plan, scratch, Device::kCuda, stream()), what)) return;
    partials.Read(what + " partials");
    indices.Read(what + " indices");
    // Weights and outputs are rounded to bf16 each, values are below 1: 2^-9 each, and split parts once more.
    ExpectClose(output.Read(batch.shape.dtype, what), expected, 0x1p-7, 0x1p-8, what);
  }
};

TEST_F(PagedAttentionGpuTest, EqualsTheReferenceOnRaggedBatches) {
  const auto check = [&](int heads, int kv_heads, int head_dim, int page_tokens) {
    const PagedAttentionShape shape = {
        .num_heads = heads, .num_kv_heads = kv_heads, .head_dim = head_dim, .page_tokens = page_tokens};
    Check(Batch(shape, kRagged), 0,
          absl::StrCat("ragged, ", heads, " / ", kv_heads, " heads of ", head_dim, ", pages of ", page_tokens));
  };
  for (const int head_dim : {64, 128}) {
    for (const auto& [heads, kv_heads] :
         {std::pair(4, 4), std::pair(9, 3), std::pair(8, 2), std::pair(16, 2), std::pair(32, 8)}) {
      for (const int page_tokens : {1, 16}) check(heads, kv_heads, head_dim, page_tokens);
    }
  }
  for (const auto& [heads, kv_heads] : {std::pair(4, 4), std::pair(9, 3), std::pair(14, 2)}) check(heads, kv_heads, 256, 16);
}

TEST_F(PagedAttentionGpuTest, DecodesWithAndWithoutAFixedShape) {
  for (const int head_dim : {64, 128, 256}) {
    for (const auto& [heads, kv_heads] : {std::pair(9, 3), std::pair(32, 8), std::pair(8, 1), std::pair(5, 1)}) {
      if (head_dim == 256 && heads == 32) continue;  // the reference is slow
      const PagedAttentionShape shape = {.num_heads = heads, .num_kv_heads = kv_heads, .head_dim = head_dim, .page_tokens = 16};
      for (const std::int32_t sequences : {1, 7, 61}) {
        const std::int32_t longest = sequences > 7 ? 400 : 3000;  // the reference is slow
        std::vector<Lengths> lengths;
        for (std::int32_t s = 0; s < sequences; ++s) lengths.push_back({1, 1 + (s * 97 + 2000 / sequences) % longest});
        const std::string what = absl::StrCat(sequences, " decodes, ", heads, " / ", kv_heads, " heads of ", head_dim);
        Check(Batch(shape, lengths), 0, what);
        Check(Batch(shape, lengths), sequences, what + ", fixed shape");
        Check(Batch(shape, lengths), sequences + 3, what + ", padded");
      }
    }
  }
}

TEST_F(PagedAttentionGpuTest, RefusesWhatItHasNoKernelFor) {
  PagedAttentionPlan plan;
  PagedAttentionPlanParams params;
  params.shape = {.num_heads = 4, .num_kv_heads = 2, .head_dim = 80, .page_tokens = 16};
  EXPECT_EQ(PlanPagedAttention(params, {}, &plan, stream()).code(), absl::StatusCode::kInvalidArgument);
  params.shape.head_dim = 64;
  params.shape.num_kv_heads = 3;
  EXPECT_EQ(PlanPagedAttention(params, {}, &plan, stream()).code(), absl::StatusCode::kInvalidArgument);
}

class KvCacheGpuTest : public DeviceKernelTest {};

TEST_F(KvCacheGpuTest, RotatesAndCachesAsTheReferenceDoes) {
  struct Case {
    int heads, kv_heads, head_dim;
    bool has_bias, has_norm;
  };
  for (const Case& c : {Case{4, 2, 64, false, false}, Case{9, 3, 64, true, false}, Case{32, 8, 128, false, true},
                        Case{3, 1, 6, true, true}, Case{2, 2, 256, true, true}}) {
    for (const DType dtype : {DType::kFp32, DType::kBf16}) {
      const std::string what = absl::StrCat(DTypeName(dtype), " ", c.heads, " / ", c.kv_heads, " heads of ", c.head_dim,
                                            c.has_bias ? " bias" : "", c.has_norm ? " norm" : "");
      constexpr std::int64_t kRows = 37, kPositions = 300, kPages = 9;
      constexpr int kPageTokens = 16;
      const std::int64_t half = c.head_dim / 2, width = (c.heads + 2 * c.kv_heads) * c.head_dim;
      const std::int64_t page = kPageTokens * c.kv_heads * c.head_dim;
      const HostArray qkv = HostArray::Random(DType::kFp32, kRows * width, 1);
      HostArray queries(dtype, kRows * width), unnormed(dtype, kRows * width),
          cache = HostArray::Random(dtype, kPages * 2 * page, 2);
      const HostArray bias = HostArray::Random(dtype, width, 3), q_norm = HostArray::Random(dtype, c.head_dim, 4, 2),
                      k_norm = HostArray::Random(dtype, c.head_dim, 5, 2);
      std::vector<double> frequencies;
      for (std::int64_t i = 0; i < half; ++i)
        frequencies.push_back(std::pow(10000.0, -static_cast<double>(i) / static_cast<double>(half)));
      HostArray cosines(DType::kFp32, kPositions * half), sines(DType::kFp32, kPositions * half);
      RopeTableParams table = {.frequencies = frequencies.data(), .half = half, .num_positions = kPositions};
      const DeviceArray device_cosines(cosines), device_sines(sines);
      table.cosines = static_cast<float*>(device_cosines.data());
      table.sines = static_cast<float*>(device_sines.data());
      if (!Fence(FillRopeTable(table, Device::kCuda, stream()), what + " table")) return;
      table.cosines = static_cast<float*>(cosines.data());
      table.sines = static_cast<float*>(sines.data());
      ASSERT_EQ(FillRopeTable(table, Device::kCpu, nullptr), absl::OkStatus());
      ExpectClose(device_cosines.Read(DType::kFp32, what), cosines, LastPlace(DType::kFp32), 1e-12, what + " cosines");
      ExpectClose(device_sines.Read(DType::kFp32, what), sines, LastPlace(DType::kFp32), 1e-12, what + " sines");

      Int32s positions, slots;
      for (std::int32_t row = 0; row < kRows; ++row) {
        positions.push_back((row * 29) % kPositions);
        slots.push_back(row % 5 == 4 ? -1 : (row * 11) % (kPages * kPageTokens));
      }
      const DeviceArray device_qkv(qkv), device_cache(cache), device_bias(bias), device_q_norm(q_norm), device_k_norm(k_norm);
      const DeviceArray device_queries(queries), device_unnormed(unnormed);
      const auto device_positions = DeviceArray::Of(positions), device_slots = DeviceArray::Of(slots);
      const auto params = [&](const void* x, void* q, void* u, const void* b, const void* qn, const void* kn,
                              const std::int32_t* at, const std::int32_t* to, const void* cos, const void* sin, void* kv) {
        return RopeAndCacheParams{.dtype = dtype,
                                  .qkv = static_cast<const float*>(x),
                                  .queries = q,
                                  .query_row_stride = width,
                                  .unnormed = c.has_norm ? u : nullptr,
                                  .bias = c.has_bias ? b : nullptr,
                                  .q_norm = c.has_norm ? qn : nullptr,
                                  .k_norm = c.has_norm ? kn : nullptr,
                                  .epsilon = 1e-6f,
                                  .num_rows = kRows,
                                  .num_heads = c.heads,
                                  .num_kv_heads = c.kv_heads,
                                  .head_dim = c.head_dim,
                                  .positions = at,
                                  .cosines = static_cast<const float*>(cos),
                                  .sines = static_cast<const float*>(sin),
                                  .slots = to,
                                  .keys = kv,
                                  .values = static_cast<std::byte*>(kv) + page * static_cast<std::int64_t>(ElementBytes(dtype)),
                                  .page_stride = 2 * page,
                                  .page_tokens = kPageTokens};
      };
      if (!Fence(RopeAndCache(params(device_qkv.data(), device_queries.data(), device_unnormed.data(), device_bias.data(),
                                     device_q_norm.data(), device_k_norm.data(),
                                     static_cast<const std::int32_t*>(device_positions->data()),
                                     static_cast<const std::int32_t*>(device_slots->data()), device_cosines.data(),
                                     device_sines.data(), device_cache.data()),
                              Device::kCuda, stream()),
                 what)) {
        return;
      }
      ASSERT_EQ(RopeAndCache(params(qkv.data(), queries.data(), unnormed.data(), bias.data(), q_norm.data(), k_norm.data(),
                                    positions.data(), slots.data(), cosines.data(), sines.data(), cache.data()),
                             Device::kCpu, nullptr),
                absl::OkStatus());
      ExpectClose(device_queries.Read(dtype, what), queries, LastPlace(dtype), 1e-5, what + " queries");
      ExpectClose(device_unnormed.Read(dtype, what), unnormed, LastPlace(dtype), 1e-6, what + " unnormed");
      ExpectClose(device_cache.Read(dtype, what), cache, LastPlace(dtype), 1e-5, what + " cache");
    }
  }
}

// More blocks than one launch takes, of different sizes, one of them empty.
TEST_F(KvCacheGpuTest, RoundsBlocksOfAWiderMatrix) {
  constexpr std::int64_t kBlocks = 70, kColumns = 300, kStride = 333;
  constexpr std::int64_t kRows = kBlocks * (kBlocks - 1) / 2;
  const HostArray input = HostArray::Random(DType::kFp32, kRows * kColumns, 6);
  HostArray output = HostArray::Random(DType::kBf16, kRows * kStride, 7);
  const DeviceArray device_input(input), device_output(output);
  const auto blocks_of = [&](const void* from, void* to) {
    std::vector<RoundBlockParams> blocks;
    std::int64_t row = 0;
    for (std::int64_t i = 0; i < kBlocks; row += i++) {
      blocks.push_back({.input = static_cast<const float*>(from) + row * kColumns,
                        .output = static_cast<std::byte*>(to) + row * kStride * 2,
                        .num_rows = i,
                        .num_columns = kColumns,
                        .output_row_stride = kStride});
    }
    return blocks;
  };
  ASSERT_TRUE(Fence(RoundBlocks(blocks_of(device_input.data(), device_output.data()), Device::kCuda, stream()), "rounding"));
  ASSERT_EQ(RoundBlocks(blocks_of(input.data(), output.data()), Device::kCpu, nullptr), absl::OkStatus());
  EXPECT_EQ(device_output.Read("rounding"), output.bytes());
}

}  // namespace
}  // namespace tandem

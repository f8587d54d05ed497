// Keys and values in fp8 on the device: scales, codes in pages, attention over them.
#include <algorithm>

#include "kernels/attention/paged_attention.h"
#include "tests/kernels/device_array.h"
#include "tests/kernels/fp8_kv_arrays.h"

namespace tandem {
namespace {

class Fp8KvGpuTest : public DeviceKernelTest {};

TEST_F(Fp8KvGpuTest, ScalesAndPagesAreTheHosts) {
  for (const auto& [heads, head_dim, rows] : {std::tuple(1, 8, 1), {3, 64, 1}, {8, 128, 70}, {2, 96, 33}, {40, 128, 16}}) {
    const std::string what = absl::StrCat(rows, " rows of ", heads, " x ", head_dim);
    Fp8KvArrays arrays(heads, head_dim, rows);
    // A broken row, and a head of which every row is broken.
    if (rows > 1) arrays.keys.Set(2 * arrays.row_size(), NAN);
    if (rows > 40) {
      for (std::int64_t row = 0; row < rows; ++row)
        arrays.values.Set(row * arrays.row_size() + head_dim + row % head_dim, INFINITY);
    }
    const DeviceArray keys(arrays.keys), values(arrays.values), queries(arrays.queries);
    const auto slots = DeviceArray::Of(arrays.slots), scales = DeviceArray::Of(arrays.scales);
    const auto pages = DeviceArray::Of(arrays.pages);
    Fp8KvParams params = arrays.Params();
    params.keys = keys.data();
    params.values = values.data();
    params.slots = static_cast<const std::int32_t*>(slots->data());
    params.scales = static_cast<float*>(scales->data());
    params.queries = queries.data();
    params.key_pages = pages->data();
    params.value_pages = static_cast<std::byte*>(pages->data()) + Fp8KvArrays::kPageTokens * arrays.row_size();
    if (!Fence(MeasureFp8KvScales(params, Device::kCuda, stream()), what + " scales")) return;
    ASSERT_EQ(MeasureFp8KvScales(arrays.Params(), Device::kCpu, nullptr), absl::OkStatus());
    HostArray device_scales(DType::kFp32, 2 * heads), host_scales = device_scales;
    *device_scales.mutable_bytes() = scales->Read(what + " scales");
    std::memcpy(host_scales.data(), arrays.scales.data(), host_scales.bytes().size());
    ExpectClose(device_scales, host_scales, 0, 1e-30, what + " scales");
    // Codes under numbers alone: a step without scales is one whose codes nobody reads.
    for (float& scale : arrays.scales) scale = std::isnan(scale) ? 0x1p-6f : scale;
    ASSERT_EQ(CopyFromHost(Device::kCuda, scales->data(), arrays.scales.data(), arrays.scales.size() * sizeof(float)),
              absl::OkStatus());
    ASSERT_LE(rows, Fp8KvArrays::kPageTokens * Fp8KvArrays::kNumPages);  // no slot twice
    if (!Fence(StoreFp8Kv(params, Device::kCuda, stream()), what + " codes")) return;
    ASSERT_EQ(StoreFp8Kv(arrays.Params(), Device::kCpu, nullptr), absl::OkStatus());
    ExpectClose(queries.Read(DType::kBf16, what), arrays.queries, 0, 1e-30, what + " queries");
    const std::vector<std::byte> device_pages = pages->Read(what + " pages");
    std::size_t num_wrong = 0, first_wrong = 0;
    for (std::size_t i = 0; i < arrays.pages.size(); ++i) {
      if (device_pages[i] == std::byte{arrays.pages[i]}) continue;
      if (num_wrong++ == 0) first_wrong = i;
    }
    EXPECT_EQ(num_wrong, 0U) << what << ": first is byte " << first_wrong << ", "
                             << std::to_integer<int>(device_pages[first_wrong]) << ", expected "
                             << int{arrays.pages[first_wrong]};
  }
}

// The trainer's rows are the numbers that the rollout server's cache holds, to the bit.
TEST_F(Fp8KvGpuTest, RopeAndCacheRoundsAsTheCacheDoes) {
  for (const auto& [heads, kv_heads, head_dim] : {std::tuple(9, 3, 64), {4, 1, 128}, {3, 1, 6}, {2, 2, 256}, {40, 8, 128}}) {
    for (const DType dtype : {DType::kBf16, DType::kFp32}) {
      const std::string what = absl::StrCat(DTypeName(dtype), " ", heads, " / ", kv_heads, " heads of ", head_dim);
      const QkvRows qkv(dtype, heads, kv_heads, head_dim);
      const std::vector<float> scales = qkv.Scales();
      const HostArray empty(dtype, QkvRows::kRows * qkv.width());
      const DeviceArray product(qkv.product), cosines(qkv.cosines), sines(qkv.sines), rows(empty), rounded(empty);
      const auto positions = DeviceArray::Of(qkv.positions), device_scales = DeviceArray::Of(scales);
      const auto run = [&](const DeviceArray& to, const float* kv_scales) {
        RopeAndCacheParams params = qkv.Params(to.data(), kv_scales);
        params.qkv = product.floats();
        params.positions = static_cast<const std::int32_t*>(positions->data());
        params.cosines = cosines.floats();
        params.sines = sines.floats();
        return Fence(RopeAndCache(params, Device::kCuda, stream()), what);
      };
      if (!run(rows, nullptr) || !run(rounded, device_scales->floats())) return;
      qkv.ExpectRoundedAsTheCacheDoes(rows.Read(dtype, what), rounded.Read(dtype, what), scales, what);
    }
  }
}

// Behind a sequence's last token pages hold the largest number. `padded` > 0: a fixed shape of so many sequences.
TEST_F(Fp8KvGpuTest, AttentionEqualsTheReference) {
  struct Lengths {
    std::int32_t queries, context;
  };
  const std::vector<Lengths> ragged = {{1, 1}, {1, 16}, {5, 5}, {33, 100}, {1, 300}, {64, 64}, {130, 200}, {2, 33}, {1, 2049}};
  const std::vector<Lengths> decode = {{1, 700}, {1, 1}, {1, 33}, {1, 4000}, {1, 16}};
  constexpr int kPageTokens = 16;
  for (const auto& [heads, kv_heads, head_dim] :
       {std::tuple(4, 4, 64), {9, 3, 64}, {32, 8, 128}, {16, 2, 128}, {8, 2, 64}, {40, 8, 128}, {8, 1, 256}, {9, 3, 256}}) {
    for (const std::int64_t padded : {0, 8}) {
      const std::vector<Lengths>& sequences = padded > 0 ? decode : ragged;
      const std::string what =
          absl::StrCat(padded > 0 ? "decode" : "ragged", ", ", heads, " / ", kv_heads, " heads of ", head_dim);
      const PagedAttentionShape shape = {
          .num_heads = heads, .num_kv_heads = kv_heads, .head_dim = head_dim, .page_tokens = kPageTokens};
      std::vector<std::int32_t> query_indptr = {0}, page_indptr = {0}, page_indices, last_page_tokens;
      for (const Lengths& sequence : sequences) {
        query_indptr.push_back(query_indptr.back() + sequence.queries);
        const std::int32_t pages = (sequence.context + kPageTokens - 1) / kPageTokens;
        page_indptr.push_back(page_indptr.back() + pages);
        last_page_tokens.push_back(sequence.context - (pages - 1) * kPageTokens);
      }
      const std::int32_t num_pages = page_indptr.back(), num_rows = query_indptr.back();
      for (std::int32_t page = 0; page < num_pages; ++page) page_indices.push_back(num_pages - 1 - page);
      const std::int64_t token = std::int64_t{kv_heads} * head_dim, half = kPageTokens * token, row_size = heads * head_dim;
      std::vector<std::uint8_t> cache(static_cast<std::size_t>(num_pages * 2 * half));
      for (std::size_t i = 0; i < cache.size(); ++i) {
        cache[i] = ToFp8KvCode(static_cast<float>((RandomUniform(5, i) * 2 - 1) * 25), 1);
      }
      for (std::size_t s = 0; s < sequences.size(); ++s) {
        const std::int64_t page = page_indices[static_cast<std::size_t>(page_indptr[s + 1] - 1)];
        for (std::int64_t i = last_page_tokens[s] * token; i < half; ++i) {
          cache[static_cast<std::size_t>(page * 2 * half + i)] = cache[static_cast<std::size_t>((page * 2 + 1) * half + i)] =
              0x7f;
        }
      }
      std::vector<float> key_scales, value_scales;
      for (int head = 0; head < kv_heads; ++head) {
        key_scales.push_back(0.148f / static_cast<float>(head + 1));
        value_scales.push_back(0.04f + 0.012f * static_cast<float>(head));
      }
      const HostArray query = HostArray::Random(DType::kBf16, num_rows * row_size, 1, 2);
      HostArray expected(DType::kBf16, num_rows * row_size);
      const auto codes = DeviceArray::Of(cache);
      const auto fill = [&](PagedAttentionParams* params, const void* kv) {
        params->shape = shape;
        params->query_row_stride = row_size;
        params->keys = kv;
        params->values = static_cast<const std::byte*>(kv) + half;
        params->page_stride = 2 * half;
        params->num_sequences = static_cast<std::int64_t>(last_page_tokens.size());
      };
      PagedAttentionParams params;
      fill(&params, cache.data());
      params.query = query.data();
      params.key_scales = key_scales.data();
      params.value_scales = value_scales.data();
      params.output = expected.data();
      params.query_indptr = query_indptr.data();
      params.page_indptr = page_indptr.data();
      params.page_indices = page_indices.data();
      params.last_page_tokens = last_page_tokens.data();
      ASSERT_EQ(PagedAttention(params, {}, {}, Device::kCpu, nullptr), absl::OkStatus());

      while (static_cast<std::int64_t>(last_page_tokens.size()) < padded) {
        query_indptr.push_back(query_indptr.back());
        page_indptr.push_back(page_indptr.back());
        last_page_tokens.push_back(0);
      }
      const std::int64_t rows = padded > 0 ? padded : num_rows,
                         num_sequences = static_cast<std::int64_t>(last_page_tokens.size());
      const std::uint64_t partial_bytes = PagedAttentionPartialBytes(shape, rows, num_sequences);
      const std::uint64_t index_bytes = PagedAttentionIndexBytes(shape, rows, num_sequences);
      const DeviceArray partials((std::vector<std::byte>(partial_bytes))), indices((std::vector<std::byte>(index_bytes)));
      const auto staging = HostBuffer::Create(Device::kCuda, index_bytes);
      ASSERT_TRUE(staging.ok()) << staging.status();
      const PagedAttentionScratch scratch = {.partials = {static_cast<std::byte*>(partials.data()), partial_bytes},
                                             .indices = {static_cast<std::byte*>(indices.data()), index_bytes},
                                             .staging = (*staging)->bytes()};
      PagedAttentionPlan plan;
      if (!Fence(PlanPagedAttention({.shape = shape,
                                     .query_indptr = query_indptr.data(),
                                     .page_indptr = page_indptr.data(),
                                     .num_sequences = num_sequences,
                                     .num_rows = rows,
                                     .is_fixed_shape = padded > 0},
                                    scratch, &plan, stream()),
                 what + " plan")) {
        return;
      }
      const DeviceArray device_query(query), output(HostArray(DType::kBf16, num_rows * row_size));
      const auto device_query_indptr = DeviceArray::Of(query_indptr), device_page_indptr = DeviceArray::Of(page_indptr);
      const auto device_pages = DeviceArray::Of(page_indices), device_last = DeviceArray::Of(last_page_tokens);
      const auto device_key_scales = DeviceArray::Of(key_scales), device_value_scales = DeviceArray::Of(value_scales);
      fill(&params, codes->data());
      params.query = device_query.data();
      params.key_scales = static_cast<const float*>(device_key_scales->data());
      params.value_scales = static_cast<const float*>(device_value_scales->data());
      params.output = output.data();
      params.query_indptr = static_cast<const std::int32_t*>(device_query_indptr->data());
      params.page_indptr = static_cast<const std::int32_t*>(device_page_indptr->data());
      params.page_indices = static_cast<const std::int32_t*>(device_pages->data());
      params.last_page_tokens = static_cast<const std::int32_t*>(device_last->data());
      if (!Fence(PagedAttention(params, plan, scratch, Device::kCuda, stream()), what)) return;
      // Weights and outputs are rounded to bf16, values are below 3.5: 2^-9 each, and split parts once more.
      ExpectClose(output.Read(DType::kBf16, what), expected, 0x1p-7, 0x1p-6, what);
    }
  }
}

}  // namespace
}  // namespace tandem

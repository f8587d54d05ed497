// The libraries' attention against the own kernel in fp32, on the same bf16 values.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/clock.h"
#include "common/base/random.h"
#include "common/gpu/stream.h"
#include "common/model/weight_codecs.h"
#include "common/torch/arena_allocator.h"
#include "gtest/gtest.h"
#include "kernels/packed_attention/packed_attention.h"
#include "tests/support/device_bytes.h"
#include "tests/support/naive_transformer.h"
#include "tests/trainer_server/support/packed_groups.h"
#include "trainer_server/policy/cudnn_attention.h"
#include "trainer_server/policy/flash_attention.h"

namespace tandem {
namespace {

using testing::DeviceBytes;
using testing::Group;
using testing::Ids;
using testing::RandomIds;
using testing::RelativeError;

constexpr std::int64_t kMiB = std::int64_t{1} << 20;
constexpr std::int64_t kScratchLimitBytes = 512 * kMiB;

ModelConfig HeadsOf(int num_heads, int num_kv_heads, int head_dim) {
  ModelConfig config = testing::TinyConfig();
  config.num_heads = num_heads;
  config.num_kv_heads = num_kv_heads;
  config.head_dim = head_dim;
  return config;
}

std::string NameOf(const ModelConfig& config) {
  return absl::StrCat(config.num_heads, " heads over ", config.num_kv_heads, " of ", config.head_dim);
}

// Groups of random tokens: a prompt's length, then its completions'.
MicroBatch PackLengths(const std::vector<std::vector<std::size_t>>& groups) {
  std::vector<Group> packed;
  for (const std::vector<std::size_t>& lengths : groups) {
    packed.push_back({Ids(lengths.front(), 1), {}});
    for (std::size_t n = 1; n < lengths.size(); ++n) packed.back().completions.push_back(Ids(lengths[n], 1));
  }
  return testing::Pack(packed).front();
}

// Lengths of 1, of tiles and beside them; an empty completion; a prompt that nobody continues; then rows of nothing.
MicroBatch RaggedBatch() {
  MicroBatch batch = PackLengths({{9, 5, 1, 12}, {70, 90, 3}, {300, 1}, {1, 257, 0, 128}, {40, 0}, {1, 1}, {129, 64, 63}});
  batch.token_ids.resize(batch.token_ids.size() + 5, 1);
  batch.positions.resize(batch.token_ids.size(), 0);
  return batch;
}

std::int64_t NumRows(const MicroBatch& batch) { return static_cast<std::int64_t>(batch.token_ids.size()); }

// bf16 in [-2, 2), NaN from `end` on: nothing may read rows of nothing.
std::vector<std::uint16_t> RandomRows(std::int64_t rows, std::int64_t end, std::int64_t width, std::uint64_t seed) {
  std::vector<std::uint16_t> values(static_cast<std::size_t>(rows * width), 0xffff);
  for (std::size_t i = 0; i < static_cast<std::size_t>(end * width); ++i) {
    values[i] = FloatToBf16(static_cast<float>(4 * RandomUniform(seed, i) - 2));
  }
  return values;
}

std::vector<float> Widened(const std::vector<std::uint16_t>& values) {
  std::vector<float> floats;
  for (const std::uint16_t value : values) floats.push_back(Bf16ToFloat(value));
  return floats;
}

template <typename T>
std::unique_ptr<DeviceBytes> OnDevice(const std::vector<T>& values) {
  auto bytes = std::make_unique<DeviceBytes>(values.size() * sizeof(T));
  EXPECT_TRUE(bytes->Upload(values.data(), values.size() * sizeof(T)).ok());
  return bytes;
}

template <typename T>
std::vector<T> OnHost(const DeviceBytes& bytes) {
  std::vector<T> values(bytes.span().size() / sizeof(T));
  EXPECT_TRUE(CopyToHost(Device::kCuda, values.data(), bytes.data(), bytes.span().size()).ok());
  return values;
}

std::vector<double> AsDoubles(const std::vector<std::uint16_t>& values) {
  std::vector<double> doubles;
  for (const std::uint16_t value : values) doubles.push_back(Bf16ToFloat(value));
  return doubles;
}

struct Results {
  std::vector<std::uint16_t> output, gradient;
};

// The arrays of one micro-batch's attention; results are NaN before they are written.
struct Arrays {
  Arrays(const ModelConfig& config, const MicroBatch& batch, std::int64_t end) {
    const std::int64_t rows = NumRows(batch), q = config.q_size(), width = q + 2 * config.kv_size();
    qkv_values = RandomRows(rows, end, width, 1);
    grad_values = RandomRows(rows, end, q, 2);
    qkv = OnDevice(qkv_values);
    grad_output = OnDevice(grad_values);
    output = std::make_unique<DeviceBytes>(grad_values.size() * 2);
    grad_qkv = std::make_unique<DeviceBytes>(qkv_values.size() * 2);
    lse = std::make_unique<DeviceBytes>(static_cast<std::uint64_t>(rows * config.num_heads) * 4);
  }
  Results Run(const FusedAttention& attention, Stream* stream) const {
    for (const auto* bytes : {&output, &grad_qkv, &lse}) (*bytes)->Fill(0xff);
    float* const sums = reinterpret_cast<float*>(lse->data());
    attention.Forward(qkv->data(), output->data(), sums);
    attention.Backward(qkv->data(), output->data(), sums, grad_output->data(), grad_qkv->data());
    const absl::Status fenced = stream->Synchronize();
    EXPECT_TRUE(fenced.ok()) << fenced;
    return {OnHost<std::uint16_t>(*output), OnHost<std::uint16_t>(*grad_qkv)};
  }

  std::vector<std::uint16_t> qkv_values, grad_values;
  std::unique_ptr<DeviceBytes> qkv, grad_output, output, grad_qkv, lse;
};

struct ExactResults {
  std::vector<double> output, gradient;
};

// The own kernel in fp32.
ExactResults RunExact(const ModelConfig& config, const MicroBatch& batch, const Arrays& arrays, Stream* stream) {
  const std::size_t rows = batch.token_ids.size();
  std::vector<std::int32_t> prompt_begin(rows, 0), prompt_end(rows, 0), own_begin(rows, -1), own_end(rows, -1), group(rows, -1);
  std::vector<std::int32_t> readers_begin, readers;
  std::int32_t last_prompt = -1;
  for (const PackedCompletion& completion : batch.completions) {
    if (completion.prompt_begin != last_prompt) {
      last_prompt = completion.prompt_begin;
      for (auto row = static_cast<std::size_t>(last_prompt); row < static_cast<std::size_t>(completion.prompt_end); ++row) {
        own_begin[row] = last_prompt;
        own_end[row] = completion.prompt_end;
        group[row] = static_cast<std::int32_t>(readers_begin.size());
      }
      readers_begin.push_back(static_cast<std::int32_t>(readers.size() / 2));
    }
    if (completion.begin == completion.end) continue;
    for (auto row = static_cast<std::size_t>(completion.begin); row < static_cast<std::size_t>(completion.end); ++row) {
      prompt_begin[row] = completion.prompt_begin;
      prompt_end[row] = completion.prompt_end;
      own_begin[row] = completion.begin;
      own_end[row] = completion.end;
    }
    readers.insert(readers.end(), {completion.begin, completion.end});
  }
  readers_begin.push_back(static_cast<std::int32_t>(readers.size() / 2));
  std::vector<std::unique_ptr<DeviceBytes>> indices;
  const auto ints = [&](const std::vector<std::int32_t>& values) {
    indices.push_back(OnDevice(values));
    return reinterpret_cast<const std::int32_t*>(indices.back()->data());
  };
  const auto qkv = OnDevice(Widened(arrays.qkv_values)), grad_output = OnDevice(Widened(arrays.grad_values));
  const DeviceBytes output(grad_output->span().size()), grad_qkv(qkv->span().size());
  const std::uint64_t sums_bytes = rows * static_cast<std::uint64_t>(config.num_heads) * 4;
  const DeviceBytes lse(sums_bytes), delta(sums_bytes);
  const PackedAttentionParams forward{.dtype = DType::kFp32,
                                      .rows = {.num_rows = static_cast<std::int64_t>(rows),
                                               .prompt_begin = ints(prompt_begin),
                                               .prompt_end = ints(prompt_end),
                                               .own_begin = ints(own_begin),
                                               .own_end = ints(own_end),
                                               .group = ints(group),
                                               .readers_begin = ints(readers_begin),
                                               .readers = ints(readers)},
                                      .num_heads = config.num_heads,
                                      .num_kv_heads = config.num_kv_heads,
                                      .head_dim = config.head_dim,
                                      .qkv = qkv->data(),
                                      .output = output.data(),
                                      .lse = reinterpret_cast<float*>(lse.data())};
  EXPECT_TRUE(PackedAttentionForward(forward, stream->handle()).ok());
  EXPECT_TRUE(PackedAttentionBackward({forward, grad_output->data(), reinterpret_cast<float*>(delta.data()), grad_qkv.data()},
                                      stream->handle())
                  .ok());
  EXPECT_TRUE(stream->Synchronize().ok());
  const std::vector<float> outputs = OnHost<float>(output), gradients = OnHost<float>(grad_qkv);
  return {{outputs.begin(), outputs.end()}, {gradients.begin(), gradients.end()}};
}

class AttentionGpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!HasCudaDevice()) GTEST_SKIP() << "no GPU is visible";
    arena_ = std::make_unique<DeviceBytes>(2048 * kMiB);
    arena_->Fill(0xff);
    stream_ = Stream::Create(Device::kCuda).value();
    scope_ = std::make_unique<ArenaScope>(arena_->span(), "activations", Device::kCuda);
  }
  static bool IsCudnnThere(const ModelConfig& config) {
    const bool is_served = CudnnAttention::Serves(config);
    if (!is_served) std::printf("cuDNN does not serve %s here\n", NameOf(config).c_str());
    return is_served;
  }
  void ExpectEqual(const std::string& what, const ModelConfig& config, const Results& results, const ExactResults& exact) {
    const std::vector<double> output = AsDoubles(results.output), gradient = AsDoubles(results.gradient);
    const double of_output = RelativeError(output, exact.output), of_gradient = RelativeError(gradient, exact.gradient);
    // Of queries, keys and values apart: a few wrong keys drown in the sum.
    const std::size_t q = static_cast<std::size_t>(config.q_size()), kv = static_cast<std::size_t>(config.kv_size());
    double errors[3], largest[3] = {};
    std::size_t first = 0, part = 0;
    for (const std::size_t columns : {q, kv, kv}) {
      std::vector<double> a, b;
      for (std::size_t i = 0; i < gradient.size(); ++i) {
        const std::size_t column = i % (q + 2 * kv);
        if (column < first || column >= first + columns) continue;
        a.push_back(gradient[i]);
        b.push_back(exact.gradient[i]);
        largest[part] = std::max(largest[part], std::abs(a.back() - b.back()));
      }
      errors[part++] = RelativeError(a, b);
      first += columns;
    }
    std::printf("%s, %s: output %.2e, gradient %.2e: queries %.2e (%.2e), keys %.2e (%.2e), values %.2e (%.2e)\n", what.c_str(),
                NameOf(config).c_str(), of_output, of_gradient, errors[0], largest[0], errors[1], largest[1], errors[2],
                largest[2]);
    EXPECT_LT(of_output, 1e-2) << what;
    for (const double error : errors) EXPECT_LT(error, 1e-2) << what;
  }

  std::unique_ptr<DeviceBytes> arena_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<ArenaScope> scope_;
};

TEST_F(AttentionGpuTest, EachLibraryEqualsTheOwnKernel) {
  const MicroBatch batch = RaggedBatch();
  const AttentionRows rows(batch);
  ASSERT_TRUE(rows.is_served);
  for (const ModelConfig& config : {HeadsOf(4, 2, 16), HeadsOf(9, 3, 64), HeadsOf(4, 4, 64), HeadsOf(8, 1, 64),
                                    HeadsOf(4, 4, 128), HeadsOf(8, 2, 128), HeadsOf(16, 2, 128), HeadsOf(4, 1, 256)}) {
    SCOPED_TRACE(NameOf(config));
    const Arrays arrays(config, batch, rows.num_own());
    const ExactResults exact = RunExact(config, batch, arrays, stream_.get());
    ASSERT_TRUE(FlashAttention::Serves(config));
    ExpectEqual("flash", config, arrays.Run(FlashAttention(config, rows, stream_->handle()), stream_.get()), exact);
    if (!IsCudnnThere(config)) continue;
    CudnnGraphs graphs(config);
    ExpectEqual("cuDNN", config,
                arrays.Run(CudnnAttention(config, rows, kScratchLimitBytes, &graphs, stream_->handle()), stream_.get()), exact);
  }
}

TEST_F(AttentionGpuTest, PromptsThatNobodySharesNeedNoSecondCall) {
  const ModelConfig config = HeadsOf(4, 2, 64);
  const MicroBatch batch = PackLengths({{200, 0}, {33, 150}});
  const AttentionRows rows(batch);
  ASSERT_TRUE(rows.is_served);
  ASSERT_EQ(rows.num_queries(), 0);
  const Arrays arrays(config, batch, rows.num_own());
  const ExactResults exact = RunExact(config, batch, arrays, stream_.get());
  ExpectEqual("flash", config, arrays.Run(FlashAttention(config, rows, stream_->handle()), stream_.get()), exact);
  if (!IsCudnnThere(config)) return;
  CudnnGraphs graphs(config);
  ExpectEqual("cuDNN", config,
              arrays.Run(CudnnAttention(config, rows, kScratchLimitBytes, &graphs, stream_->handle()), stream_.get()), exact);
}

TEST_F(AttentionGpuTest, FlashAttentionGivesTheSameBitsTwice) {
  const ModelConfig config = HeadsOf(8, 2, 128);
  const MicroBatch batch = RaggedBatch();
  const AttentionRows rows(batch);
  const Arrays arrays(config, batch, rows.num_own());
  const Results first = arrays.Run(FlashAttention(config, rows, stream_->handle()), stream_.get());
  arena_->Fill(0);
  const Results second = arrays.Run(FlashAttention(config, rows, stream_->handle()), stream_.get());
  EXPECT_EQ(first.output, second.output);
  EXPECT_EQ(first.gradient, second.gradient);
}

// Whatever the limit: the same result, within it where one head fits, and nothing written beyond what was allocated.
TEST_F(AttentionGpuTest, CudnnSplitsItsWorkIntoBoundedScratch) {
  const ModelConfig config = HeadsOf(16, 4, 128);
  if (!IsCudnnThere(config)) GTEST_SKIP() << "no cuDNN attention on this card";
  const MicroBatch batch = RaggedBatch();
  const AttentionRows rows(batch);
  const auto scratch_within = [&](std::int64_t limit) {
    const AttentionScratch scratch =
        PlanAttentionScratch(config, StorageFormat::kBf16, {.scratch_limit_bytes = limit}, NumRows(batch));
    return std::max(scratch.forward_bytes, scratch.backward_bytes);
  };
  const std::int64_t one_head = scratch_within(1);
  const Arrays arrays(config, batch, rows.num_own());
  const ExactResults exact = RunExact(config, batch, arrays, stream_.get());
  CudnnGraphs graphs(config);
  Results whole;
  for (const std::int64_t limit : {kScratchLimitBytes, 2 * one_head, std::int64_t{1}}) {
    const CudnnAttention attention(config, rows, limit, &graphs, stream_->handle());
    const DeviceBytes scratch(64 * static_cast<std::uint64_t>(kMiB));
    DeviceBytes* const guarded = const_cast<DeviceBytes*>(&scratch);
    guarded->Fill(0xff);
    const ArenaScope inner(scratch.span(), "scratch", Device::kCuda);
    const Results results = arrays.Run(attention, stream_.get());
    const std::uint64_t peak = inner.peak_bytes();
    const std::int64_t told = scratch_within(limit);
    std::printf("limit %lld bytes: peak %llu, told %lld\n", static_cast<long long>(limit), static_cast<unsigned long long>(peak),
                static_cast<long long>(told));
    EXPECT_LE(peak, static_cast<std::uint64_t>(told));
    const std::vector<std::uint8_t> bytes = OnHost<std::uint8_t>(scratch);
    EXPECT_EQ(std::find_if(bytes.begin() + static_cast<std::ptrdiff_t>(peak), bytes.end(),
                           [](std::uint8_t byte) { return byte != 0xff; }) -
                  bytes.begin(),
              static_cast<std::ptrdiff_t>(bytes.size()));
    ExpectEqual(absl::StrCat("cuDNN within ", limit), config, results, exact);
    if (limit == kScratchLimitBytes) whole = results;
    EXPECT_EQ(results.output, whole.output);
  }
}

TEST_F(AttentionGpuTest, CudnnBuildsNoGraphForALengthInTheSameBucket) {
  const ModelConfig config = HeadsOf(4, 2, 64);
  if (!IsCudnnThere(config)) GTEST_SKIP() << "no cuDNN attention on this card";
  CudnnGraphs graphs(config);
  const auto run = [&](std::size_t length) {
    const MicroBatch batch = PackLengths({{length, 1, length}});
    const AttentionRows rows(batch);
    const Arrays arrays(config, batch, rows.num_own());
    const ExactResults exact = RunExact(config, batch, arrays, stream_.get());
    const CudnnAttention attention(config, rows, kScratchLimitBytes, &graphs, stream_->handle());
    const MonotonicTime begin = MonotonicTime::Now();
    const Results results = arrays.Run(attention, stream_.get());
    std::printf("length %zu: %.0f ms, %zu graphs\n", length, absl::ToDoubleMilliseconds(MonotonicTime::Now() - begin),
                graphs.num_kept());
    ExpectEqual(absl::StrCat("cuDNN, length ", length), config, results, exact);
  };
  run(130);
  ASSERT_EQ(graphs.num_kept(), 4u);  // forward and backward of both calls
  run(131);
  run(159);
  EXPECT_EQ(graphs.num_kept(), 4u);
  for (std::size_t length = 200; length < 1500; length += 60) run(length);
  EXPECT_LE(graphs.num_kept(), CudnnGraphs::kMostKept);
}

// Equal groups give equal rows wherever they lie: qkv and its gradient have 2.2e9 elements.
TEST_F(AttentionGpuTest, CudnnReachesRowsBeyondTwoToThe31Elements) {
  const ModelConfig config = HeadsOf(32, 8, 128);
  if (!IsCudnnThere(config)) GTEST_SKIP() << "no cuDNN attention on this card";
  constexpr std::size_t kGroups = 180, kRows = 2000;
  const std::int64_t q = config.q_size(), width = q + 2 * config.kv_size();
  const MicroBatch one = PackLengths({{900, 600, 500}});
  const MicroBatch all = PackLengths(std::vector<std::vector<std::size_t>>(kGroups, {900, 600, 500}));
  ASSERT_EQ(all.token_ids.size(), kGroups * kRows);
  ASSERT_GT(NumRows(all) * width, std::int64_t{1} << 31);
  const AttentionRows one_rows(one), all_rows(all);
  const Arrays arrays(config, one, one_rows.num_own());
  CudnnGraphs graphs(config);
  const Results alone =
      arrays.Run(CudnnAttention(config, one_rows, kScratchLimitBytes, &graphs, stream_->handle()), stream_.get());
  const std::uint64_t qkv_bytes = arrays.qkv->span().size(), output_bytes = arrays.output->span().size();
  const DeviceBytes qkv(kGroups * qkv_bytes), grad_qkv(kGroups * qkv_bytes), output(kGroups * output_bytes),
      grad_output(kGroups * output_bytes), lse(kGroups * arrays.lse->span().size());
  for (std::size_t n = 0; n < kGroups; ++n) {
    ASSERT_EQ(cudaMemcpy(qkv.data() + n * qkv_bytes, arrays.qkv->data(), qkv_bytes, cudaMemcpyDeviceToDevice), cudaSuccess);
    ASSERT_EQ(
        cudaMemcpy(grad_output.data() + n * output_bytes, arrays.grad_output->data(), output_bytes, cudaMemcpyDeviceToDevice),
        cudaSuccess);
  }
  const CudnnAttention attention(config, all_rows, kScratchLimitBytes, &graphs, stream_->handle());
  float* const sums = reinterpret_cast<float*>(lse.data());
  attention.Forward(qkv.data(), output.data(), sums);
  attention.Backward(qkv.data(), output.data(), sums, grad_output.data(), grad_qkv.data());
  const absl::Status fenced = stream_->Synchronize();
  ASSERT_TRUE(fenced.ok()) << fenced;
  for (const std::size_t n : {std::size_t{0}, kGroups / 2, kGroups - 1}) {
    std::vector<std::uint16_t> outputs(output_bytes / 2), gradients(qkv_bytes / 2);
    ASSERT_TRUE(CopyToHost(Device::kCuda, outputs.data(), output.data() + n * output_bytes, output_bytes).ok());
    ASSERT_TRUE(CopyToHost(Device::kCuda, gradients.data(), grad_qkv.data() + n * qkv_bytes, qkv_bytes).ok());
    const double of_output = RelativeError(AsDoubles(outputs), AsDoubles(alone.output)),
                 of_gradient = RelativeError(AsDoubles(gradients), AsDoubles(alone.gradient));
    std::printf("group %zu: output %.2e, gradient %.2e\n", n, of_output, of_gradient);
    EXPECT_LT(of_output, 1e-3) << n;
    EXPECT_LT(of_gradient, 5e-3) << n;
  }
}

}  // namespace
}  // namespace tandem

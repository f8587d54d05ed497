#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/trainer_server/support/gpu_policy.h"
#include "trainer_server/policy/cuda_layer_inputs.h"
#include "trainer_server/policy/policy_memory.h"

namespace tandem {
namespace {

using testing::AllLayers;
using testing::Cosine;
using testing::CpuPolicy;
using testing::DeviceBytes;
using testing::GpuPolicy;
using testing::Group;
using testing::Pack;
using testing::PolicyGpuTest;
using testing::RandomIds;
using testing::Result;
using testing::TinyAdapter;
using testing::TinyModel;

class LayerInputsGpuTest : public PolicyGpuTest {
 protected:
  LayerInputsGpuTest() : PolicyGpuTest(std::uint64_t{1} << 30) {}
};

cudaStream_t Handle(const Stream* stream) { return static_cast<cudaStream_t>(stream->handle()); }

// Holds the stream for 20 ms before whatever comes next.
void Delay(const Stream* stream) {
  ASSERT_EQ(cudaLaunchHostFunc(
                Handle(stream), [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }, nullptr),
            cudaSuccess);
}

unsigned char Pattern(int step, int layer) { return static_cast<unsigned char>(1 + (step * 31 + layer * 7) % 250); }

// The compute stream writes and reads at once, every copy comes 20 ms late: only the events keep them in order.
void RunDelayed(int num_layers, int num_slots, int num_steps, Stream* compute) {
  constexpr std::size_t kBytes = 1 << 20;
  const auto copy = Stream::Create(Device::kCuda);
  ASSERT_TRUE(copy.ok()) << copy.status();
  LayerInputHost host;
  const std::uint64_t host_bytes = kBytes * static_cast<std::size_t>(num_layers - num_slots);
  ASSERT_TRUE(host.Reserve(host_bytes, host_bytes).ok());
  const DeviceBytes read(kBytes * static_cast<std::size_t>(num_layers));
  std::vector<unsigned char> seen(read.span().size());
  for (int step = 0; step < num_steps; ++step) {
    {
      CudaLayerInputBytes inputs(num_layers, num_slots, kBytes, &host, compute, copy->get(), nullptr);
      for (int layer = 0; layer < num_layers; ++layer) {
        Delay(copy->get());
        ASSERT_EQ(cudaMemsetAsync(inputs.Place(layer), Pattern(step, layer), kBytes, Handle(compute)), cudaSuccess);
        inputs.Keep(layer);
      }
      for (int layer = num_layers - 1; layer >= 0; --layer) {
        ASSERT_EQ(cudaMemcpyAsync(read.data() + static_cast<std::size_t>(layer) * kBytes, inputs.Fetch(layer), kBytes,
                                  cudaMemcpyDeviceToDevice, Handle(compute)),
                  cudaSuccess);
        Delay(copy->get());
        inputs.Release(layer);
      }
    }
    ASSERT_TRUE(compute->Synchronize().ok());
    ASSERT_TRUE(CopyToHost(Device::kCuda, seen.data(), read.data(), seen.size()).ok());
    for (int layer = 0; layer < num_layers; ++layer) {
      for (const std::size_t at : {std::size_t{0}, kBytes / 2, kBytes - 1}) {
        ASSERT_EQ(seen[static_cast<std::size_t>(layer) * kBytes + at], Pattern(step, layer))
            << "step " << step << " layer " << layer << " of " << num_layers << " in " << num_slots << " slots, byte " << at;
      }
    }
  }
}

TEST_F(LayerInputsGpuTest, C33CopiesThatComeLateChangeNothing) {
  RunDelayed(3, 2, 200, stream_.get());
  RunDelayed(7, 2, 5, stream_.get());
  RunDelayed(7, 3, 5, stream_.get());
  RunDelayed(4, 4, 2, stream_.get());
}

// More rows than a tile, more layers than slots: what the arena leaves room for decides what travels, and no bit of a gradient.
TEST_F(LayerInputsGpuTest, C33GradientsAreTheSameWhereverInputsAreKept) {
  ModelConfig config = testing::TinyConfig();
  config.num_layers = 6;
  config.max_positions = 8192;
  const TinyModel base(config);
  const TinyAdapter adapter(config, 4, testing::AllLinearKinds(), 0.2f, 3);
  const std::vector<Group> groups = {{RandomIds(1, 1500), {RandomIds(2, 1200), RandomIds(3, 1), RandomIds(4, 2100)}}};
  const std::vector<MicroBatch> batches = Pack(groups);
  ASSERT_EQ(batches.size(), 1u);
  const auto rows = static_cast<std::int64_t>(batches[0].token_ids.size()),
             head_rows = static_cast<std::int64_t>(batches[0].head_rows.size());
  ASSERT_GT(rows, 2 * kCudaTileRows);
  const Result cpu = CpuPolicy(base, AllLayers(), adapter).Run(batches, false);
  for (const StorageFormat format : {StorageFormat::kFp32, StorageFormat::kBf16}) {
    const PolicyMemory memory = PlanPolicyMemory(config, format, {}, {.rank = 4, .rows = rows, .head_rows = head_rows});
    for (const bool keeps_attention : {false, true}) {
      const std::uint64_t slot_bytes = memory.layer_input_bytes + (keeps_attention ? memory.layer_attention_bytes : 0);
      PolicyDevice limited = device();
      if (!keeps_attention) limited.host_limit_bytes = 5 * slot_bytes;  // not enough for attention's outputs
      std::vector<Result> results;
      for (const int num_slots : {6, 2, 3}) {
        if (!keeps_attention && num_slots == 6) continue;  // all in the arena is enough for three with attention's outputs
        GpuPolicy policy(base, format, AllLayers(), adapter, limited);
        const std::uint64_t bytes = memory.working_bytes + static_cast<std::uint64_t>(num_slots) * slot_bytes;
        const ArenaScope arena(arena_->span().first((bytes + slot_bytes / 2) / 256 * 256), "activations", Device::kCuda);
        results.push_back(policy.Run(batches, false));
        const PassMemory pass = policy.model()->last_pass();
        std::printf("%s, %d slots, attention %s: arena %llu bytes, peak %llu, to the host %llu\n", StorageFormatName(format),
                    num_slots, pass.keeps_attention ? "kept" : "computed again", static_cast<unsigned long long>(bytes),
                    static_cast<unsigned long long>(arena.peak_bytes()), static_cast<unsigned long long>(pass.offloaded_bytes));
        EXPECT_EQ(pass.keeps_attention, keeps_attention);
        EXPECT_EQ(pass.layers_on_device, num_slots);
        EXPECT_LE(arena.peak_bytes(), bytes + slot_bytes / 2);
        ASSERT_EQ(results.back().gradient.size(), cpu.gradient.size());
        EXPECT_EQ(results.back().gradient, results.front().gradient) << num_slots << " slots";
      }
      const double cosine = Cosine(cpu.gradient, results.front().gradient);
      std::printf("%s, %lld rows: gradient cosine 1 - %.2e\n", StorageFormatName(format), static_cast<long long>(rows),
                  1 - cosine);
      EXPECT_GE(cosine, format == StorageFormat::kFp32 ? 0.99999 : 0.99);
    }
  }
}

TEST_F(LayerInputsGpuTest, InputsBeyondTheHostsLimitAreRefusedByName) {
  ModelConfig config = testing::TinyConfig();
  config.num_layers = 6;
  const TinyModel base(config);
  const TinyAdapter adapter(config, 4, testing::AllLinearKinds(), 0.2f, 3);
  const std::vector<MicroBatch> batches = Pack({{RandomIds(1, 100), {RandomIds(2, 200)}}});
  const PolicyMemory memory = PlanPolicyMemory(config, StorageFormat::kBf16, {}, {.rank = 4, .rows = 300, .head_rows = 200});
  PolicyDevice limited = device();
  limited.host_limit_bytes = memory.layer_input_bytes;
  GpuPolicy policy(base, StorageFormat::kBf16, AllLayers(), adapter, limited);
  {
    const std::uint64_t bytes = memory.working_bytes + 2 * memory.layer_input_bytes;
    const ArenaScope arena(arena_->span().first((bytes + 1024) / 256 * 256), "activations", Device::kCuda);
    const auto refused = policy.model()->Forward(batches[0], false, 3);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted) << refused.status();
    EXPECT_THAT(std::string(refused.status().message()), ::testing::HasSubstr("layer inputs of 300 rows"));
  }
  EXPECT_TRUE(policy.model()->Forward(batches[0], false, 3).ok());  // where the arena holds them all
}

class LongPackGpuTest : public PolicyGpuTest {
 protected:
  LongPackGpuTest() : PolicyGpuTest(std::uint64_t{48} << 30) {}
};

// 720,000 rows of 3,072 features of q, k and v: each array of them has more than 2^31 elements. The gradient of 720 equal
// sequences is 720 times that of one.
TEST_F(LongPackGpuTest, RowsBeyondTwoToThe31ElementsTrainAsOneOfThem) {
  constexpr int kSequences = 720;
  ModelConfig config = testing::TinyConfig();
  config.hidden_size = 1024;
  config.intermediate_size = 1024;
  config.num_heads = 8;
  config.num_kv_heads = 8;
  config.head_dim = 128;
  const TinyModel base(config);
  testing::ScaleMatrices(base, 0.25f);
  testing::RoundWeights(base);
  const TinyAdapter adapter(config, 4, testing::AllLinearKinds(), 0.05f, 3);
  const Group one = {RandomIds(1, 992), {RandomIds(2, 8)}};
  const std::vector<MicroBatch> single = Pack({one}), many = Pack(std::vector<Group>(kSequences, one), 1 << 20);
  ASSERT_EQ(many.size(), 1u);
  ASSERT_GT(many[0].token_ids.size() * 3072, std::size_t{1} << 31);
  PolicyDevice limited = device();
  limited.host_limit_bytes = std::uint64_t{8} << 30;
  GpuPolicy policy(base, StorageFormat::kBf16, AllLayers(4, 0.05f), adapter, limited);
  std::vector<std::vector<double>> gradients;
  for (const MicroBatch* batch : {&single[0], &many[0]}) {
    ASSERT_TRUE(policy.model()->ZeroGradients().ok());
    const auto scores = policy.model()->Forward(*batch, false, 3);
    ASSERT_TRUE(scores.ok()) << scores.status();
    std::vector<double> shares(scores->logprobs.size());
    for (std::size_t i = 0; i < shares.size(); ++i) shares[i] = 1.0 - 0.2 * static_cast<double>(i % 8);
    const absl::Status status = policy.model()->Backward(shares, {});
    ASSERT_TRUE(status.ok()) << status;
    gradients.push_back(policy.Gradients());
  }
  for (double& value : gradients[0]) value *= kSequences;
  const double cosine = Cosine(gradients[0], gradients[1]), relative = testing::RelativeError(gradients[1], gradients[0]);
  std::printf("%zu rows: gradient cosine 1 - %.2e, relative %.2e\n", many[0].token_ids.size(), 1 - cosine, relative);
  EXPECT_GE(cosine, 0.9999);
  EXPECT_LT(relative, 0.02);
}

}  // namespace
}  // namespace tandem

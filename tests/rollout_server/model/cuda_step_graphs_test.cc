// Captured steps of one memset each: which are kept, and what they take.
#include "rollout_server/model/cuda_step_graphs.h"

#include <cuda_runtime_api.h>

#include <cstdio>
#include <limits>

#include "common/base/units.h"
#include "common/gpu/cuda_status.h"
#include "common/gpu/stream.h"
#include "gtest/gtest.h"
#include "tests/support/device_bytes.h"

namespace tandem {
namespace {

using testing::DeviceBytes;

class StepGraphsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!HasCudaDevice()) GTEST_SKIP() << "no CUDA device";
    stream_ = *Stream::Create(Device::kCuda);
    memory_ = std::make_unique<DeviceBytes>(kNodes);
  }
  // A step that fills the memory with `value`, `nodes` bytes one by one.
  absl::Status Run(StepGraphs* graphs, const StepGraphKey& key, int value, int nodes = 1) {
    ++num_runs_;
    return graphs->Run(key, [&] {
      ++num_enqueued_;
      for (int i = 0; i < nodes; ++i) {
        TANDEM_RETURN_IF_ERROR(CudaToStatus(
            cudaMemsetAsync(memory_->data() + i, value, 1, static_cast<cudaStream_t>(stream_->handle())), "a step's node"));
      }
      return absl::OkStatus();
    });
  }
  int Value(int at) {
    EXPECT_EQ(stream_->Synchronize(), absl::OkStatus());
    std::uint8_t value = 0;
    EXPECT_EQ(CopyToHost(Device::kCuda, &value, memory_->data() + at, 1), absl::OkStatus());
    return value;
  }

  static constexpr int kNodes = 4000;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<DeviceBytes> memory_;
  int num_runs_ = 0, num_enqueued_ = 0;
};

TEST_F(StepGraphsTest, RunsThenCapturesThenReplays) {
  StepGraphs graphs(stream_->handle(), kGiB);
  for (int run = 0; run < 5; ++run) {
    memory_->Fill(0);
    ASSERT_EQ(Run(&graphs, {.num_rows = 1}, 7), absl::OkStatus());
    EXPECT_EQ(Value(0), 7) << run;
    EXPECT_EQ(graphs.num_graphs(), run == 0 ? 0u : 1u);
  }
  EXPECT_EQ(num_enqueued_, 2);
}

TEST_F(StepGraphsTest, ForgetsTheGraphsOfOneAdapter) {
  StepGraphs graphs(stream_->handle(), kGiB);
  for (int run = 0; run < 2; ++run) {
    for (std::uint64_t adapter = 0; adapter < 3; ++adapter) {
      for (std::int64_t rows = 1; rows <= 4; ++rows) {
        ASSERT_EQ(Run(&graphs, {.num_rows = rows, .adapter = adapter}, 1), absl::OkStatus());
      }
    }
  }
  ASSERT_EQ(graphs.num_graphs(), 12u);
  const std::uint64_t bytes = graphs.bytes();
  graphs.Forget(1);
  EXPECT_EQ(graphs.num_graphs(), 8u);
  EXPECT_LE(graphs.bytes(), bytes);
  num_enqueued_ = 0;
  for (std::uint64_t adapter = 0; adapter < 3; ++adapter) {
    ASSERT_EQ(Run(&graphs, {.num_rows = 2, .adapter = adapter}, 9), absl::OkStatus());
  }
  EXPECT_EQ(num_enqueued_, 1) << "the forgotten one, as it is";
  EXPECT_EQ(Value(0), 9);
}

// Large graphs one after the other, each dropped while it may still run.
TEST_F(StepGraphsTest, TakesNoMoreThanItsBytesByDroppingTheOldest) {
  StepGraphs unbounded(stream_->handle(), std::numeric_limits<std::uint64_t>::max());
  constexpr int kGraphs = 24;
  const auto run_all = [&](StepGraphs* graphs) {
    for (std::int64_t rows = 0; rows < kGraphs; ++rows) {
      for (int run = 0; run < 3; ++run) {
        ASSERT_EQ(Run(graphs, {.num_rows = rows}, static_cast<int>(rows) + 1, kNodes), absl::OkStatus());
      }
      EXPECT_EQ(Value(kNodes - 1), rows + 1);
    }
  };
  run_all(&unbounded);
  std::printf("%d graphs of %d nodes: %s\n", kGraphs, kNodes, FormatBytes(unbounded.bytes()).c_str());
  ASSERT_EQ(unbounded.num_graphs(), std::size_t{kGraphs});
  ASSERT_GT(unbounded.bytes(), 8 * kMiB) << "the driver gives out 2 MiB at a time";
  const std::uint64_t limit = unbounded.bytes() / 4;
  unbounded.Forget(0);
  EXPECT_EQ(unbounded.bytes(), 0u);

  StepGraphs graphs(stream_->handle(), limit);
  const std::uint64_t before = DriverMemory(Device::kCuda)->free_bytes;
  for (int round = 0; round < 3; ++round) {
    run_all(&graphs);
    EXPECT_LE(graphs.bytes(), limit) << "one alone is always kept";
  }
  const std::uint64_t after = DriverMemory(Device::kCuda)->free_bytes;
  std::printf("bounded by %s: %zu graphs of %s, the driver's free memory fell by %s\n", FormatBytes(limit).c_str(),
              graphs.num_graphs(), FormatBytes(graphs.bytes()).c_str(), FormatBytes(before > after ? before - after : 0).c_str());
  num_enqueued_ = 0;
  ASSERT_EQ(Run(&graphs, {.num_rows = kGraphs - 1}, 99, kNodes), absl::OkStatus());
  EXPECT_EQ(num_enqueued_, 0) << "the newest is kept";
  EXPECT_EQ(Value(0), 99);
}

}  // namespace
}  // namespace tandem

// Captured steps of small kernels: which are kept, and what they take.
#include "rollout_server/model/cuda_step_graphs.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "common/base/units.h"
#include "common/gpu/stream.h"
#include "gtest/gtest.h"
#include "kernels/embedding/embedding.h"
#include "tests/support/device_bytes.h"

namespace tandem {
namespace {

using testing::DeviceBytes;

class StepGraphsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!HasCudaDevice()) GTEST_SKIP() << "no CUDA device";
    stream_ = *Stream::Create(Device::kCuda);
    memory_ = std::make_unique<DeviceBytes>((kValues + 1 + kNodes) * sizeof(float));
    memory_->Fill(0);
    std::vector<float> values(kValues);
    for (std::size_t i = 0; i < kValues; ++i) values[i] = static_cast<float>(i);
    ASSERT_EQ(memory_->Upload(values.data(), kValues * sizeof(float)), absl::OkStatus());
  }
  // A step that writes `value`, below kValues, into `nodes` places one by one. A captured step keeps its value.
  absl::Status Run(StepGraphs* graphs, const StepGraphKey& key, std::size_t value, std::size_t nodes = 1) {
    return graphs->Run(key, [&] {
      ++num_enqueued_;
      for (std::size_t i = 0; i < nodes; ++i) {
        TANDEM_RETURN_IF_ERROR(Embedding({.dtype = DType::kFp32,
                                          .table = floats() + value,
                                          .token_ids = reinterpret_cast<const std::uint32_t*>(floats() + kValues),
                                          .output = floats() + kValues + 1 + i,
                                          .num_rows = 1,
                                          .width = 1},
                                         Device::kCuda, stream_->handle()));
      }
      return absl::OkStatus();
    });
  }
  float Value(std::size_t at) {
    EXPECT_EQ(stream_->Synchronize(), absl::OkStatus());
    float value = -1;
    EXPECT_EQ(CopyToHost(Device::kCuda, &value, floats() + kValues + 1 + at, sizeof(value)), absl::OkStatus());
    return value;
  }
  float* floats() const { return reinterpret_cast<float*>(memory_->data()); }

  static constexpr std::size_t kValues = 100, kNodes = 2000;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<DeviceBytes> memory_;  // values, the id 0, places
  int num_enqueued_ = 0;
};

TEST_F(StepGraphsTest, RunsThenCapturesThenReplays) {
  StepGraphs graphs(stream_->handle(), {});
  for (int run = 0; run < 5; ++run) {
    ASSERT_EQ(Run(&graphs, {.num_rows = 2}, 8), absl::OkStatus());
    EXPECT_EQ(Value(0), 8);
    ASSERT_EQ(Run(&graphs, {.num_rows = 1}, 7), absl::OkStatus());
    EXPECT_EQ(Value(0), 7) << run;
    EXPECT_EQ(graphs.num_graphs(), run == 0 ? 0u : 2u);
  }
  EXPECT_EQ(num_enqueued_, 4);
}

TEST_F(StepGraphsTest, ForgetsTheGraphsOfOneAdapter) {
  StepGraphs graphs(stream_->handle(), {});
  for (int run = 0; run < 2; ++run) {
    for (std::uint64_t adapter = 0; adapter < 3; ++adapter) {
      for (std::int64_t rows = 1; rows <= 4; ++rows) {
        ASSERT_EQ(Run(&graphs, {.num_rows = rows, .adapter = adapter}, 1), absl::OkStatus());
      }
    }
  }
  ASSERT_EQ(graphs.num_graphs(), 12u);
  graphs.Forget(1);
  EXPECT_EQ(graphs.num_graphs(), 8u);
  num_enqueued_ = 0;
  for (const std::uint64_t adapter : {0, 2, 1}) {
    ASSERT_EQ(Run(&graphs, {.num_rows = 2, .adapter = adapter}, 9), absl::OkStatus());
    EXPECT_EQ(Value(0), adapter == 1 ? 9 : 1) << "adapter " << adapter << ", captured with 1";
  }
  EXPECT_EQ(num_enqueued_, 1) << "the forgotten one, as it is";
}

TEST_F(StepGraphsTest, KeepsTheKeysThatRanLast) {
  StepGraphs graphs(stream_->handle(), {.max_keys = 5});
  for (std::int64_t rows = 0; rows < 20; ++rows) {
    for (int run = 0; run < 3; ++run) {
      // Dropped while it may still run.
      ASSERT_EQ(Run(&graphs, {.num_rows = rows}, static_cast<std::size_t>(rows), kNodes), absl::OkStatus());
    }
    ASSERT_EQ(Run(&graphs, {.num_rows = 0}, 0, kNodes), absl::OkStatus());
    EXPECT_LE(graphs.num_graphs(), 5u);
  }
  num_enqueued_ = 0;
  for (const std::int64_t rows : {0, 16, 17, 18, 19}) {
    ASSERT_EQ(Run(&graphs, {.num_rows = rows}, 99, kNodes), absl::OkStatus());
    EXPECT_EQ(Value(kNodes - 1), rows);
  }
  EXPECT_EQ(num_enqueued_, 0) << "kept";
  ASSERT_EQ(Run(&graphs, {.num_rows = 15}, 50, kNodes), absl::OkStatus());
  EXPECT_EQ(Value(kNodes - 1), 50) << "dropped, so run as it is";
}

TEST_F(StepGraphsTest, HalfOfTheRoomIsLeftToStepsThatComeByThemselves) {
  StepGraphs graphs(stream_->handle(), {.max_keys = 6});
  for (std::int64_t rows = 0; rows < 3; ++rows) {
    EXPECT_TRUE(graphs.has_room_ahead()) << rows;
    for (int run = 0; run < 2; ++run) ASSERT_EQ(Run(&graphs, {.num_rows = rows}, 1), absl::OkStatus());
  }
  EXPECT_FALSE(graphs.has_room_ahead());
  graphs.Forget(0);
  EXPECT_TRUE(graphs.has_room_ahead());
}

// Graphs of about 4 MiB. What tests before this one left with the driver serves some of them.
TEST_F(StepGraphsTest, StaysWithinItsBytesAndKeepsWhatRanLast) {
  constexpr std::int64_t kGraphs = 40;
  const auto run_all = [&](StepGraphs* graphs) {
    for (std::int64_t rows = 0; rows < kGraphs; ++rows) {
      for (int run = 0; run < 3; ++run) {
        ASSERT_EQ(Run(graphs, {.num_rows = rows}, static_cast<std::size_t>(rows), kNodes), absl::OkStatus());
      }
      EXPECT_EQ(Value(kNodes - 1), rows);
    }
  };
  constexpr std::uint64_t kLimit = 40 * kMiB, kPiece = 8 * kMiB;
  const auto free_bytes = [] { return DriverMemory(Device::kCuda)->free_bytes; };
  const std::uint64_t before = free_bytes();
  {
    StepGraphs graphs(stream_->handle(), {.max_bytes = kLimit});
    for (int round = 0; round < 3; ++round) {
      run_all(&graphs);
      std::printf("limit %s, round %d: %zu graphs of %zu kernels, %s\n", FormatBytes(kLimit).c_str(), round, graphs.num_graphs(),
                  kNodes, FormatBytes(graphs.bytes()).c_str());
      EXPECT_LE(graphs.bytes(), kLimit + kPiece);
      EXPECT_LE(before - std::min(before, free_bytes()), kLimit + kPiece);
    }
    EXPECT_GT(graphs.num_graphs(), 4u);
    EXPECT_LT(graphs.num_graphs(), static_cast<std::size_t>(kGraphs));
    num_enqueued_ = 0;
    ASSERT_EQ(Run(&graphs, {.num_rows = kGraphs - 4}, 99, kNodes), absl::OkStatus());
    EXPECT_EQ(Value(kNodes - 1), kGraphs - 4);
    EXPECT_EQ(num_enqueued_, 0) << "one of the last";
  }
  StepGraphs graphs(stream_->handle(), {});
  run_all(&graphs);
  EXPECT_EQ(graphs.num_graphs(), static_cast<std::size_t>(kGraphs));
  EXPECT_GT(before - std::min(before, free_bytes()), kLimit + kPiece) << "what the limit kept away";
}

// As when the other daemon makes its context while this one captures its first steps.
TEST_F(StepGraphsTest, MemoryThatOthersTakeIsNotTakenForTheGraphs) {
  constexpr std::int64_t kGraphs = 8;
  std::atomic<bool> is_done = false;
  std::vector<std::unique_ptr<DeviceBytes>> taken;
  std::thread other([&] {
    while (!is_done && taken.size() < 200) {
      taken.push_back(std::make_unique<DeviceBytes>(64 * kMiB));
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  });
  StepGraphs graphs(stream_->handle(), {});
  for (std::int64_t rows = 0; rows < kGraphs; ++rows) {
    for (int run = 0; run < 2; ++run) EXPECT_EQ(Run(&graphs, {.num_rows = rows}, 1, kNodes), absl::OkStatus());
  }
  is_done = true;
  other.join();
  std::printf("%zu x 64 MiB taken beside %zu graphs of %zu kernels: %s counted\n", taken.size(), graphs.num_graphs(), kNodes,
              FormatBytes(graphs.bytes()).c_str());
  EXPECT_EQ(graphs.num_graphs(), static_cast<std::size_t>(kGraphs));
}

}  // namespace
}  // namespace tandem

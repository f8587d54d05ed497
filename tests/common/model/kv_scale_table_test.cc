#include "common/model/kv_scale_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace tandem {
namespace {

using ::testing::HasSubstr;

ModelConfig ThreeLayers() {
  ModelConfig config;
  config.num_layers = 3;
  config.num_kv_heads = 2;
  return config;
}

// The memory of a pool, zeroed when it is made, and a daemon's view of it.
struct Memory {
  ModelConfig config = ThreeLayers();
  std::vector<std::byte> bytes = std::vector<std::byte>(KvScaleTable::Bytes(config) + 64);

  KvScaleTable Table(const std::string& digest = "d1") { return {config, digest, Device::kCpu, bytes}; }
  void Fill() {
    for (int layer = 0; layer < 3; ++layer) {
      for (int i = 0; i < 4; ++i) Table().layer(layer)[i] = std::ldexp(1.f, layer * 4 + i);
    }
  }
};

TEST(KvScaleTable, ScalesCountOnceTheRecordStands) {
  Memory memory;
  EXPECT_FALSE(*memory.Table().AreSet());
  memory.Fill();
  EXPECT_FALSE(*memory.Table().AreSet()) << "a process died between scales and record";
  ASSERT_EQ(memory.Table().Set(), absl::OkStatus());
  EXPECT_TRUE(*memory.Table().AreSet());
  EXPECT_EQ(memory.Table().layer(2)[3], 0x1p11f);
  EXPECT_EQ(memory.Table().layer(1), memory.Table().layer(0) + 4);
  EXPECT_TRUE(std::all_of(memory.bytes.end() - 64, memory.bytes.end(), [](std::byte byte) { return byte == std::byte{0}; }));
  ASSERT_EQ(memory.Table().Withdraw(), absl::OkStatus());
  EXPECT_FALSE(*memory.Table().AreSet());
}

// A death cuts the copy of the record anywhere.
TEST(KvScaleTable, ARecordThatIsNotWholeIsNone) {
  Memory memory;
  memory.Fill();
  ASSERT_EQ(memory.Table().Set(), absl::OkStatus());
  const std::vector<std::byte> whole = memory.bytes;
  const std::string text = "tandem fp8 KV scales of d1";
  ASSERT_EQ(std::memcmp(whole.data(), text.data(), text.size()), 0);
  for (std::size_t length = 0; length < text.size(); ++length) {
    std::fill(memory.bytes.begin() + static_cast<std::ptrdiff_t>(length), memory.bytes.begin() + 128, std::byte{0});
    EXPECT_FALSE(*memory.Table().AreSet()) << length;
    memory.bytes = whole;
  }
  EXPECT_TRUE(*memory.Table().AreSet());
}

TEST(KvScaleTable, ScalesOfAnotherLayoutAreNone) {
  Memory memory;
  memory.Fill();
  ASSERT_EQ(memory.Table("d1").Set(), absl::OkStatus());
  EXPECT_FALSE(*memory.Table("d2").AreSet());
  EXPECT_FALSE(*memory.Table("d").AreSet());
}

TEST(KvScaleTable, OnlyPositiveNumbersAreSet) {
  for (const float bad : {0.f, -1.f, NAN, INFINITY}) {
    Memory memory;
    memory.Fill();
    memory.Table().layer(1)[3] = bad;
    const absl::Status status = memory.Table().Set();
    EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("values of layer 1, head 1 have scale"));
    EXPECT_FALSE(*memory.Table().AreSet()) << bad;
    memory.Fill();
    ASSERT_EQ(memory.Table().Set(), absl::OkStatus());
    memory.Table().layer(2)[0] = bad;
    EXPECT_FALSE(*memory.Table().AreSet()) << bad;
  }
}

}  // namespace
}  // namespace tandem

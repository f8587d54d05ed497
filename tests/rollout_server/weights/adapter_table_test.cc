#include "rollout_server/weights/adapter_table.h"
#include "kernels/checksum/checksum.h"

#include <cstring>
#include <functional>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

constexpr std::uint64_t kRegionBegin = 1 << 20;
constexpr int kMaxRank = 16;

ModelConfig TinyConfig() {
  ModelConfig config;
  config.num_layers = 2;
  config.hidden_size = 8;
  config.intermediate_size = 16;
  config.num_heads = 2;
  config.num_kv_heads = 1;
  config.head_dim = 4;
  config.vocab_size = 32;
  return config;
}

class AdapterTableTest : public ::testing::Test {
 protected:
  AdapterTableTest()
      : region_(64 * 1024), layout_(AdapterLayout::Create(TinyConfig(), 4, {LinearKind::kQProj, LinearKind::kDownProj})) {
    for (std::size_t i = 0; i < region_.size(); ++i) region_[i] = static_cast<std::byte>(i * 31);
    request_.set_job("job");
    request_.set_weight_version(1);
    request_.mutable_slot()->mutable_range()->set_begin_bytes(kRegionBegin + 256);
    request_.mutable_slot()->mutable_range()->set_end_bytes(kRegionBegin + 256 + layout_.total_bytes);
    request_.mutable_slot()->set_rank(4);
    request_.mutable_slot()->set_scale(2);
    request_.mutable_slot()->add_targets("q_proj");
    request_.mutable_slot()->add_targets("down_proj");
    request_.mutable_slot()->set_checksum(*MemoryChecksum(Device::kCpu, region_.data() + 256, layout_.total_bytes));
  }

  absl::StatusOr<Adapter> Open() const {
    return OpenAdapter(request_, TinyConfig(), region_, kRegionBegin, kMaxRank, Device::kCpu);
  }
  void ExpectRefused(const std::function<void(v1::ActivateAdapterRequest*)>& change, absl::StatusCode code,
                     const std::string& word) {
    const v1::ActivateAdapterRequest saved = request_;
    change(&request_);
    const absl::Status status = Open().status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(word));
    request_ = saved;
  }

  std::vector<std::byte> region_;
  AdapterLayout layout_;
  v1::ActivateAdapterRequest request_;
};

TEST_F(AdapterTableTest, OpensASlotWithItsScale) {
  const absl::StatusOr<Adapter> adapter = Open();
  ASSERT_TRUE(adapter.ok()) << adapter.status();
  EXPECT_EQ(adapter->slot, region_.data() + 256);
  EXPECT_EQ(adapter->scale, 2);
  EXPECT_EQ(adapter->layout->rank, 4);
  EXPECT_EQ(adapter->layout->total_bytes, layout_.total_bytes);
}

// CASES C41, C44
TEST_F(AdapterTableTest, AHalfWrittenSlotIsNeverActivated) {
  region_[256 + layout_.total_bytes - 1] ^= std::byte{1};
  const absl::StatusOr<Adapter> adapter = Open();
  EXPECT_EQ(adapter.status().code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(adapter.status().message()), HasSubstr("checksum"));
}

TEST_F(AdapterTableTest, RefusesSlotsThatDoNotFit) {
  using R = v1::ActivateAdapterRequest;
  constexpr auto kBad = absl::StatusCode::kInvalidArgument;
  constexpr auto kRange = absl::StatusCode::kOutOfRange;
  ExpectRefused([](R* r) { r->set_job(""); }, kBad, "job");
  ExpectRefused([](R* r) { r->set_weight_version(0); }, kBad, "weight_version");
  ExpectRefused([](R* r) { r->mutable_slot()->set_rank(0); }, kBad, "rank: 0");
  ExpectRefused([](R* r) { r->mutable_slot()->set_rank(17); }, kBad, "17 is not in 1 to 16");
  ExpectRefused([](R* r) { r->mutable_slot()->set_rank(8); }, kBad, "bytes");
  ExpectRefused([](R* r) { r->mutable_slot()->set_scale(0); }, kBad, "scale: 0");
  ExpectRefused([](R* r) { r->mutable_slot()->set_scale(std::numeric_limits<float>::quiet_NaN()); }, kBad, "scale: nan");
  ExpectRefused([](R* r) { r->mutable_slot()->clear_targets(); }, kBad, "targets");
  ExpectRefused([](R* r) { r->mutable_slot()->set_targets(0, "qkv_proj"); }, kBad, "qkv_proj");
  ExpectRefused([](R* r) { r->mutable_slot()->set_targets(1, "q_proj"); }, kBad, "twice");
  ExpectRefused([](R* r) { r->mutable_slot()->mutable_range()->set_begin_bytes(kRegionBegin - 64); }, kRange, "standing region");
  ExpectRefused([](R* r) { r->mutable_slot()->mutable_range()->set_end_bytes(kRegionBegin + 64 * 1024 + 1); }, kRange,
                "standing region");
  ExpectRefused([](R* r) { r->mutable_slot()->mutable_range()->set_begin_bytes(~0ull); }, kRange, "standing region");
  ExpectRefused([](R* r) { r->mutable_slot()->mutable_range()->set_begin_bytes(kRegionBegin + 252); }, kBad, "multiple of 64");
}

TEST_F(AdapterTableTest, VersionsOnlyGrow) {
  AdapterTable table;
  Adapter adapter = *Open();
  ASSERT_TRUE(table.Check(adapter).ok());
  table.Activate(adapter);
  EXPECT_EQ(table.Check(adapter).code(), absl::StatusCode::kAborted);
  adapter.weight_version = 2;
  ASSERT_TRUE(table.Check(adapter).ok());
  const std::uint64_t first_activation = table.Find("job")->activation_id;
  table.Activate(adapter);
  EXPECT_EQ(table.Find("job")->weight_version, 2u);
  EXPECT_NE(table.Find("job")->activation_id, first_activation);
  table.Retire("job");
  adapter.weight_version = 1;
  EXPECT_TRUE(table.Check(adapter).ok()) << "after a retirement a job may begin again";
}

TEST_F(AdapterTableTest, RequestsMayNameOnlyTheActiveVersion) {
  AdapterTable table;
  table.Activate(*Open());
  EXPECT_TRUE(table.CheckVersion("", 0).ok());
  EXPECT_TRUE(table.CheckVersion("job", 0).ok());
  EXPECT_TRUE(table.CheckVersion("job", 1).ok());
  EXPECT_EQ(table.CheckVersion("job", 2).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(table.CheckVersion("", 1).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(table.CheckVersion("other", 0).code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace tandem

#include "common/sharing/standing_allocator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

namespace tandem {
namespace {

std::map<std::string, std::uint64_t> LedgerOf(const StandingAllocator& allocator) {
  std::map<std::string, std::uint64_t> ledger;
  for (const v1::OwnedBytes& owned : allocator.Ledger()) ledger[owned.owner()] += owned.bytes();
  return ledger;
}

TEST(StandingAllocator, PiecesAreZeroedAlignedAndOwned) {
  alignas(256) static std::byte region[8192];
  std::fill(std::begin(region), std::end(region), std::byte{0xff});
  const auto allocator = StandingAllocator::Create(region, v1::ROLE_TRAINER, Device::kCpu);
  const auto slot = allocator->Allocate(1000, "adapter_slots");
  const auto moments = allocator->Allocate(2000, "optimizer");
  ASSERT_TRUE(slot.ok() && moments.ok());
  EXPECT_EQ(slot->size(), 1000u);
  EXPECT_TRUE(std::all_of(slot->begin(), slot->end(), [](std::byte b) { return b == std::byte{0}; }));
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(moments->data()) % 256, 0u);
  EXPECT_EQ(LedgerOf(*allocator),
            (std::map<std::string, std::uint64_t>{{"adapter_slots", 1024}, {"optimizer", 2048}, {"free", 5120}}));
  EXPECT_EQ(allocator->Ledger().front().role(), v1::ROLE_TRAINER);
  std::fill(slot->begin(), slot->end(), std::byte{1});
  allocator->Free(*slot);
  const auto again = allocator->Allocate(1000, "adapter_slots");
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->data(), slot->data());
  EXPECT_TRUE(std::all_of(again->begin(), again->end(), [](std::byte b) { return b == std::byte{0}; }));
}

TEST(StandingAllocator, NamesTheRegionWhenFull) {
  alignas(256) static std::byte region[4096 + 100];
  const auto allocator = StandingAllocator::Create(region, v1::ROLE_ROLLOUT, Device::kCpu);
  const auto refused = allocator->Allocate(5000, "graph_buffers");
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  for (const char* part : {"rollout_server", "graph_buffers", "5000", "4.0 KiB"})
    EXPECT_NE(std::string(refused.status().message()).find(part), std::string::npos) << refused.status();
  EXPECT_TRUE(allocator->Allocate(4096, "all").ok());
  EXPECT_EQ(LedgerOf(*allocator)["free"], 100u) << "a tail below the alignment stays free";
}

}  // namespace
}  // namespace tandem

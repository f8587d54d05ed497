#include "common/sharing/standing_allocator.h"

#include "common/base/check.h"
#include "common/base/mutex.h"
#include "common/memory/elastic_arena.h"
#include "common/memory/lease_book.h"

namespace tandem {
namespace {

class ArenaStandingAllocator final : public StandingAllocator {
 public:
  ArenaStandingAllocator(std::span<std::byte> region, v1::Role role, Device device)
      : region_(region),
        role_(role),
        device_(device),
        arena_(absl::StrCat("standing region of ", RoleName(role)), 0,
               region.size() / ElasticArena::kAlignmentBytes * ElasticArena::kAlignmentBytes) {}

  absl::StatusOr<std::span<std::byte>> Allocate(std::uint64_t size_bytes, const std::string& owner) override {
    std::uint64_t offset = 0;
    {
      MutexLock lock(&mutex_);
      TANDEM_ASSIGN_OR_RETURN(offset, arena_.Allocate(size_bytes, owner));
    }
    const std::span<std::byte> piece = region_.subspan(offset, size_bytes);
    if (const absl::Status zeroed = ZeroMemory(device_, piece.data(), piece.size()); !zeroed.ok()) {
      Free(piece);
      return Annotate(zeroed, absl::StrCat(owner, ": clearing ", size_bytes, " bytes of the standing region"));
    }
    return piece;
  }

  void Free(std::span<std::byte> piece) override {
    TANDEM_CHECK(piece.data() >= region_.data() && piece.data() < region_.data() + region_.size(), "a piece of another region");
    MutexLock lock(&mutex_);
    arena_.Free(static_cast<std::uint64_t>(piece.data() - region_.data()));
  }

  std::vector<v1::OwnedBytes> Ledger() const override {
    std::vector<v1::OwnedBytes> ledger;
    const auto add = [&](const std::string& owner, std::uint64_t bytes) {
      v1::OwnedBytes& owned = ledger.emplace_back();
      owned.set_owner(owner);
      owned.set_bytes(bytes);
      owned.set_role(role_);
      owned.set_in_pool(true);
    };
    MutexLock lock(&mutex_);
    for (const auto& [owner, bytes] : arena_.used_by_owner()) add(owner, bytes);
    add("free", region_.size() - arena_.used_bytes());
    return ledger;
  }

 private:
  const std::span<std::byte> region_;
  const v1::Role role_;
  const Device device_;
  mutable Mutex mutex_;
  ElasticArena arena_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<StandingAllocator> StandingAllocator::Create(std::span<std::byte> region, v1::Role role, Device device) {
  return std::make_unique<ArenaStandingAllocator>(region, role, device);
}

}  // namespace tandem

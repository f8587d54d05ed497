#include "common/torch/arena_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <mutex>
#include <utility>

#include "common/base/check.h"
#include "common/base/log.h"
#include "common/base/mutex.h"
#include "common/memory/elastic_arena.h"

namespace tandem {

// One range under a lock: pieces are freed on any thread.
class ArenaMemory {
 public:
  ArenaMemory(std::span<std::byte> range, std::string owner)
      : base_(range.data()),
        owner_(std::move(owner)),
        arena_("elastic", 0, range.size() / ElasticArena::kAlignmentBytes * ElasticArena::kAlignmentBytes) {}

  absl::StatusOr<std::byte*> Allocate(std::uint64_t size_bytes) {
    MutexLock lock(&mutex_);
    TANDEM_ASSIGN_OR_RETURN(const std::uint64_t offset, arena_.Allocate(size_bytes, owner_));
    return base_ + offset;
  }
  void Free(const std::byte* piece) {
    MutexLock lock(&mutex_);
    arena_.Free(static_cast<std::uint64_t>(piece - base_));
  }
  std::uint64_t used_bytes() const {
    MutexLock lock(&mutex_);
    return arena_.used_bytes();
  }
  std::uint64_t peak_bytes() const {
    MutexLock lock(&mutex_);
    return arena_.peak_bytes();
  }
  const std::string& owner() const { return owner_; }

 private:
  std::byte* const base_;
  const std::string owner_;
  mutable Mutex mutex_;
  ElasticArena arena_ ABSL_GUARDED_BY(mutex_);
};

namespace {

thread_local std::shared_ptr<ArenaMemory> current_memory;

// What a DataPtr of the arena carries.
struct Piece {
  std::shared_ptr<ArenaMemory> memory;
  std::byte* bytes;
};

void FreePiece(void* context) {
  const std::unique_ptr<Piece> piece(static_cast<Piece*>(context));
  piece->memory->Free(piece->bytes);
}

class ArenaAllocator : public c10::Allocator {
 public:
  explicit ArenaAllocator(c10::Allocator* fallback) : fallback_(fallback) {}

  c10::DataPtr allocate(std::size_t size_bytes) override {
    if (current_memory == nullptr) return fallback_->allocate(size_bytes);
    const absl::StatusOr<std::byte*> bytes = current_memory->Allocate(size_bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, bytes.ok(), std::string(bytes.status().message()));
    return {*bytes, new Piece{current_memory, *bytes}, &FreePiece, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* destination, const void* source, std::size_t size_bytes) const override {
    default_copy_data(destination, source, size_bytes);
  }

 private:
  c10::Allocator* const fallback_;
};

void InstallOnce() {
  static std::once_flag once;
  std::call_once(once, [] {
    static ArenaAllocator* const allocator = new ArenaAllocator(c10::GetCPUAllocator());  // for the process's life
    c10::SetCPUAllocator(allocator);
  });
}

}  // namespace

ArenaScope::ArenaScope(std::span<std::byte> range, std::string owner)
    : memory_(std::make_shared<ArenaMemory>(range, std::move(owner))), outer_(std::move(current_memory)) {
  TANDEM_CHECK(reinterpret_cast<std::uintptr_t>(range.data()) % 64 == 0, "arena at ",
               reinterpret_cast<std::uintptr_t>(range.data()));
  InstallOnce();
  current_memory = memory_;
}

ArenaScope::~ArenaScope() {
  current_memory = std::move(outer_);
  if (const std::uint64_t bytes = memory_->used_bytes(); bytes > 0) {
    TANDEM_LOG(kWarning, "arena", "not freed before the scope ended owner=", memory_->owner(), " bytes=", bytes);
  }
}

std::uint64_t ArenaScope::used_bytes() const { return memory_->used_bytes(); }
std::uint64_t ArenaScope::peak_bytes() const { return memory_->peak_bytes(); }

}  // namespace tandem

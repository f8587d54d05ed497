#include "common/torch/arena_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <map>
#include <mutex>
#include <utility>

#include "common/base/check.h"
#include "common/base/log.h"
#include "common/base/mutex.h"
#include "common/memory/elastic_arena.h"
#include "common/torch/cuda_allocator.h"
#include "common/torch/device_memory.h"

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
  std::uint64_t largest_free_bytes() const {
    MutexLock lock(&mutex_);
    return arena_.largest_free_bytes();
  }
  const std::string& owner() const { return owner_; }

 private:
  std::byte* const base_;
  const std::string owner_;
  mutable Mutex mutex_;
  ElasticArena arena_ ABSL_GUARDED_BY(mutex_);
};

namespace {

// Of the innermost scope of this thread, by device.
std::shared_ptr<ArenaMemory>& CurrentMemory(Device device) {
  thread_local std::shared_ptr<ArenaMemory> host, gpu;
  return device == Device::kCpu ? host : gpu;
}

// What a DataPtr of the arena carries.
struct Piece {
  std::shared_ptr<ArenaMemory> memory;
  std::byte* bytes;
};

void FreePiece(void* context) {
  const std::unique_ptr<Piece> piece(static_cast<Piece*>(context));
  piece->memory->Free(piece->bytes);
}

c10::DataPtr AllocatePiece(const std::shared_ptr<ArenaMemory>& memory, std::size_t size_bytes, c10::Device device) {
  const absl::StatusOr<std::byte*> bytes = memory->Allocate(size_bytes);
  TORCH_CHECK_WITH(OutOfMemoryError, bytes.ok(), std::string(bytes.status().message()));
  return {*bytes, new Piece{memory, *bytes}, &FreePiece, device};
}

class ArenaAllocator : public c10::Allocator {
 public:
  explicit ArenaAllocator(c10::Allocator* fallback) : fallback_(fallback) {}

  c10::DataPtr allocate(std::size_t size_bytes) override {
    const std::shared_ptr<ArenaMemory>& memory = CurrentMemory(Device::kCpu);
    if (memory == nullptr) return fallback_->allocate(size_bytes);
    return AllocatePiece(memory, size_bytes, c10::DeviceType::CPU);
  }
  void copy_data(void* destination, const void* source, std::size_t size_bytes) const override {
    default_copy_data(destination, source, size_bytes);
  }

 private:
  c10::Allocator* const fallback_;
};

// What LibTorch itself holds on the GPU: it frees by address alone.
struct LibTorchPieces {
  Mutex mutex;
  std::map<void*, c10::DataPtr> pieces ABSL_GUARDED_BY(mutex);
};
LibTorchPieces& CudaPieces() {
  static LibTorchPieces* const pieces = new LibTorchPieces();  // LibTorch frees until the process ends
  return *pieces;
}

void* AllocateForCuda(std::size_t size_bytes) {
  c10::DataPtr piece = internal::AllocateDeviceMemory(size_bytes);
  void* const address = piece.get();
  MutexLock lock(&CudaPieces().mutex);
  CudaPieces().pieces.insert_or_assign(address, std::move(piece));
  return address;
}

void FreeForCuda(void* address) {
  MutexLock lock(&CudaPieces().mutex);
  CudaPieces().pieces.erase(address);
}

void InstallOnce(Device device) {
  static std::once_flag host, gpu;
  if (device == Device::kCuda) {
    std::call_once(gpu, [] { internal::ReplaceCudaAllocator(&AllocateForCuda, &FreeForCuda); });
    return;
  }
  std::call_once(host, [] {
    static ArenaAllocator* const allocator = new ArenaAllocator(c10::GetCPUAllocator());  // for the process's life
    c10::SetCPUAllocator(allocator);
  });
}

}  // namespace

c10::DataPtr internal::AllocateDeviceMemory(std::size_t size_bytes) {
  const std::shared_ptr<ArenaMemory>& memory = CurrentMemory(Device::kCuda);
  TORCH_CHECK(memory != nullptr, size_bytes, " bytes of device memory outside a training phase: it comes from the pool only");
  return AllocatePiece(memory, size_bytes, c10::Device(c10::DeviceType::CUDA, 0));
}

ArenaScope::ArenaScope(std::span<std::byte> range, std::string owner, Device device)
    : device_(device), memory_(std::make_shared<ArenaMemory>(range, std::move(owner))), outer_(std::move(CurrentMemory(device))) {
  TANDEM_CHECK(reinterpret_cast<std::uintptr_t>(range.data()) % 64 == 0, "arena at ",
               reinterpret_cast<std::uintptr_t>(range.data()));
  InstallOnce(device);
  CurrentMemory(device) = memory_;
}

ArenaScope::~ArenaScope() {
  CurrentMemory(device_) = std::move(outer_);
  if (const std::uint64_t bytes = memory_->used_bytes(); bytes > 0) {
    TANDEM_LOG(kWarning, "arena", "not freed before the scope ended owner=", memory_->owner(), " bytes=", bytes);
  }
}

ArenaUse CurrentArenaUse(Device device) {
  const std::shared_ptr<ArenaMemory>& memory = CurrentMemory(device);
  if (memory == nullptr) return {};
  return {memory->used_bytes(), memory->largest_free_bytes()};
}

std::uint64_t ArenaScope::used_bytes() const { return memory_->used_bytes(); }
std::uint64_t ArenaScope::peak_bytes() const { return memory_->peak_bytes(); }
std::uint64_t ArenaScope::largest_free_bytes() const { return memory_->largest_free_bytes(); }

}  // namespace tandem

// Pool memory in memfds: the CPU's.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "common/base/check.h"
#include "common/base/units.h"
#include "common/memory/pool_chunks.h"

namespace tandem {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

int ProtectionOf(Access access) {
  switch (access) {
    case Access::kNone:
      return PROT_NONE;
    case Access::kRead:
      return PROT_READ;
    case Access::kReadWrite:
      return PROT_READ | PROT_WRITE;
  }
  return PROT_NONE;
}

class MemfdMapping final : public PoolMapping {
 public:
  MemfdMapping(std::byte* base, std::uint64_t size) : base_(base), size_(size) {}
  ~MemfdMapping() override { ::munmap(base_, size_); }
  std::byte* base() const override { return base_; }
  std::uint64_t size_bytes() const override { return size_; }
  absl::Status Protect(std::uint64_t begin, std::uint64_t end, Access access) override {
    TANDEM_CHECK(begin <= end && end <= size_, "[", begin, ", ", end, ") of ", size_);
    if (begin == end || ::mprotect(base_ + begin, end - begin, ProtectionOf(access)) == 0) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("mprotect of pool bytes [", begin, ", ", end, "): ", std::strerror(errno)));
  }

 private:
  std::byte* const base_;
  const std::uint64_t size_;
};

class MemfdMemory final : public PoolMemory {
 public:
  const char* transport() const override { return "memfd"; }
  Device device() const override { return Device::kCpu; }
  std::string device_uuid() const override { return "cpu"; }
  std::uint64_t granularity_bytes() const override { return static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)); }

  absl::StatusOr<std::vector<UniqueFd>> CreateChunks(std::uint32_t num_chunks, std::uint64_t chunk_bytes) override {
    std::vector<UniqueFd> chunks;
    chunks.reserve(num_chunks);
    for (std::uint32_t i = 0; i < num_chunks; ++i) {
      UniqueFd fd(::memfd_create("tandem_pool", MFD_CLOEXEC | MFD_ALLOW_SEALING));
      const bool is_made = fd.is_open() && ::ftruncate(fd.get(), static_cast<off_t>(chunk_bytes)) == 0 &&
                           ::fcntl(fd.get(), F_ADD_SEALS, kSeals) == 0;
      if (!is_made)
        return absl::ResourceExhaustedError(absl::StrCat("making chunk ", i, " of ", num_chunks, ", each ",
                                                         FormatBytes(chunk_bytes), ": ", std::strerror(errno)));
      chunks.push_back(std::move(fd));
    }
    return chunks;
  }

  absl::StatusOr<std::unique_ptr<PoolMapping>> Map(std::span<const UniqueFd> chunks, std::uint64_t chunk_bytes) override {
    std::uint64_t size = 0;
    if (chunk_bytes == 0 || chunk_bytes % granularity_bytes() != 0 || chunks.empty() ||
        !MultiplyFits(chunks.size(), chunk_bytes, &size))
      return absl::InvalidArgumentError(absl::StrCat("pool of ", chunks.size(), " chunks of ", chunk_bytes,
                                                     " bytes: wanted at least one, of a multiple of ", granularity_bytes(),
                                                     " bytes"));
    for (std::size_t i = 0; i < chunks.size(); ++i) {
      struct stat stat {};
      if (::fstat(chunks[i].get(), &stat) != 0 || static_cast<std::uint64_t>(stat.st_size) != chunk_bytes)
        return absl::InvalidArgumentError(absl::StrCat("chunk ", i, ": ", stat.st_size, " bytes, not ", chunk_bytes));
      const int seals = ::fcntl(chunks[i].get(), F_GET_SEALS);
      if (seals < 0 || (seals & F_SEAL_SHRINK) == 0)  // shrunk later, it would kill its readers with SIGBUS
        return absl::InvalidArgumentError(absl::StrCat("chunk ", i, " is no memfd sealed against shrinking"));
    }
    void* const base = ::mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
      return absl::ResourceExhaustedError(absl::StrCat("reserving ", FormatBytes(size), " of addresses: ", std::strerror(errno)));
    auto mapping = std::make_unique<MemfdMapping>(static_cast<std::byte*>(base), size);
    for (std::size_t i = 0; i < chunks.size(); ++i) {
      if (::mmap(mapping->base() + i * chunk_bytes, chunk_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, chunks[i].get(),
                 0) == MAP_FAILED)
        return absl::ResourceExhaustedError(absl::StrCat("mapping chunk ", i, " of ", chunks.size(), ": ", std::strerror(errno)));
    }
    return std::unique_ptr<PoolMapping>(std::move(mapping));
  }
};

}  // namespace

std::unique_ptr<PoolMemory> PoolMemory::CreateMemfd() { return std::make_unique<MemfdMemory>(); }

absl::Status RaiseDescriptorLimit(std::uint32_t num_chunks) {
  const rlim_t wanted = rlim_t{num_chunks} + 256;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return absl::InternalError(absl::StrCat("getrlimit: ", std::strerror(errno)));
  if (limit.rlim_cur >= wanted) return absl::OkStatus();
  const rlimit raised{.rlim_cur = wanted, .rlim_max = limit.rlim_max};
  if (limit.rlim_max >= wanted && ::setrlimit(RLIMIT_NOFILE, &raised) == 0) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("a pool of ", num_chunks, " chunks needs ", wanted,
                                                   " descriptors; RLIMIT_NOFILE is ", limit.rlim_cur, " (soft), ", limit.rlim_max,
                                                   " (hard): raise it, or take larger chunks"));
}

}  // namespace tandem

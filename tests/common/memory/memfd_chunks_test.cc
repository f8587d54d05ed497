#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <string>

#include "common/memory/pool_chunks.h"

namespace tandem {
namespace {

constexpr std::uint64_t kChunk = 16384;

// Runs `body` in a child and returns its wait status.
template <typename Body>
int InChild(Body body) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    body();
    ::_exit(0);
  }
  int status = -1;
  ::waitpid(pid, &status, 0);
  return status;
}

TEST(MemfdChunks, TwoMappingsSeeOneMemoryInOneRow) {
  const auto memory = PoolMemory::CreateMemfd();
  auto chunks = memory->CreateChunks(5, kChunk);
  ASSERT_TRUE(chunks.ok()) << chunks.status();
  auto first = memory->Map(*chunks, kChunk), second = memory->Map(*chunks, kChunk);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ((*first)->size_bytes(), 5 * kChunk);
  for (std::uint64_t i = 0; i < 5 * kChunk; ++i) ASSERT_EQ((*first)->base()[i], std::byte{0});
  for (const std::uint64_t at : {std::uint64_t{0}, kChunk - 1, kChunk, 5 * kChunk - 1}) {
    (*first)->base()[at] = std::byte{0x5a};
    EXPECT_EQ((*second)->base()[at], std::byte{0x5a});
  }
}

TEST(MemfdChunks, AreCloseOnExecAndCannotShrink) {
  const auto memory = PoolMemory::CreateMemfd();
  auto chunks = memory->CreateChunks(1, kChunk);
  ASSERT_TRUE(chunks.ok());
  EXPECT_NE(::fcntl((*chunks)[0].get(), F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_NE(::ftruncate((*chunks)[0].get(), 0), 0);
  EXPECT_NE(::ftruncate((*chunks)[0].get(), 2 * kChunk), 0);
}

TEST(MemfdChunks, RefusesDescriptorsThatAreNoChunk) {
  const auto memory = PoolMemory::CreateMemfd();
  std::vector<UniqueFd> wrong;
  wrong.emplace_back(::memfd_create("unsealed", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(wrong[0].get(), kChunk), 0);
  EXPECT_EQ(memory->Map(wrong, kChunk).status().code(), absl::StatusCode::kInvalidArgument)
      << "it could shrink under its readers";
  auto chunks = memory->CreateChunks(1, kChunk);
  EXPECT_EQ(memory->Map(*chunks, 2 * kChunk).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(memory->Map(*chunks, kChunk + 1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(memory->Map({}, kChunk).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(MemfdChunks, UnmapsWhenDestroyed) {
  const auto memory = PoolMemory::CreateMemfd();
  auto chunks = memory->CreateChunks(1, kChunk);
  std::byte* base = nullptr;
  {
    auto mapping = memory->Map(*chunks, kChunk);
    base = (*mapping)->base();
  }
  const int status = InChild([base] { *static_cast<volatile std::byte*>(base) = std::byte{1}; });
  EXPECT_TRUE(WIFSIGNALED(status));
}

// CASES C34
TEST(MemfdChunks, ProtectedRangeKillsTheStrayWriterOnly) {
  const auto memory = PoolMemory::CreateMemfd();
  auto chunks = memory->CreateChunks(2, kChunk);
  auto mapping = memory->Map(*chunks, kChunk);
  ASSERT_TRUE(mapping.ok());
  ASSERT_TRUE((*mapping)->Protect(kChunk / 2, kChunk + kChunk / 2, Access::kNone).ok());
  std::byte* const base = (*mapping)->base();
  const auto write = [base](std::uint64_t at) { *const_cast<volatile std::byte*>(base + at) = std::byte{1}; };
  EXPECT_EQ(InChild([&] { write(0), write(kChunk / 2 - 1), write(kChunk + kChunk / 2); }), 0);
  EXPECT_TRUE(WIFSIGNALED(InChild([&] { write(kChunk / 2); })));
  EXPECT_TRUE(WIFSIGNALED(InChild([&] { write(kChunk + kChunk / 2 - 1); })));
  ASSERT_TRUE((*mapping)->Protect(0, kChunk, Access::kRead).ok());
  EXPECT_TRUE(WIFSIGNALED(InChild([&] { write(0); })));
  ASSERT_TRUE((*mapping)->Protect(0, 2 * kChunk, Access::kReadWrite).ok());
  EXPECT_EQ(InChild([&] { write(0), write(kChunk / 2), write(kChunk); }), 0);
}

// CASES C42
TEST(DescriptorLimit, IsRaisedToChunksAnd256OrNamed) {
  EXPECT_EQ(InChild([] {
              const rlimit low{.rlim_cur = 256, .rlim_max = 1000};
              if (::setrlimit(RLIMIT_NOFILE, &low) != 0) ::_exit(1);
              if (!RaiseDescriptorLimit(600).ok()) ::_exit(2);
              rlimit now{};
              ::getrlimit(RLIMIT_NOFILE, &now);
              if (now.rlim_cur != 856) ::_exit(3);
              const absl::Status refused = RaiseDescriptorLimit(745);
              if (refused.code() != absl::StatusCode::kResourceExhausted) ::_exit(4);
              const std::string text(refused.message());
              if (text.find("1001") == std::string::npos || text.find("1000 (hard)") == std::string::npos) ::_exit(5);
            }),
            0);
}

}  // namespace
}  // namespace tandem

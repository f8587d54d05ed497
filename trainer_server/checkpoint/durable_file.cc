#include "trainer_server/checkpoint/durable_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "common/base/unique_fd.h"

namespace tandem {
namespace {

absl::Status SystemError(const std::string& what, const std::string& path) {
  const std::string message = absl::StrCat(what, " ", path, " failed: ", std::strerror(errno));
  if (errno == ENOENT) return absl::NotFoundError(message);
  if (errno == ENOSPC || errno == EDQUOT) return absl::ResourceExhaustedError(message + ": make room, then resume");
  return absl::InternalError(message);
}

}  // namespace

absl::Status WriteFileDurably(const std::string& path, std::span<const std::byte> bytes) {
  const UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!file.is_open()) return SystemError("opening", path);
  std::size_t written = 0;
  while (written < bytes.size()) {
    const ssize_t count = ::write(file.get(), bytes.data() + written, bytes.size() - written);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return SystemError("writing", path);
    written += static_cast<std::size_t>(count);
  }
  if (::fsync(file.get()) != 0) return SystemError("syncing", path);
  return absl::OkStatus();
}

absl::Status WriteFileDurably(const std::string& path, const std::string& text) {
  return WriteFileDurably(path, std::as_bytes(std::span<const char>(text)));
}

absl::Status SyncDirectory(const std::string& path) {
  const UniqueFd directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!directory.is_open()) return SystemError("opening", path);
  if (::fsync(directory.get()) != 0) return SystemError("syncing", path);
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadWholeFile(const std::string& path, std::size_t limit_bytes) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.is_open()) return SystemError("opening", path);
  struct stat status = {};
  if (::fstat(file.get(), &status) != 0) return SystemError("reading", path);
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size > limit_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(path, " has ", size, " bytes; the limit is ", limit_bytes));
  }
  std::string text(size, '\0');
  std::size_t filled = 0;
  while (filled < size) {
    const ssize_t count = ::read(file.get(), text.data() + filled, size - filled);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return SystemError("reading", path);
    if (count == 0) return absl::DataLossError(absl::StrCat(path, " ended at byte ", filled, " of ", size));
    filled += static_cast<std::size_t>(count);
  }
  return text;
}

absl::Status MakeDirectories(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) return absl::InternalError(absl::StrCat("making directory ", path, " failed: ", error.message()));
  return absl::OkStatus();
}

}  // namespace tandem

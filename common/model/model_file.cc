#include "common/model/model_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "common/base/units.h"

namespace tandem {
namespace {

absl::Status SystemError(const char* what, const std::string& path) {
  const int error = errno;
  const std::string message = absl::StrCat(what, " ", path, ": ", std::strerror(error));
  if (error == ENOENT || error == ENOTDIR) return absl::NotFoundError(message);
  if (error == EACCES || error == EPERM) return absl::PermissionDeniedError(message);
  if (error == ENOSPC || error == EDQUOT) return absl::ResourceExhaustedError(message);
  return absl::InternalError(message);
}

}  // namespace

absl::StatusOr<ModelFile> ModelFile::Open(const std::string& path) {
  // O_NONBLOCK: opening a named pipe must not wait for its writer.
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd.is_open()) return SystemError("open", path);
  struct stat attributes = {};
  if (::fstat(fd.get(), &attributes) != 0) return SystemError("stat", path);
  if (!S_ISREG(attributes.st_mode)) return absl::InvalidArgumentError(absl::StrCat(path, ": not a regular file"));
  return ModelFile(path, std::move(fd), static_cast<std::uint64_t>(attributes.st_size));
}

absl::Status ModelFile::ReadAt(std::uint64_t begin_bytes, std::span<std::byte> bytes) const {
  if (begin_bytes > size_bytes_ || bytes.size() > size_bytes_ - begin_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path_, ": data past the end of the file: ", bytes.size(), " bytes at ", begin_bytes, " of ", size_bytes_));
  }
  while (!bytes.empty()) {
    const ssize_t count = ::pread(fd_.get(), bytes.data(), bytes.size(), static_cast<off_t>(begin_bytes));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return SystemError("read", path_);
    if (count == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(path_, ": cut short while it was read: it had ", size_bytes_, " bytes, now ends at ", begin_bytes));
    }
    bytes = bytes.subspan(static_cast<std::size_t>(count));
    begin_bytes += static_cast<std::uint64_t>(count);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadSmallFile(const std::string& path, std::uint64_t max_bytes) {
  TANDEM_ASSIGN_OR_RETURN(const ModelFile file, ModelFile::Open(path));
  if (file.size_bytes() > max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": ", FormatBytes(file.size_bytes()), "; at most ", FormatBytes(max_bytes), " are taken"));
  }
  std::string text(file.size_bytes(), '\0');
  TANDEM_RETURN_IF_ERROR(file.ReadAt(0, std::as_writable_bytes(std::span(text))));
  return text;
}

absl::StatusOr<AtomicFileWriter> AtomicFileWriter::Create(const std::string& path) {
  std::string temporary_path = absl::StrCat(path, ".", ::getpid(), ".partial");
  UniqueFd fd(::open(temporary_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!fd.is_open()) return SystemError("create", temporary_path);
  return AtomicFileWriter(path, std::move(temporary_path), std::move(fd));
}

AtomicFileWriter::~AtomicFileWriter() {
  if (fd_.is_open()) ::unlink(temporary_path_.c_str());
}

absl::Status AtomicFileWriter::Write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::write(fd_.get(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return SystemError("write", temporary_path_);
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
  return absl::OkStatus();
}

absl::Status AtomicFileWriter::Commit() {
  if (::fsync(fd_.get()) != 0) return SystemError("fsync", temporary_path_);
  if (::rename(temporary_path_.c_str(), path_.c_str()) != 0) return SystemError("rename to", path_);
  fd_.Close();
  // The new name is on disk only when its folder is.
  const std::string folder = std::filesystem::path(path_).parent_path().string();
  UniqueFd folder_fd(::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder_fd.is_open() || ::fsync(folder_fd.get()) != 0) return SystemError("fsync", folder);
  return absl::OkStatus();
}

absl::Status WriteFileAtomically(const std::string& path, std::string_view bytes) {
  TANDEM_ASSIGN_OR_RETURN(AtomicFileWriter writer, AtomicFileWriter::Create(path));
  TANDEM_RETURN_IF_ERROR(writer.Write(std::as_bytes(std::span(bytes))));
  return writer.Commit();
}

}  // namespace tandem

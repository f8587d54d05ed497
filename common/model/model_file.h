// A file opened for reading at any offset, whose size is known and checked. Reads are pread(2), not a mapping: a file cut short
// while it is read gives an error, not SIGBUS. Immutable; thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "common/base/status.h"
#include "common/base/unique_fd.h"

namespace tandem {

// Bytes that can be read at any offset, by any thread.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  // Fills `bytes` from the source at `begin_bytes`. Errors: INVALID_ARGUMENT when the range is not inside it.
  virtual absl::Status ReadAt(std::uint64_t begin_bytes, std::span<std::byte> bytes) const = 0;
};

class ModelFile final : public ByteSource {
 public:
  // Errors: NOT_FOUND, INVALID_ARGUMENT (not a regular file).
  static absl::StatusOr<ModelFile> Open(const std::string& path);

  const std::string& path() const { return path_; }
  std::uint64_t size_bytes() const { return size_bytes_; }
  absl::Status ReadAt(std::uint64_t begin_bytes, std::span<std::byte> bytes) const override;

 private:
  ModelFile(std::string path, UniqueFd fd, std::uint64_t size_bytes)
      : path_(std::move(path)), fd_(std::move(fd)), size_bytes_(size_bytes) {}

  std::string path_;
  UniqueFd fd_;
  std::uint64_t size_bytes_ = 0;
};

// The whole of a small file. Errors: as ModelFile; INVALID_ARGUMENT when it is larger than `max_bytes`.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path, std::uint64_t max_bytes);
// Writes `path` so that it holds either what it held or all of `bytes`, whatever happens; on disk when this returns.
absl::Status WriteFileAtomically(const std::string& path, std::string_view bytes);

// Writes a file piece by piece under a temporary name; Commit gives it its name. Without Commit nothing remains. One thread.
class AtomicFileWriter {
 public:
  static absl::StatusOr<AtomicFileWriter> Create(const std::string& path);
  AtomicFileWriter(AtomicFileWriter&& other) noexcept = default;
  AtomicFileWriter& operator=(AtomicFileWriter&& other) = delete;
  ~AtomicFileWriter();
  absl::Status Write(std::span<const std::byte> bytes);
  absl::Status Commit();

 private:
  AtomicFileWriter(std::string path, std::string temporary_path, UniqueFd fd)
      : path_(std::move(path)), temporary_path_(std::move(temporary_path)), fd_(std::move(fd)) {}

  std::string path_;
  std::string temporary_path_;
  UniqueFd fd_;
};

}  // namespace tandem

#include "trainer_server/job/content_store.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "trainer_server/checkpoint/durable_file.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
constexpr char kPartialPrefix[] = "partial-";

absl::Status CheckAddress(const std::string& sha256) {
  const bool is_hex = std::ranges::all_of(sha256, [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
  if (sha256.size() == 64 && is_hex) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("content address '", sha256.substr(0, 80), "' is not 64 lower-case hexadecimal digits"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<ContentStore>> ContentStore::Open(const std::string& directory, std::uint64_t limit_bytes) {
  TANDEM_RETURN_IF_ERROR(MakeDirectories(directory));
  std::uint64_t used_bytes = 0;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    std::error_code ignored;
    if (entry.path().filename().string().rfind(kPartialPrefix, 0) == 0) {
      fs::remove(entry.path(), ignored);
    } else if (const auto size = entry.file_size(ignored); !ignored) {
      used_bytes += size;
    }
  }
  if (error) return absl::InternalError(absl::StrCat("listing ", directory, " failed: ", error.message()));
  return std::unique_ptr<ContentStore>(new ContentStore(directory, limit_bytes, used_bytes));
}

bool ContentStore::Has(const std::string& sha256) const { return PathOf(sha256).ok(); }

absl::StatusOr<std::string> ContentStore::PathOf(const std::string& sha256) const {
  TANDEM_RETURN_IF_ERROR(CheckAddress(sha256));
  std::error_code error;
  if (!fs::exists(FinalPath(sha256), error)) return absl::NotFoundError(absl::StrCat("content ", sha256, " is not in the store"));
  return FinalPath(sha256);
}

absl::StatusOr<std::unique_ptr<ContentStore::Upload>> ContentStore::BeginUpload(const std::string& sha256,
                                                                                std::uint64_t size_bytes) {
  TANDEM_RETURN_IF_ERROR(CheckAddress(sha256));
  std::string path;
  {
    MutexLock lock(&mutex_);
    if (size_bytes > limit_bytes_ || used_bytes_ > limit_bytes_ - size_bytes) {
      return absl::ResourceExhaustedError(
          absl::StrCat("upload of ", size_bytes, " bytes: the store holds ", used_bytes_, " of at most ", limit_bytes_));
    }
    used_bytes_ += size_bytes;
    path = absl::StrCat(directory_, "/", kPartialPrefix, next_upload_++);
  }
  UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  const int open_error = errno;
  const bool is_open = file.is_open();
  std::unique_ptr<Upload> upload(new Upload(this, std::move(file), path, sha256, size_bytes));
  if (!is_open) return absl::InternalError(absl::StrCat("opening ", path, " failed: ", std::strerror(open_error)));
  return upload;
}

ContentStore::Upload::Upload(ContentStore* store, UniqueFd file, std::string partial_path, std::string sha256,
                             std::uint64_t size_bytes)
    : store_(store),
      file_(std::move(file)),
      partial_path_(std::move(partial_path)),
      sha256_(std::move(sha256)),
      size_bytes_(size_bytes) {}

ContentStore::Upload::~Upload() {
  if (!file_.is_open()) return;  // committed
  ::unlink(partial_path_.c_str());
  MutexLock lock(&store_->mutex_);
  store_->used_bytes_ -= size_bytes_;
}

absl::Status ContentStore::Upload::Append(std::string_view piece) {
  if (piece.size() > size_bytes_ - received_bytes_) {
    return absl::InvalidArgumentError(absl::StrCat("upload of ", sha256_, ": more than the announced ", size_bytes_, " bytes"));
  }
  std::size_t written = 0;
  while (written < piece.size()) {
    const ssize_t count = ::write(file_.get(), piece.data() + written, piece.size() - written);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0)
      return absl::ResourceExhaustedError(absl::StrCat("writing ", partial_path_, " failed: ", std::strerror(errno)));
    written += static_cast<std::size_t>(count);
  }
  hash_.Update(piece);
  received_bytes_ += piece.size();
  return absl::OkStatus();
}

absl::Status ContentStore::Upload::Commit() {
  if (received_bytes_ != size_bytes_) {
    return absl::InvalidArgumentError(
        absl::StrCat("upload of ", sha256_, ": ", received_bytes_, " bytes came; ", size_bytes_, " were announced"));
  }
  if (const std::string found = hash_.Finish(); found != sha256_) {
    return absl::InvalidArgumentError(
        absl::StrCat("upload: the SHA-256 of what came is ", found, "; ", sha256_, " was announced"));
  }
  if (::fsync(file_.get()) != 0) return absl::InternalError(absl::StrCat("syncing ", partial_path_, ": ", std::strerror(errno)));
  const bool was_present = store_->Has(sha256_);
  if (::rename(partial_path_.c_str(), store_->FinalPath(sha256_).c_str()) != 0) {
    return absl::InternalError(absl::StrCat("renaming ", partial_path_, ": ", std::strerror(errno)));
  }
  TANDEM_RETURN_IF_ERROR(SyncDirectory(store_->directory_));
  file_.Close();
  if (was_present) {
    MutexLock lock(&store_->mutex_);
    store_->used_bytes_ -= size_bytes_;
  }
  return absl::OkStatus();
}

}  // namespace tandem

#include "trainer_server/job/content_store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "common/base/clock.h"
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
  std::unique_ptr<ContentStore> store(new ContentStore(directory, limit_bytes));
  MutexLock lock(&store->mutex_);
  std::vector<fs::path> paths;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) paths.push_back(entry.path());
  if (error) return absl::InternalError(absl::StrCat("listing ", directory, " failed: ", error.message()));
  for (const fs::path& path : paths) {
    struct stat found {};
    if (::stat(path.c_str(), &found) != 0) continue;
    const std::string name = path.filename().string();
    if (name.rfind(kPartialPrefix, 0) != 0) {
      store->used_bytes_ += static_cast<std::uint64_t>(found.st_size);
      continue;
    }
    const std::string sha256 = name.substr(std::strlen(kPartialPrefix), 64);
    if (CheckAddress(sha256).ok() && found.st_size > 0) {
      const absl::Duration age = std::max(absl::Now() - absl::FromTimeT(found.st_mtime), absl::ZeroDuration());
      store->Keep(path.string(), sha256,
                  {.bytes = static_cast<std::uint64_t>(found.st_size), .since = MonotonicTime::Now() - age});
    } else {
      ::unlink(path.c_str());
    }
  }
  store->MakeRoom(0);
  return store;
}

std::string ContentStore::PartialPath(const std::string& sha256) const {
  return absl::StrCat(directory_, "/", kPartialPrefix, sha256);
}

void ContentStore::Keep(const std::string& path, const std::string& sha256, Partial partial) {
  const auto found = partials_.find(sha256);
  if (found != partials_.end() && found->second.bytes >= partial.bytes) {
    ::unlink(path.c_str());
    return;
  }
  if (found != partials_.end()) Drop(found);
  if (::rename(path.c_str(), PartialPath(sha256).c_str()) != 0) {
    ::unlink(path.c_str());
    return;
  }
  used_bytes_ += partial.bytes;
  partials_[sha256] = partial;
}

void ContentStore::Drop(Partials::iterator partial) {
  ::unlink(PartialPath(partial->first).c_str());
  used_bytes_ -= partial->second.bytes;
  partials_.erase(partial);
}

void ContentStore::MakeRoom(std::uint64_t size_bytes) {
  while (!partials_.empty()) {
    const auto oldest = std::ranges::min_element(partials_, {}, [](const auto& entry) { return entry.second.since; });
    const bool is_full = used_bytes_ > limit_bytes_ - size_bytes;
    if (MonotonicTime::Now() - oldest->second.since < kPartialLife && partials_.size() <= kMaxPartials && !is_full) return;
    Drop(oldest);
  }
}

std::uint64_t ContentStore::PartialBytes(const std::string& sha256) {
  MutexLock lock(&mutex_);
  MakeRoom(0);
  const auto found = partials_.find(sha256);
  return found == partials_.end() ? 0 : found->second.bytes;
}

bool ContentStore::Has(const std::string& sha256) const { return PathOf(sha256).ok(); }

absl::StatusOr<std::string> ContentStore::PathOf(const std::string& sha256) const {
  TANDEM_RETURN_IF_ERROR(CheckAddress(sha256));
  std::error_code error;
  if (!fs::exists(FinalPath(sha256), error)) return absl::NotFoundError(absl::StrCat("content ", sha256, " is not in the store"));
  return FinalPath(sha256);
}

absl::StatusOr<std::unique_ptr<ContentStore::Upload>> ContentStore::BeginUpload(const std::string& sha256,
                                                                                std::uint64_t size_bytes,
                                                                                std::uint64_t offset_bytes) {
  TANDEM_RETURN_IF_ERROR(CheckAddress(sha256));
  if (offset_bytes > size_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("upload of ", sha256, ": offset_bytes ", offset_bytes, " is beyond its ", size_bytes, " bytes"));
  }
  MutexLock lock(&mutex_);
  const auto partial = partials_.find(sha256);
  const std::uint64_t partial_bytes = partial == partials_.end() ? 0 : partial->second.bytes;
  if (offset_bytes > partial_bytes) {
    return absl::AbortedError(absl::StrCat("upload of ", sha256, ": offset_bytes ", offset_bytes, "; the store has the first ",
                                           partial_bytes, ": ask again where to begin"));
  }
  std::uint64_t partials_bytes = 0;
  for (const auto& [address, kept] : partials_) partials_bytes += kept.bytes;
  const std::uint64_t held_bytes = used_bytes_ - partials_bytes;
  if (size_bytes > limit_bytes_ ||
      held_bytes > limit_bytes_ - size_bytes) {  // before any part that others may go on with is dropped
    return absl::ResourceExhaustedError(
        absl::StrCat("upload of ", size_bytes, " bytes: the store holds ", held_bytes, " of at most ", limit_bytes_));
  }
  const std::string path = absl::StrCat(PartialPath(sha256), "-", next_upload_++);
  if (offset_bytes > 0) {
    if (::rename(PartialPath(sha256).c_str(), path.c_str()) != 0)
      return absl::InternalError(absl::StrCat("renaming ", PartialPath(sha256), " failed: ", std::strerror(errno)));
  }
  if (partial != partials_.end()) Drop(partial);
  MakeRoom(size_bytes);
  UniqueFd file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | (offset_bytes == 0 ? O_TRUNC : 0), 0644));
  if (!file.is_open()) return absl::InternalError(absl::StrCat("opening ", path, " failed: ", std::strerror(errno)));
  used_bytes_ += size_bytes;
  return std::unique_ptr<Upload>(new Upload(this, std::move(file), path, sha256, size_bytes, offset_bytes));
}

ContentStore::Upload::Upload(ContentStore* store, UniqueFd file, std::string partial_path, std::string sha256,
                             std::uint64_t size_bytes, std::uint64_t offset_bytes)
    : store_(store),
      file_(std::move(file)),
      partial_path_(std::move(partial_path)),
      sha256_(std::move(sha256)),
      size_bytes_(size_bytes),
      offset_bytes_(offset_bytes) {}

ContentStore::Upload::~Upload() {
  if (!file_.is_open()) return;  // committed
  MutexLock lock(&store_->mutex_);
  store_->used_bytes_ -= size_bytes_;
  const std::uint64_t bytes = std::max(received_bytes_, offset_bytes_);
  if (is_faulty_ || bytes == 0) {
    ::unlink(partial_path_.c_str());
  } else {
    store_->Keep(partial_path_, sha256_, {.bytes = bytes, .since = MonotonicTime::Now()});
  }
}

absl::Status ContentStore::Upload::ReadPartial() {
  std::vector<char> piece(1 << 20);
  is_faulty_ = true;
  if (::ftruncate(file_.get(), static_cast<off_t>(offset_bytes_)) != 0)
    return absl::InternalError(absl::StrCat("truncating ", partial_path_, " failed: ", std::strerror(errno)));
  while (received_bytes_ < offset_bytes_) {
    const ssize_t count = ::read(file_.get(), piece.data(), piece.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return absl::InternalError(absl::StrCat("reading ", partial_path_, " failed: ", std::strerror(errno)));
    hash_.Update(piece.data(), static_cast<std::size_t>(count));
    received_bytes_ += static_cast<std::uint64_t>(count);
  }
  is_faulty_ = false;
  return absl::OkStatus();
}

absl::Status ContentStore::Upload::Append(std::string_view piece) {
  if (received_bytes_ < offset_bytes_) TANDEM_RETURN_IF_ERROR(ReadPartial());
  if (piece.size() > size_bytes_ - received_bytes_) {
    is_faulty_ = true;
    return absl::InvalidArgumentError(absl::StrCat("upload of ", sha256_, ": more than the announced ", size_bytes_, " bytes"));
  }
  std::size_t written = 0;
  while (written < piece.size()) {
    const ssize_t count = ::write(file_.get(), piece.data() + written, piece.size() - written);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      is_faulty_ = true;
      return absl::ResourceExhaustedError(absl::StrCat("writing ", partial_path_, " failed: ", std::strerror(errno)));
    }
    written += static_cast<std::size_t>(count);
  }
  hash_.Update(piece);
  received_bytes_ += piece.size();
  return absl::OkStatus();
}

absl::Status ContentStore::Upload::Commit() {
  if (received_bytes_ < offset_bytes_) TANDEM_RETURN_IF_ERROR(ReadPartial());
  if (received_bytes_ != size_bytes_) {
    return absl::InvalidArgumentError(
        absl::StrCat("upload of ", sha256_, ": ", received_bytes_, " bytes came; ", size_bytes_, " were announced"));
  }
  if (const std::string found = hash_.Finish(); found != sha256_) {
    is_faulty_ = true;
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
  MutexLock lock(&store_->mutex_);
  if (was_present) store_->used_bytes_ -= size_bytes_;
  if (const auto partial = store_->partials_.find(sha256_); partial != store_->partials_.end()) store_->Drop(partial);
  return absl::OkStatus();
}

}  // namespace tandem

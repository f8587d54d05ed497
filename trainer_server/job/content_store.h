// Data sets and adapter files by their SHA-256: sent twice, kept once. An upload goes to another name, is synced, then renamed,
// so that what stands under an address is always whole. What came of an upload that broke off is kept for the next to go on from.
// Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "absl/time/time.h"
#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/base/mutex.h"
#include "common/base/status.h"
#include "common/base/unique_fd.h"

namespace tandem {

class ContentStore {
 public:
  static constexpr absl::Duration kPartialLife = absl::Hours(24);
  static constexpr std::size_t kMaxPartials = 64;

  // Makes `directory`. Unfinished uploads of a store before it are partial content.
  static absl::StatusOr<std::unique_ptr<ContentStore>> Open(const std::string& directory, std::uint64_t limit_bytes);

  bool Has(const std::string& sha256) const;
  // Errors: INVALID_ARGUMENT (not 64 lower-case hexadecimal digits), NOT_FOUND.
  absl::StatusOr<std::string> PathOf(const std::string& sha256) const;

  // How much there is of an upload that broke off; 0: nothing. Partial content goes after kPartialLife, when there is more than
  // kMaxPartials of it, or when an upload needs its room: the oldest first.
  std::uint64_t PartialBytes(const std::string& sha256);

  // One upload; confined to one thread. Dropped before all of it came it leaves partial content; after an error of Append, or of
  // Commit with all of it there, nothing.
  class Upload {
   public:
    ~Upload();
    // Errors: INVALID_ARGUMENT when more than the announced size comes, RESOURCE_EXHAUSTED (the disk).
    absl::Status Append(std::string_view piece);
    // Errors: INVALID_ARGUMENT when size or SHA-256 differ from what was announced; both are named.
    absl::Status Commit();

   private:
    friend class ContentStore;
    Upload(ContentStore* store, UniqueFd file, std::string partial_path, std::string sha256, std::uint64_t size_bytes,
           std::uint64_t offset_bytes);
    // Hashes the bytes of the upload before. Not under the store's lock: there may be gigabytes.
    absl::Status ReadPartial();

    ContentStore* const store_;
    UniqueFd file_;
    const std::string partial_path_;
    const std::string sha256_;
    const std::uint64_t size_bytes_;
    const std::uint64_t offset_bytes_;  // the first, which an upload before left in the file
    std::uint64_t received_bytes_ = 0;
    bool is_faulty_ = false;
    Sha256 hash_;
  };
  // Goes on from partial content when `offset_bytes` is not 0. Errors: INVALID_ARGUMENT (address, offset beyond the size),
  // RESOURCE_EXHAUSTED (the store's limit), ABORTED (offset beyond PartialBytes).
  absl::StatusOr<std::unique_ptr<Upload>> BeginUpload(const std::string& sha256, std::uint64_t size_bytes,
                                                      std::uint64_t offset_bytes = 0);

 private:
  ContentStore(std::string directory, std::uint64_t limit_bytes) : directory_(std::move(directory)), limit_bytes_(limit_bytes) {}
  struct Partial {
    std::uint64_t bytes = 0;
    MonotonicTime since;
  };
  using Partials = std::map<std::string, Partial>;  // by SHA-256 of the whole

  std::string FinalPath(const std::string& sha256) const { return directory_ + "/" + sha256; }
  std::string PartialPath(const std::string& sha256) const;
  void Keep(const std::string& path, const std::string& sha256, Partial partial) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Drop(Partials::iterator partial) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Partial content that is too old or too much, then as much as `size_bytes` more bytes need.
  void MakeRoom(std::uint64_t size_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string directory_;
  const std::uint64_t limit_bytes_;
  mutable Mutex mutex_;
  std::uint64_t used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // with what the uploads under way announced, and the partials
  Partials partials_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t next_upload_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace tandem

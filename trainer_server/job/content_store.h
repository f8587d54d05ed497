// Data sets and adapter files by their SHA-256: sent twice, kept once. An upload goes to another name, is synced, then renamed,
// so that what stands under an address is always whole. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "common/base/hash.h"
#include "common/base/mutex.h"
#include "common/base/status.h"
#include "common/base/unique_fd.h"

namespace tandem {

class ContentStore {
 public:
  // Makes `directory` and removes unfinished uploads.
  static absl::StatusOr<std::unique_ptr<ContentStore>> Open(const std::string& directory, std::uint64_t limit_bytes);

  bool Has(const std::string& sha256) const;
  // Errors: INVALID_ARGUMENT (not 64 lower-case hexadecimal digits), NOT_FOUND.
  absl::StatusOr<std::string> PathOf(const std::string& sha256) const;

  // One upload; confined to one thread. Dropped without Commit it leaves nothing.
  class Upload {
   public:
    ~Upload();
    // Errors: INVALID_ARGUMENT when more than the announced size comes.
    absl::Status Append(std::string_view piece);
    // Errors: INVALID_ARGUMENT when size or SHA-256 differ from what was announced; both are named.
    absl::Status Commit();

   private:
    friend class ContentStore;
    Upload(ContentStore* store, UniqueFd file, std::string partial_path, std::string sha256, std::uint64_t size_bytes);
    ContentStore* const store_;
    UniqueFd file_;
    const std::string partial_path_;
    const std::string sha256_;
    const std::uint64_t size_bytes_;
    std::uint64_t received_bytes_ = 0;
    Sha256 hash_;
  };
  // Errors: INVALID_ARGUMENT (address), RESOURCE_EXHAUSTED (the store's limit).
  absl::StatusOr<std::unique_ptr<Upload>> BeginUpload(const std::string& sha256, std::uint64_t size_bytes);

 private:
  ContentStore(std::string directory, std::uint64_t limit_bytes, std::uint64_t used_bytes)
      : directory_(std::move(directory)), limit_bytes_(limit_bytes), used_bytes_(used_bytes) {}
  std::string FinalPath(const std::string& sha256) const { return directory_ + "/" + sha256; }

  const std::string directory_;
  const std::uint64_t limit_bytes_;
  mutable Mutex mutex_;
  std::uint64_t used_bytes_ ABSL_GUARDED_BY(mutex_);  // with what the uploads under way announced
  std::uint64_t next_upload_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace tandem

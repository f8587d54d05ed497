// Files that are whole or absent after a crash. Blocking; thread-compatible.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "common/base/status.h"

namespace tandem {

// Writes and fsyncs. Errors: what the system said, with the path.
absl::Status WriteFileDurably(const std::string& path, std::span<const std::byte> bytes);
absl::Status WriteFileDurably(const std::string& path, const std::string& text);
// Makes the names in a directory durable: new files, renames, removals.
absl::Status SyncDirectory(const std::string& path);
// Errors: NOT_FOUND, RESOURCE_EXHAUSTED (longer than `limit_bytes`).
absl::StatusOr<std::string> ReadWholeFile(const std::string& path, std::size_t limit_bytes);
absl::Status MakeDirectories(const std::string& path);

}  // namespace tandem

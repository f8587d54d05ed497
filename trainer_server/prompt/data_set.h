// A job's data set: JSONL on disk, one JSON object a line, found by an index of line offsets. Rows are read when they are drawn.
// Immutable after Open; thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/base/status.h"
#include "common/base/unique_fd.h"
#include "nlohmann/json.hpp"

namespace tandem {

inline constexpr std::size_t kMaxRowBytes = 256 << 10;
inline constexpr std::size_t kMaxRows = std::size_t{1} << 24;

class DataSet {
 public:
  // Indexes the file; blank lines are no rows. Errors: NOT_FOUND (path), INVALID_ARGUMENT naming the line (too long), the number
  // of rows (0, or beyond kMaxRows).
  static absl::StatusOr<std::shared_ptr<const DataSet>> Open(const std::string& path);

  std::size_t num_rows() const { return rows_.size(); }
  std::size_t line_of(std::size_t row_index) const { return rows_[row_index].line; }  // from 1
  std::size_t size_bytes_of(std::size_t row_index) const { return rows_[row_index].size_bytes; }
  // Errors: INVALID_ARGUMENT naming the line when it is no JSON object. Requires: row_index < num_rows().
  absl::StatusOr<nlohmann::json> ReadRow(std::size_t row_index) const;

 private:
  struct Row {
    std::uint64_t begin_bytes = 0;
    std::uint32_t size_bytes = 0;
    std::uint32_t line = 0;
  };
  DataSet(UniqueFd file, std::vector<Row> rows) : file_(std::move(file)), rows_(std::move(rows)) {}

  UniqueFd file_;
  std::vector<Row> rows_;
};

}  // namespace tandem

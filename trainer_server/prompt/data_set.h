// A job's data set on disk, found by an index of rows: JSON lines, one JSON array of objects, or CSV whose first record names the
// fields. Its first character that is no white space tells which: '{', '[', anything else. Rows are read when they are drawn, so
// that the file may be larger than memory: the index takes 16 bytes a row. Immutable after Open; thread-safe.
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

inline constexpr std::size_t kMaxRowBytes = 4 << 20;
inline constexpr std::size_t kMaxRows = std::size_t{1} << 24;

enum class DataFormat { kJsonLines, kJsonArray, kCsv };

class DataSet {
 public:
  // Indexes the file; blank lines are no rows. Errors: NOT_FOUND (path), INVALID_ARGUMENT naming the line (too long, no such
  // format, a Parquet or compressed file), the number of rows (0, or beyond kMaxRows).
  static absl::StatusOr<std::shared_ptr<const DataSet>> Open(const std::string& path);

  DataFormat format() const { return format_; }
  std::size_t num_rows() const { return rows_.size(); }
  std::size_t line_of(std::size_t row_index) const { return rows_[row_index].line; }  // where the row begins, from 1
  std::size_t size_bytes_of(std::size_t row_index) const { return rows_[row_index].size_bytes; }
  // An object; CSV gives every field as text. Errors: INVALID_ARGUMENT naming the line when it is none. Requires: row_index <
  // num_rows().
  absl::StatusOr<nlohmann::json> ReadRow(std::size_t row_index) const;

 private:
  struct Row {
    std::uint64_t begin_bytes = 0;
    std::uint32_t size_bytes = 0;
    std::uint32_t line = 0;
  };
  class Indexer;
  explicit DataSet(UniqueFd file) : file_(std::move(file)) {}
  absl::StatusOr<std::string> ReadText(const Row& row) const;
  absl::Status TakeCsvHeader();

  UniqueFd file_;
  DataFormat format_ = DataFormat::kJsonLines;
  std::vector<Row> rows_;
  std::vector<std::string> csv_fields_;
};

}  // namespace tandem

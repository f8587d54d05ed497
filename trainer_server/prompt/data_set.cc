#include "trainer_server/prompt/data_set.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace tandem {

absl::StatusOr<std::shared_ptr<const DataSet>> DataSet::Open(const std::string& path) {
  UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.is_open()) return absl::NotFoundError(absl::StrCat("cannot open data set ", path, ": ", std::strerror(errno)));
  std::vector<Row> rows;
  std::vector<char> buffer(1 << 20);
  std::uint64_t position = 0, line_begin = 0;
  std::uint32_t line = 1;
  bool is_blank = true;
  const auto end_line = [&](std::uint64_t end) -> absl::Status {
    const std::uint64_t size = end - line_begin;
    if (!is_blank) {
      if (size > kMaxRowBytes) {
        return absl::InvalidArgumentError(
            absl::StrCat("data set line ", line, " has ", size, " bytes; the limit is ", kMaxRowBytes));
      }
      if (rows.size() == kMaxRows) {
        return absl::InvalidArgumentError(absl::StrCat("the data set has more than ", kMaxRows, " rows"));
      }
      rows.push_back({line_begin, static_cast<std::uint32_t>(size), line});
    }
    line_begin = end + 1;
    ++line;
    is_blank = true;
    return absl::OkStatus();
  };
  while (true) {
    const ssize_t got = ::pread(file.get(), buffer.data(), buffer.size(), static_cast<off_t>(position));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return absl::DataLossError(absl::StrCat("reading data set ", path, " failed: ", std::strerror(errno)));
    if (got == 0) break;
    for (ssize_t i = 0; i < got; ++i) {
      const char c = buffer[static_cast<std::size_t>(i)];
      if (c == '\n') {
        TANDEM_RETURN_IF_ERROR(end_line(position + static_cast<std::uint64_t>(i)));
      } else if (c != ' ' && c != '\t' && c != '\r') {
        is_blank = false;
      }
    }
    position += static_cast<std::uint64_t>(got);
  }
  if (position > line_begin) TANDEM_RETURN_IF_ERROR(end_line(position));
  if (rows.empty()) return absl::InvalidArgumentError("the data set has 0 rows; it must have at least 1");
  return std::shared_ptr<const DataSet>(new DataSet(std::move(file), std::move(rows)));
}

absl::StatusOr<nlohmann::json> DataSet::ReadRow(std::size_t row_index) const {
  const Row& row = rows_[row_index];
  std::string text(row.size_bytes, '\0');
  std::size_t filled = 0;
  while (filled < text.size()) {
    const ssize_t got =
        ::pread(file_.get(), text.data() + filled, text.size() - filled, static_cast<off_t>(row.begin_bytes + filled));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return absl::DataLossError(absl::StrCat("data set line ", row.line, " cannot be read"));
    filled += static_cast<std::size_t>(got);
  }
  // Nesting is bounded: a parser that recurses must not be led off its stack.
  constexpr int kMaxDepth = 64;
  bool is_too_deep = false;
  nlohmann::json value = nlohmann::json::parse(
      text,
      [&](int depth, nlohmann::json::parse_event_t, nlohmann::json&) {
        is_too_deep = is_too_deep || depth > kMaxDepth;
        return !is_too_deep;
      },
      /*allow_exceptions=*/false);
  if (is_too_deep) {
    return absl::InvalidArgumentError(absl::StrCat("data set line ", row.line, " nests deeper than ", kMaxDepth, " levels"));
  }
  if (!value.is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "data set line ", row.line, " is not a JSON object: ", text.substr(0, std::min<std::size_t>(text.size(), 80))));
  }
  return value;
}

}  // namespace tandem

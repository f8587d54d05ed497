#include "trainer_server/prompt/data_set.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>
#include <span>
#include <string_view>

#include "common/model/utf8.h"

namespace tandem {
namespace {

constexpr std::size_t kReadBytes = 1 << 20;
constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";

bool IsSpace(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }

// The fields of one record, RFC 4180: a field may stand in quotes, and then hold commas, line ends and doubled quotes.
std::vector<std::string> SplitCsv(std::string_view record) {
  if (record.ends_with('\r')) record.remove_suffix(1);
  std::vector<std::string> fields(1);
  bool is_quoted = false;
  for (std::size_t i = 0; i < record.size(); ++i) {
    const char c = record[i];
    if (is_quoted && c == '"' && i + 1 < record.size() && record[i + 1] == '"') {
      fields.back() += '"';
      ++i;
    } else if (c == '"' && (is_quoted || fields.back().empty())) {
      is_quoted = !is_quoted;
    } else if (c == ',' && !is_quoted) {
      fields.emplace_back();
    } else {
      fields.back() += c;
    }
  }
  return fields;
}

}  // namespace

// Takes the file byte by byte and notes where rows lie.
class DataSet::Indexer {
 public:
  explicit Indexer(DataSet* data) : data_(data) {}

  // The file's first bytes, its byte order mark taken off.
  absl::Status Begin(std::string_view head) {
    if (head.starts_with("PAR1")) {
      return absl::InvalidArgumentError(
          "the data set is a Parquet file; `python3 -m tandem.convert FILE > train.jsonl` makes JSON lines of it");
    }
    for (const std::string_view magic : {std::string_view("\x1f\x8b"), std::string_view("\x28\xb5\x2f\xfd"),
                                         std::string_view("PK\x03\x04"), std::string_view("BZh")}) {
      if (head.starts_with(magic)) return absl::InvalidArgumentError("the data set is compressed; unpack it first");
    }
    const auto first = std::ranges::find_if_not(head, IsSpace);
    if (first == head.end()) return absl::OkStatus();
    data_->format_ = *first == '{' ? DataFormat::kJsonLines : *first == '[' ? DataFormat::kJsonArray : DataFormat::kCsv;
    return absl::OkStatus();
  }

  absl::Status Take(char c, std::uint64_t position) {
    const absl::Status status = data_->format_ == DataFormat::kJsonArray ? TakeArrayByte(c, position) : TakeLineByte(c, position);
    if (c == '\n') ++line_;
    return status;
  }

  absl::Status End(std::uint64_t size_bytes) {
    if (data_->format_ == DataFormat::kJsonArray) {
      if (place_ == Place::kBehindArray) return absl::OkStatus();
      return absl::InvalidArgumentError(absl::StrCat("data set line ", line_, ": the JSON array does not end"));
    }
    if (is_string_) { return absl::InvalidArgumentError(absl::StrCat("data set line ", row_line_, ": a quote is not closed")); }
    return EndLine(size_bytes);
  }

 private:
  enum class Place { kBeforeArray, kBeforeRow, kInRow, kBehindRow, kBehindArray };

  absl::Status Add(std::uint64_t end) {
    const std::uint64_t size = end - row_begin_;
    if (size > kMaxRowBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("data set line ", row_line_, " has a row of ", size, " bytes; the limit is ", kMaxRowBytes));
    }
    // A CSV's first is its header.
    if (data_->rows_.size() == kMaxRows + (data_->format_ == DataFormat::kCsv ? 1 : 0)) {
      return absl::InvalidArgumentError(absl::StrCat("the data set has more than ", kMaxRows, " rows"));
    }
    data_->rows_.push_back({row_begin_, static_cast<std::uint32_t>(size), row_line_});
    return absl::OkStatus();
  }

  absl::Status TakeLineByte(char c, std::uint64_t position) {
    if (data_->format_ == DataFormat::kCsv) TakeQuote(c);
    if (!IsSpace(c)) is_blank_ = false;
    if (c != '\n' || is_string_) return CheckOpen(position);
    return EndLine(position);
  }

  // A quote opens at a field's begin alone; one that closes and opens at once is a doubled quote.
  void TakeQuote(char c) {
    if (c == '"' && is_string_) {
      is_string_ = false;
      can_open_ = true;
    } else if (c == '"' && can_open_) {
      is_string_ = true;
    } else if (!is_string_) {
      can_open_ = c == ',' || c == '\n';
    }
  }

  absl::Status EndLine(std::uint64_t end) {
    if (!is_blank_) TANDEM_RETURN_IF_ERROR(Add(end));
    row_begin_ = end + 1;
    row_line_ = line_ + 1;
    is_blank_ = true;
    return absl::OkStatus();
  }

  // A quote that never closes must not be followed to the file's end.
  absl::Status CheckOpen(std::uint64_t position) const {
    if (position - row_begin_ < 4 * kMaxRowBytes) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("data set line ", row_line_, " has a row of more than ", 4 * kMaxRowBytes,
                                                   " bytes; the limit is ", kMaxRowBytes));
  }

  absl::Status TakeArrayByte(char c, std::uint64_t position) {
    if (place_ == Place::kInRow) {
      if (is_string_) {
        is_string_ = is_escaped_ || c != '"';
        is_escaped_ = !is_escaped_ && c == '\\';
        return CheckOpen(position);
      }
      if (c == '"') is_string_ = true;
      if (c == '{' || c == '[') ++depth_;
      if (c == '}' || c == ']') --depth_;
      if (depth_ > 0) return CheckOpen(position);
      place_ = Place::kBehindRow;
      return Add(position + 1);
    }
    if (IsSpace(c)) return absl::OkStatus();
    if (place_ == Place::kBeforeArray && c == '[') {
      place_ = Place::kBeforeRow;
    } else if (place_ == Place::kBeforeRow && c == '{') {
      place_ = Place::kInRow;
      row_begin_ = position;
      row_line_ = line_;
      depth_ = 1;
    } else if (place_ == Place::kBehindRow && c == ',') {
      place_ = Place::kBeforeRow;
    } else if ((place_ == Place::kBehindRow || (place_ == Place::kBeforeRow && data_->rows_.empty())) && c == ']') {
      place_ = Place::kBehindArray;
    } else {
      const char* const wanted = place_ == Place::kBeforeRow   ? "an object"
                                 : place_ == Place::kBehindRow ? "',' or ']'"
                                                               : "nothing more";
      return absl::InvalidArgumentError(absl::StrCat("data set line ", line_, ": '", std::string(1, c), "' where ", wanted,
                                                     " was expected: a JSON array of objects, or one object a line"));
    }
    return absl::OkStatus();
  }

  DataSet* const data_;
  std::uint64_t row_begin_ = 0;
  std::uint32_t line_ = 1, row_line_ = 1;
  bool is_blank_ = true;
  bool is_string_ = false;  // within the quotes of a JSON array or CSV
  bool can_open_ = true;
  bool is_escaped_ = false;
  Place place_ = Place::kBeforeArray;
  std::size_t depth_ = 0;
};

absl::StatusOr<std::shared_ptr<const DataSet>> DataSet::Open(const std::string& path) {
  UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.is_open()) return absl::NotFoundError(absl::StrCat("cannot open data set ", path, ": ", std::strerror(errno)));
  std::shared_ptr<DataSet> data(new DataSet(std::move(file)));
  Indexer indexer(data.get());
  std::vector<char> buffer(kReadBytes);
  std::uint64_t position = 0;
  while (true) {
    const ssize_t got = ::pread(data->file_.get(), buffer.data(), buffer.size(), static_cast<off_t>(position));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return absl::DataLossError(absl::StrCat("reading data set ", path, " failed: ", std::strerror(errno)));
    if (got == 0) break;
    std::span<char> bytes(buffer.data(), static_cast<std::size_t>(got));
    if (position == 0) {
      // White space stands for the mark, so that positions are the file's.
      if (std::string_view(bytes.data(), bytes.size()).starts_with(kByteOrderMark)) {
        std::ranges::fill(bytes.first(kByteOrderMark.size()), ' ');
      }
      TANDEM_RETURN_IF_ERROR(indexer.Begin({bytes.data(), bytes.size()}));
    }
    for (const char c : bytes) TANDEM_RETURN_IF_ERROR(indexer.Take(c, position++));
  }
  TANDEM_RETURN_IF_ERROR(indexer.End(position));
  if (data->format_ == DataFormat::kCsv && !data->rows_.empty()) TANDEM_RETURN_IF_ERROR(data->TakeCsvHeader());
  if (data->rows_.empty()) return absl::InvalidArgumentError("the data set has 0 rows; it must have at least 1");
  return std::shared_ptr<const DataSet>(std::move(data));
}

absl::Status DataSet::TakeCsvHeader() {
  TANDEM_ASSIGN_OR_RETURN(const std::string header, ReadText(rows_[0]));
  csv_fields_ = SplitCsv(header);
  std::set<std::string> known;
  for (std::size_t i = 0; i < csv_fields_.size(); ++i) {
    if (!IsWellFormed(csv_fields_[i])) {
      return absl::InvalidArgumentError(
          absl::StrCat("data set line ", rows_[0].line, ": field ", i + 1, " of the CSV header is not UTF-8"));
    }
    if (!csv_fields_[i].empty() && known.insert(csv_fields_[i]).second) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("data set line ", rows_[0].line, ": field ", i + 1, " of the CSV header, '",
                     ReplaceIllFormed(std::string_view(csv_fields_[i]).substr(0, 80)),
                     "', is empty or there twice. JSON lines begin with '{', a JSON array with '['"));
  }
  rows_.erase(rows_.begin());
  return absl::OkStatus();
}

absl::StatusOr<std::string> DataSet::ReadText(const Row& row) const {
  std::string text(row.size_bytes, '\0');
  std::size_t filled = 0;
  while (filled < text.size()) {
    const ssize_t got =
        ::pread(file_.get(), text.data() + filled, text.size() - filled, static_cast<off_t>(row.begin_bytes + filled));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return absl::DataLossError(absl::StrCat("data set line ", row.line, " cannot be read"));
    filled += static_cast<std::size_t>(got);
  }
  if (row.begin_bytes == 0 && text.starts_with(kByteOrderMark)) text.erase(0, kByteOrderMark.size());
  return text;
}

absl::StatusOr<nlohmann::json> DataSet::ReadRow(std::size_t row_index) const {
  const Row& row = rows_[row_index];
  TANDEM_ASSIGN_OR_RETURN(const std::string text, ReadText(row));
  if (format_ == DataFormat::kCsv) {
    std::vector<std::string> fields = SplitCsv(text);
    if (fields.size() != csv_fields_.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("data set line ", row.line, " has ", fields.size(), " fields; the CSV header has ", csv_fields_.size()));
    }
    nlohmann::json value = nlohmann::json::object();
    for (std::size_t i = 0; i < fields.size(); ++i) {
      if (!IsWellFormed(fields[i])) {
        return absl::InvalidArgumentError(
            absl::StrCat("data set line ", row.line, ": field '", csv_fields_[i], "' is not UTF-8"));
      }
      value[csv_fields_[i]] = std::move(fields[i]);
    }
    return value;
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
        "data set line ", row.line, " is not a JSON object: ", ReplaceIllFormed(std::string_view(text).substr(0, 80))));
  }
  return value;
}

}  // namespace tandem

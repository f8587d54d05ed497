#include "trainer_server/job/history.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/log.h"
#include "google/protobuf/util/json_util.h"
#include "nlohmann/json.hpp"
#include "trainer_server/checkpoint/durable_file.h"

namespace tandem {
namespace {

using OrderedJson = nlohmann::ordered_json;

// By HistoryEvent::Kind.
constexpr const char* kKinds[] = {"step", "evaluation", "data"};
constexpr char kTimes[] = "times";
constexpr char kKind[] = "kind";
constexpr char kStep[] = "step";

std::string CompletionsPath(const std::string& directory, std::uint64_t step) {
  return absl::StrFormat("%s/completions/step-%06d.jsonl", directory, step);
}

absl::Status SystemError(const std::string& what) {
  const std::string message = absl::StrCat(what, " failed: ", std::strerror(errno));
  if (errno == ENOSPC || errno == EDQUOT) return absl::ResourceExhaustedError(message + ": make room, then resume");
  return absl::InternalError(message);
}

}  // namespace

HistoryEvent DataEvent(const v1::DataCounts& counts) {
  HistoryEvent event{.kind = HistoryEvent::Kind::kData, .step = 0, .values = {}, .times = {}};
  const auto* const fields = v1::DataCounts::descriptor();
  for (int i = 0; i < fields->field_count(); ++i) {
    const auto count = counts.GetReflection()->GetUInt64(counts, fields->field(i));
    event.values.emplace_back(fields->field(i)->name(), static_cast<double>(count));
  }
  return event;
}

v1::DataCounts DataCountsOf(const NamedValues& values) {
  v1::DataCounts counts;
  for (const auto& [name, value] : values) {
    const auto* const field = v1::DataCounts::descriptor()->FindFieldByName(name);
    if (field != nullptr) counts.GetReflection()->SetUInt64(&counts, field, CountOf<std::uint64_t>(value));
  }
  return counts;
}

std::string ToJsonLine(const HistoryEvent& event) {
  OrderedJson json;
  json[kKind] = kKinds[static_cast<std::size_t>(event.kind)];
  json[kStep] = event.step;
  for (const auto& [name, value] : event.values) {
    if (std::isfinite(value)) json[name] = value;
  }
  OrderedJson times = OrderedJson::object();
  for (const auto& [name, value] : event.times) {
    if (std::isfinite(value)) times[name] = value;
  }
  json[kTimes] = times;
  return json.dump() + "\n";
}

std::optional<HistoryEvent> FromJsonLine(const std::string& line) {
  const OrderedJson json = OrderedJson::parse(line, nullptr, false);
  if (!json.is_object() || !json.contains(kKind) || !json.contains(kStep) || !json[kStep].is_number_unsigned())
    return std::nullopt;
  HistoryEvent event;
  const auto* const kind = std::ranges::find(kKinds, json[kKind]);
  if (kind == std::end(kKinds)) return std::nullopt;
  event.kind = static_cast<HistoryEvent::Kind>(kind - kKinds);
  event.step = json[kStep].get<std::uint64_t>();
  for (const auto& [name, value] : json.items()) {
    if (name != kStep && value.is_number()) event.values.emplace_back(name, value.get<double>());
  }
  if (json.contains(kTimes) && json[kTimes].is_object()) {
    for (const auto& [name, value] : json[kTimes].items()) {
      if (value.is_number()) event.times.emplace_back(name, value.get<double>());
    }
  }
  return event;
}

namespace {

// The whole lines at the front of a history that tell of `step` or earlier ones.
std::uint64_t BytesUpTo(const std::string& path, std::uint64_t step) {
  std::ifstream file(path, std::ios::binary);
  std::uint64_t size_bytes = 0;
  for (std::string line; std::getline(file, line) && !file.eof(); size_bytes += line.size() + 1) {
    const std::optional<HistoryEvent> event = FromJsonLine(line);
    if (!event.has_value() || event->step > step) break;
  }
  return size_bytes;
}

}  // namespace

absl::StatusOr<HistoryWriter> HistoryWriter::Open(const std::string& directory, std::uint64_t keep_bytes, std::uint64_t step) {
  TANDEM_RETURN_IF_ERROR(MakeDirectories(directory + "/completions"));
  const std::string path = directory + "/history.jsonl";
  UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  if (!file.is_open()) return SystemError("opening " + path);
  struct stat status = {};
  if (::fstat(file.get(), &status) != 0) return SystemError("reading " + path);
  if (static_cast<std::uint64_t>(status.st_size) < keep_bytes) {
    const std::uint64_t whole_bytes = BytesUpTo(path, step);
    TANDEM_LOG(kWarning, "job", "a history was cut, what it lost is not told again path=", path, " bytes=", status.st_size,
               " of=", keep_bytes, " kept=", whole_bytes, " step=", step);
    keep_bytes = whole_bytes;
  }
  if (::ftruncate(file.get(), static_cast<off_t>(keep_bytes)) != 0) return SystemError("cutting " + path);
  return HistoryWriter(directory, std::move(file), keep_bytes);
}

absl::Status HistoryWriter::Append(const HistoryEvent& event) {
  const std::string line = ToJsonLine(event);
  for (std::size_t written = 0; written < line.size();) {  // one call, unless the disk is full
    const ssize_t count = ::write(file_.get(), line.data() + written, line.size() - written);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return SystemError("appending to the history of " + directory_);
    written += static_cast<std::size_t>(count);
  }
  size_bytes_ += line.size();
  return absl::OkStatus();
}

absl::Status HistoryWriter::Sync() {
  if (::fdatasync(file_.get()) != 0) return SystemError("syncing the history of " + directory_);
  return absl::OkStatus();
}

absl::Status HistoryWriter::WriteCompletions(std::uint64_t step, std::span<const v1::CompletionRecord> records) {
  const std::string path = CompletionsPath(directory_, step), partial = path + ".partial";
  absl::Status written;
  {
    std::ofstream file(partial, std::ios::binary | std::ios::trunc);
    google::protobuf::util::JsonPrintOptions options;
    options.preserve_proto_field_names = true;
    for (const v1::CompletionRecord& record : records) {
      std::string line;
      if (!google::protobuf::util::MessageToJsonString(record, &line, options).ok())
        written = absl::InternalError(absl::StrCat("step ", step, ": a completion cannot be written as JSON"));
      file << line << '\n';
    }
    file.flush();
    if (!file) written = SystemError("writing " + partial);
  }
  if (written.ok() && std::rename(partial.c_str(), path.c_str()) != 0) written = SystemError("renaming " + partial);
  if (!written.ok()) ::unlink(partial.c_str());  // what is in it takes room that a full disk has better use for
  return written;
}

void HistoryReader::GoTo(std::uint64_t offset) {
  offset_ = offset;
  pending_.clear();
  consumed_ = 0;
}

std::optional<std::string> HistoryReader::NextLine() {
  while (true) {
    if (const std::size_t end = pending_.find('\n', consumed_); end != std::string::npos) {
      std::string line = pending_.substr(consumed_, end - consumed_);
      consumed_ = end + 1;
      return line;
    }
    pending_.erase(0, consumed_);
    offset_ += std::exchange(consumed_, 0);
    std::ifstream file(path_, std::ios::binary);
    if (!file) return std::nullopt;
    file.seekg(0, std::ios::end);
    const auto size = static_cast<std::uint64_t>(file.tellg());
    if (size < offset_) GoTo(0);
    const std::uint64_t begin = offset_ + pending_.size();
    if (size <= begin) return std::nullopt;
    constexpr std::uint64_t kReadBytes = 256 << 10;
    std::string piece(std::min(size - begin, kReadBytes), '\0');
    file.seekg(static_cast<std::streamoff>(begin));
    file.read(piece.data(), static_cast<std::streamsize>(piece.size()));
    if (file.gcount() <= 0) return std::nullopt;
    pending_.append(piece, 0, static_cast<std::size_t>(file.gcount()));
  }
}

bool HistoryReader::IsPassedOver(std::string_view line) const {
  static const std::string kBegin = absl::StrCat("{\"", kKind, "\":\"", kKinds[0], "\",\"", kStep, "\":");
  if (stride_steps_ <= 1 || !line.starts_with(kBegin)) return false;
  std::uint64_t step = 0;
  line.remove_prefix(kBegin.size());
  return std::from_chars(line.data(), line.data() + line.size(), step).ec == std::errc() && step % stride_steps_ != 0;
}

std::optional<HistoryEvent> HistoryReader::Next() {
  while (const auto line = NextLine()) {
    if (IsPassedOver(*line)) continue;
    if (auto event = FromJsonLine(*line)) return event;
  }
  return std::nullopt;
}

void HistoryReader::Seek(std::uint64_t step) {
  std::error_code error;
  // The first wanted line begins in [low, high]; lines are in the order of their steps.
  std::uint64_t low = 0, high = std::filesystem::file_size(path_, error);
  if (error) high = 0;
  constexpr std::uint64_t kNearBytes = 64 << 10;
  while (high - low > kNearBytes) {
    const std::uint64_t middle = low + (high - low) / 2;
    GoTo(middle);
    std::optional<HistoryEvent> event;
    if (NextLine().has_value()) {  // the rest of the line in which `middle` lies
      const auto line = NextLine();
      if (line.has_value()) event = FromJsonLine(*line);
    }
    if (event.has_value() && event->step < step) {
      low = middle;
    } else {
      high = middle;
    }
  }
  GoTo(low);
  if (low > 0) NextLine();
  while (true) {
    const std::uint64_t begin = offset_ + consumed_;
    const auto line = NextLine();
    if (!line.has_value()) return;
    const std::optional<HistoryEvent> event = FromJsonLine(*line);
    if (event.has_value() && event->step >= step) return GoTo(begin);
  }
}

std::vector<std::uint64_t> StepsWithCompletions(const std::string& directory) {
  std::vector<std::uint64_t> steps;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(directory + "/completions", error), end; !error && entry != end;
       entry.increment(error)) {
    std::uint64_t step = 0;
    const std::string name = entry->path().filename().string();
    if (std::sscanf(name.c_str(), "step-%" SCNu64 ".jsonl", &step) == 1 && CompletionsPath(directory, step).ends_with(name)) {
      steps.push_back(step);
    }
  }
  std::ranges::sort(steps);
  return steps;
}

absl::Status ReadCompletions(const std::string& directory, std::uint64_t step,
                             const std::function<bool(const v1::CompletionRecord& record)>& visit) {
  std::ifstream file(CompletionsPath(directory, step), std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat("no completions of step ", step));
  std::string line;
  while (std::getline(file, line)) {
    v1::CompletionRecord record;
    if (!google::protobuf::util::JsonStringToMessage(line, &record).ok()) {
      return absl::DataLossError(absl::StrCat("a stored completion of step ", step, " cannot be read"));
    }
    if (!visit(record)) break;
  }
  return absl::OkStatus();
}

}  // namespace tandem

#include "trainer_server/job/history.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "absl/strings/str_format.h"
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
  return absl::InternalError(absl::StrCat(what, " failed: ", std::strerror(errno)));
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
    if (field != nullptr) counts.GetReflection()->SetUInt64(&counts, field, static_cast<std::uint64_t>(value));
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

absl::StatusOr<HistoryWriter> HistoryWriter::Open(const std::string& directory, std::uint64_t keep_bytes) {
  TANDEM_RETURN_IF_ERROR(MakeDirectories(directory + "/completions"));
  const std::string path = directory + "/history.jsonl";
  UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  if (!file.is_open()) return SystemError("opening " + path);
  struct stat status = {};
  if (::fstat(file.get(), &status) != 0) return SystemError("reading " + path);
  if (static_cast<std::uint64_t>(status.st_size) < keep_bytes) {
    return absl::DataLossError(absl::StrCat(path, " has ", status.st_size, " bytes; the checkpoint was made at ", keep_bytes));
  }
  if (::ftruncate(file.get(), static_cast<off_t>(keep_bytes)) != 0) return SystemError("cutting " + path);
  return HistoryWriter(directory, std::move(file), keep_bytes);
}

absl::Status HistoryWriter::Append(const HistoryEvent& event) {
  const std::string line = ToJsonLine(event);
  const ssize_t written = ::write(file_.get(), line.data(), line.size());
  if (written != static_cast<ssize_t>(line.size())) return SystemError("appending to the history of " + directory_);
  size_bytes_ += line.size();
  return absl::OkStatus();
}

absl::Status HistoryWriter::Sync() {
  if (::fdatasync(file_.get()) != 0) return SystemError("syncing the history of " + directory_);
  return absl::OkStatus();
}

absl::Status HistoryWriter::WriteCompletions(std::uint64_t step, std::span<const v1::CompletionRecord> records) {
  const std::string path = CompletionsPath(directory_, step), partial = path + ".partial";
  {
    std::ofstream file(partial, std::ios::binary | std::ios::trunc);
    google::protobuf::util::JsonPrintOptions options;
    options.preserve_proto_field_names = true;
    for (const v1::CompletionRecord& record : records) {
      std::string line;
      if (!google::protobuf::util::MessageToJsonString(record, &line, options).ok()) {
        return absl::InternalError(absl::StrCat("step ", step, ": a completion cannot be written as JSON"));
      }
      file << line << '\n';
    }
    file.flush();
    if (!file) return SystemError("writing " + partial);
  }
  if (std::rename(partial.c_str(), path.c_str()) != 0) return SystemError("renaming " + partial);
  return absl::OkStatus();
}

std::optional<HistoryEvent> HistoryReader::Next() {
  while (true) {
    if (const std::size_t end = pending_.find('\n'); end != std::string::npos) {
      const std::string line = pending_.substr(0, end);
      pending_.erase(0, end + 1);
      offset_ += end + 1;
      if (auto event = FromJsonLine(line)) return event;
      continue;
    }
    std::ifstream file(path_, std::ios::binary);
    if (!file) return std::nullopt;
    file.seekg(0, std::ios::end);
    const auto size = static_cast<std::uint64_t>(file.tellg());
    if (size < offset_) {
      offset_ = 0;
      pending_.clear();
    }
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

#include "client/job_history.h"

#include <array>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "client/progress.h"
#include "common/base/clock.h"
#include "common/rpc/channel.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "google/protobuf/wire_format_lite.h"
#include "nlohmann/json.hpp"

namespace tandem {
namespace {

using google::protobuf::internal::WireFormatLite;
using Values = std::vector<std::pair<std::string, double>>;

// The flat names and values of a step or an evaluation; none of the others.
Values ValuesOf(const v1::WatchResponse& event) {
  Values values;
  if (event.has_step()) {
    for (const v1::NamedValue& value : event.step().values()) values.emplace_back(value.name(), value.value());
  } else if (event.has_evaluation()) {
    const v1::EvaluationMetrics& evaluation = event.evaluation();
    values.emplace_back("reward", evaluation.reward());
    for (const v1::NamedValue& value : evaluation.rewards()) {
      values.emplace_back(absl::StrCat("rewards/", value.name(), "/mean"), value.value());
    }
    for (const v1::NamedValue& value : evaluation.values()) values.emplace_back(value.name(), value.value());
    values.emplace_back("num_prompts", evaluation.num_prompts());
  }
  return values;
}

constexpr std::array<std::uint32_t, 256> MakeCrc32cTable() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0u);
    table[i] = crc;
  }
  return table;
}

template <typename Integer>
std::string LittleEndian(Integer value) {
  std::string bytes(sizeof(value), '\0');
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>((value >> (8 * i)) & 0xff);
  return bytes;
}

// Event: wall_time = 1 (double), step = 2 (int64), file_version = 3 (string), summary = 5. Summary: value = 1. Value: tag = 1,
// simple_value = 2 (float).
template <typename Write>
std::string Encoded(const Write& write) {
  std::string bytes;
  {
    google::protobuf::io::StringOutputStream stream(&bytes);
    google::protobuf::io::CodedOutputStream coded(&stream);
    write(&coded);
  }
  return bytes;
}

std::string EncodedSummary(const std::string& prefix, const Values& values) {
  return Encoded([&](google::protobuf::io::CodedOutputStream* summary) {
    for (const auto& [name, value] : values) {
      const std::string encoded = Encoded([&, &name = name, &value = value](google::protobuf::io::CodedOutputStream* out) {
        WireFormatLite::WriteString(1, prefix + name, out);
        WireFormatLite::WriteFloat(2, static_cast<float>(value), out);
      });
      WireFormatLite::WriteBytes(1, encoded, summary);
    }
  });
}

}  // namespace

absl::StatusOr<JobHistory> FetchHistory(const Connection& connection, const std::string& job) {
  auto trainer = connection.Trainer();
  grpc::ClientContext context;
  context.set_deadline(GrpcDeadline(MonotonicTime::Now() + absl::Minutes(10)));
  v1::WatchRequest request;
  request.set_job(job);
  request.set_until_now(true);
  auto reader = trainer->Watch(&context, request);
  JobHistory history;
  v1::WatchResponse response;
  while (reader->Read(&response)) {
    if (response.has_status()) {
      history.status = response.status();
    } else {
      history.events.push_back(response);
    }
  }
  TANDEM_RETURN_IF_ERROR(CallStatus(reader->Finish(), "trainer_server", connection.trainer_address));
  return history;
}

std::vector<std::pair<double, double>> SeriesOf(const JobHistory& history, const std::string& name) {
  std::vector<std::pair<double, double>> series;
  for (const v1::WatchResponse& event : history.events) {
    if (!event.has_step()) continue;
    if (const auto value = ValueOf(event.step(), name)) series.emplace_back(event.step().step(), *value);
  }
  return series;
}

std::string ToFlatJson(const v1::WatchResponse& event) {
  nlohmann::ordered_json json;
  if (event.has_data()) {
    const v1::DataCounts& data = event.data();
    json = {{"kind", "data"},
            {"step", 0},
            {"rows", data.rows()},
            {"trained", data.trained()},
            {"held_out", data.held_out()},
            {"too_short", data.too_short()},
            {"too_long", data.too_long()},
            {"evaluated", data.evaluated()}};
  } else {
    json["kind"] = event.has_step() ? "step" : "evaluation";
    json["step"] = event.has_step() ? event.step().step() : event.evaluation().step();
    for (const auto& [name, value] : ValuesOf(event)) json[name] = value;
  }
  return json.dump();
}

std::uint32_t MaskedCrc32c(std::string_view bytes) {
  static constexpr std::array<std::uint32_t, 256> kTable = MakeCrc32cTable();
  std::uint32_t crc = ~0u;
  for (const char c : bytes) crc = (crc >> 8) ^ kTable[(crc ^ static_cast<unsigned char>(c)) & 0xff];
  crc = ~crc;
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

absl::StatusOr<EventFileWriter> EventFileWriter::Create(const std::string& directory, const v1::JobStatus& status) {
  absl::Time submitted;
  std::string fault;
  if (!absl::ParseTime(absl::RFC3339_full, status.submitted_at(), &submitted, &fault)) {
    return absl::InternalError(absl::StrCat("job ", status.job(), ": submitted_at '", status.submitted_at(), "': ", fault));
  }
  const std::filesystem::path folder = std::filesystem::path(directory) / status.job();
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  const std::string path = (folder / absl::StrCat("events.out.tfevents.", absl::ToUnixSeconds(submitted), ".tandem")).string();
  std::FILE* const file = error ? nullptr : std::fopen(path.c_str(), "wbe");
  if (file == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("cannot write ", path, ": ", error ? error.message() : std::strerror(errno)));
  }
  EventFileWriter writer(path, file, absl::ToDoubleSeconds(submitted - absl::UnixEpoch()));
  TANDEM_RETURN_IF_ERROR(writer.WriteRecord(Encoded([&](google::protobuf::io::CodedOutputStream* out) {
    WireFormatLite::WriteDouble(1, writer.wall_seconds_, out);
    WireFormatLite::WriteString(3, "brain.Event:2", out);
  })));
  return writer;
}

EventFileWriter::EventFileWriter(EventFileWriter&& other) noexcept
    : path_(std::move(other.path_)), file_(std::exchange(other.file_, nullptr)), wall_seconds_(other.wall_seconds_) {}

EventFileWriter::~EventFileWriter() {
  if (file_ != nullptr) std::fclose(file_);
}

absl::Status EventFileWriter::Append(const v1::WatchResponse& event) {
  const Values values = ValuesOf(event);
  if (values.empty()) return absl::OkStatus();
  if (event.has_step()) wall_seconds_ += ValueOf(event.step(), "step_time").value_or(0);
  return WriteRecord(Encoded([&](google::protobuf::io::CodedOutputStream* out) {
    WireFormatLite::WriteDouble(1, wall_seconds_, out);
    WireFormatLite::WriteInt64(2, event.has_step() ? event.step().step() : event.evaluation().step(), out);
    WireFormatLite::WriteBytes(5, EncodedSummary(event.has_step() ? "" : "evaluation/", values), out);
  }));
}

// A TFRecord: length, its checksum, the bytes, theirs.
absl::Status EventFileWriter::WriteRecord(const std::string& event) {
  const std::string length = LittleEndian(static_cast<std::uint64_t>(event.size()));
  const std::string record = absl::StrCat(length, LittleEndian(MaskedCrc32c(length)), event, LittleEndian(MaskedCrc32c(event)));
  if (std::fwrite(record.data(), 1, record.size(), file_) == record.size() && std::fflush(file_) == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("writing ", path_, " failed: ", std::strerror(errno)));
}

}  // namespace tandem

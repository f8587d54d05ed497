// What a job has recorded so far, fetched from the trainer, and the forms in which people and other programs read it: one flat
// JSON object a line, TensorBoard's event files.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "client/connection.h"
#include "common/base/status.h"

namespace tandem {

struct JobHistory {
  v1::JobStatus status;
  std::vector<v1::WatchResponse> events;  // data, evaluation, step, in the order in which they were recorded
};
absl::StatusOr<JobHistory> FetchHistory(const Connection& connection, const std::string& job);

// (step, value) of every step that has it.
std::vector<std::pair<double, double>> SeriesOf(const JobHistory& history, const std::string& name);

// One line, flat: {"kind": "step", "step": 3, "reward": 0.5, ...}.
std::string ToFlatJson(const v1::WatchResponse& event);

// A TensorBoard event file: TFRecords of Event protocol buffers with one simple_value a metric
// (tensorflow/core/util/event.proto). An event's wall time is the job's submission and the steps' times after it, so that the
// same history makes the same bytes. Confined to one thread.
class EventFileWriter {
 public:
  // Makes `directory`/JOB and begins its file anew. Errors: the system's.
  static absl::StatusOr<EventFileWriter> Create(const std::string& directory, const v1::JobStatus& status);
  EventFileWriter(EventFileWriter&& other) noexcept;
  EventFileWriter& operator=(EventFileWriter&&) = delete;
  ~EventFileWriter();

  // Evaluations' values go under "evaluation/". Flushed, so that who reads the file sees it. Errors: the system's.
  absl::Status Append(const v1::WatchResponse& event);
  const std::string& path() const { return path_; }

 private:
  EventFileWriter(std::string path, std::FILE* file, double wall_seconds)
      : path_(std::move(path)), file_(file), wall_seconds_(wall_seconds) {}
  absl::Status WriteRecord(const std::string& event);

  std::string path_;
  std::FILE* file_;
  double wall_seconds_;  // since 1970
};

// CRC-32C (Castagnoli) of `bytes`, masked as TFRecord does: rotated right by 15 bits, plus 0xa282ead8.
std::uint32_t MaskedCrc32c(std::string_view bytes);

}  // namespace tandem

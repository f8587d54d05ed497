// What a job has done, as JSONL a person or a script reads: history.jsonl with one object a step or evaluation, and the
// completions of each step. Written by the trainer thread; read by any thread, from the files.
//
// A line of history.jsonl: {"kind": "data", "step": 0, "rows": 400, "trained": 336, ...}, the first;
// {"kind": "step", "step": 3, "loss": ..., "reward": ..., "times": {"step_time": ...}} or
// {"kind": "evaluation", "step": 0, "reward": ..., "rewards/<name>/mean": ..., "num_prompts": 64, "times": {...}}. Two runs of
// one job differ only under "times".
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/base/status.h"
#include "common/base/unique_fd.h"
#include "proto/job.pb.h"

namespace tandem {

using NamedValues = std::vector<std::pair<std::string, double>>;

struct HistoryEvent {
  enum class Kind { kStep, kEvaluation, kData };
  Kind kind = Kind::kStep;
  std::uint64_t step = 0;
  NamedValues values;  // functions of the job and its data alone
  NamedValues times;   // seconds, and rates made of them
};

// A figure that counts something; a damaged file's is 0 or the most that fits.
template <typename Count>
Count CountOf(double value) {
  constexpr Count kMost = std::numeric_limits<Count>::max();
  return !(value > 0) ? 0 : value < static_cast<double>(kMost) ? static_cast<Count>(value) : kMost;
}

// The counts of a job's data set as an event, and back.
HistoryEvent DataEvent(const v1::DataCounts& counts);
v1::DataCounts DataCountsOf(const NamedValues& values);

// A value that is not finite is left out: JSON has no word for it.
std::string ToJsonLine(const HistoryEvent& event);
// nullopt when the line is none of ours.
std::optional<HistoryEvent> FromJsonLine(const std::string& line);

class HistoryWriter {
 public:
  // Opens `directory`/history.jsonl and cuts it back to the `keep_bytes` that it had after `step`. One that is shorter was
  // damaged: the log tells of it, and the whole lines of steps up to `step` stay.
  static absl::StatusOr<HistoryWriter> Open(const std::string& directory, std::uint64_t keep_bytes, std::uint64_t step);

  // One write(2) a line. The file is synced with the next checkpoint: Sync.
  absl::Status Append(const HistoryEvent& event);
  absl::Status Sync();
  std::uint64_t size_bytes() const { return size_bytes_; }
  // Replaces the completions of `step`.
  absl::Status WriteCompletions(std::uint64_t step, std::span<const v1::CompletionRecord> records);

 private:
  HistoryWriter(std::string directory, UniqueFd file, std::uint64_t size_bytes)
      : directory_(std::move(directory)), file_(std::move(file)), size_bytes_(size_bytes) {}

  std::string directory_;
  UniqueFd file_;
  std::uint64_t size_bytes_ = 0;
};

// Follows a history that grows. Confined to one thread.
class HistoryReader {
 public:
  // Of the steps only those that `stride_steps` divides; 0: each.
  explicit HistoryReader(const std::string& directory, std::uint64_t stride_steps = 0)
      : path_(directory + "/history.jsonl"), stride_steps_(stride_steps) {}
  // The next event that is there; nullopt when none is, now. After the file was cut back events come again.
  std::optional<HistoryEvent> Next();
  // Goes on at the first event of `step` or a later one: a few reads, however long the history is.
  void Seek(std::uint64_t step);

 private:
  // The next whole line, without its end; nullopt when none is there now.
  std::optional<std::string> NextLine();
  void GoTo(std::uint64_t offset);
  bool IsPassedOver(std::string_view line) const;

  const std::string path_;
  const std::uint64_t stride_steps_;
  std::uint64_t offset_ = 0;  // of pending_ in the file
  std::string pending_;       // read, its first consumed_ bytes handed out
  std::size_t consumed_ = 0;
};

// Steps whose completions are there, ascending.
std::vector<std::uint64_t> StepsWithCompletions(const std::string& directory);
// Calls `visit` for the completions of a step until it returns false. Errors: NOT_FOUND naming the step.
absl::Status ReadCompletions(const std::string& directory, std::uint64_t step,
                             const std::function<bool(const v1::CompletionRecord& record)>& visit);

}  // namespace tandem

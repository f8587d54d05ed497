// Everything a job is at a step boundary, on disk: directory step-NNNNNN, written under another name, synced, renamed; then older
// ones go, but for that of the best evaluation. A checkpoint is whole or absent; one whose step is written again, the old or the
// new. Confined to the trainer thread; blocks.
//
// Files: adapter.bin, first_moments.bin, second_moments.bin and, where the reference moves, reference.bin (fp32 in AdapterLayout
// order), state.json, job.textproto, and manifest.json with the size and SHA-256 of each. Random numbers are functions of (seed,
// counter), so the counters of state.json are all of the generators' state. No group is in flight at a step boundary: the next
// unit is drawn from its start.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/base/status.h"
#include "common/gpu/device.h"

namespace tandem {

// What evaluations have told so far; see job/evaluation.h.
struct EvaluationProgress {
  std::optional<std::uint64_t> evaluated_step;  // the last one
  std::optional<std::uint64_t> best_step;
  double best_value = 0;   // with best_step
  double risen_value = 0;  // of the last evaluation that counted as a rise; with best_step
  std::uint64_t evaluations_without_rise = 0;

  bool operator==(const EvaluationProgress&) const = default;
};

struct CheckpointState {
  std::uint64_t step = 0;            // steps finished
  std::uint64_t weight_version = 0;  // of the adapter
  std::uint64_t optimizer_steps = 0;
  std::uint64_t prompt_cursor = 0;
  std::uint64_t seed = 0;
  std::uint64_t num_tokens = 0;        // prompt and completion tokens so far
  std::uint64_t history_bytes = 0;     // of history.jsonl
  std::uint64_t groups_in_flight = 0;  // always 0
  EvaluationProgress evaluation;

  bool operator==(const CheckpointState&) const = default;
};

// The adapter, the optimizer's moments, and a reference that moves (empty: it stays as it is); all of one size, on one device.
struct CheckpointArrays {
  std::span<std::byte> adapter, first_moments, second_moments, reference;
  Device device = Device::kCpu;
};

// What the checkpoints of all jobs, `jobs_directory`/*/checkpoints, may take of the disk together; 0: what it has.
struct CheckpointQuota {
  std::string jobs_directory;
  std::uint64_t limit_bytes = 0;
};

class CheckpointStore {
 public:
  // Makes `directory` and removes what a crash left half-written. For the one writer.
  static absl::StatusOr<CheckpointStore> Open(const std::string& directory, CheckpointQuota quota = {});
  // For readers beside a writer; changes nothing.
  static CheckpointStore OpenForReading(const std::string& directory) { return CheckpointStore(directory); }

  // Where the file system or the quota lacks room, older checkpoints but the newest and that of the best evaluation go first.
  // After an error those two are untouched. Errors: RESOURCE_EXHAUSTED with what it takes and what is free; nothing was written
  // then.
  absl::Status Write(const CheckpointState& state, const std::string& job_text, const CheckpointArrays& arrays, std::size_t keep);
  // Steps of the checkpoints here, ascending.
  std::vector<std::uint64_t> Steps() const;
  // Fills `arrays` from the newest checkpoint that is whole; nullopt when there is none at all. Newer ones that are damaged are
  // told of in the log and set aside as damaged-step-N, in place of those before: the steps since are trained again. They are the
  // first to go where room is wanted. For the one writer. Errors: DATA_LOSS
  // naming the newest one's file that is absent, of another size or checksum, where none is whole (then `arrays` are
  // unspecified): a resume never starts with less than it left; FAILED_PRECONDITION when job text or array sizes are not this
  // job's.
  absl::StatusOr<std::optional<CheckpointState>> LoadNewest(const std::string& job_text, const CheckpointArrays& arrays) const;
  // The adapter alone, checked as above, for export. Errors: NOT_FOUND (no checkpoint), DATA_LOSS.
  absl::StatusOr<std::string> ReadNewestAdapter() const;
  // That of the best evaluation. Errors: NOT_FOUND (nothing was evaluated yet) too.
  absl::StatusOr<std::string> ReadBestAdapter() const;

 private:
  explicit CheckpointStore(std::string directory, CheckpointQuota quota = {})
      : directory_(std::move(directory)), quota_(std::move(quota)) {}
  std::string DirectoryOf(std::uint64_t step) const;
  void Discard(std::uint64_t step) const;
  void DiscardDamaged() const;  // what SetAside left
  // How much may be written, and the words for when that is too little.
  struct Room {
    std::uint64_t size_bytes = 0;
    std::string limit;
  };
  absl::StatusOr<Room> FindRoom() const;
  absl::Status MakeRoom(std::uint64_t size_bytes, std::optional<std::uint64_t> best_step) const;
  absl::StatusOr<CheckpointState> Load(std::uint64_t step, const std::string& job_text, const CheckpointArrays& arrays) const;
  absl::Status SetAside(std::uint64_t step) const;
  absl::StatusOr<std::string> ReadAdapter(std::uint64_t step) const;

  std::string directory_;
  CheckpointQuota quota_;
};

}  // namespace tandem

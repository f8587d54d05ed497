// Python reward functions in worker processes: a worker holds one file, answers one call at a time over framed JSON (the protocol
// is told in client/python/tandem/reward_worker.py) and is replaced when it dies, hangs or answers what is no answer.
// JSON, since rows are JSON already and a worker then needs nothing but Python's standard library. Thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "common/base/mutex.h"
#include "trainer_server/reward/reward.h"
#include "trainer_server/sandbox/sandbox.h"

namespace tandem {

// Of one group.
struct PythonCall {
  std::string function;
  nlohmann::json prompt;
  nlohmann::json columns;  // the row
  bool is_chat = false;    // completions are given as messages
  std::span<const RewardInput> completions;
  absl::Duration time_limit;
  int max_attempts = 1;
};

struct PythonAnswer {
  RewardColumn values;
  std::map<std::size_t, std::string> faults;  // why a completion has none
};

// A worker's frame, which foreign code may have written, without its size. Errors: ABORTED (the function's own exception),
// UNAVAILABLE (it is no answer to `num_completions`).
absl::StatusOr<PythonAnswer> ReadAnswer(std::string_view frame, std::size_t num_completions);

class PythonWorkerPool {
 public:
  struct Options {
    SandboxSource* sandbox = nullptr;
    std::string file_name;
    std::string file_bytes;
    std::uint64_t memory_bytes = 0;
  };
  explicit PythonWorkerPool(Options options);
  ~PythonWorkerPool();

  // One more function of the file. Before the first call.
  void AddFunction(const std::string& name) { functions_.push_back(name); }
  // Starts a worker, which imports the file; it stays for the first call. Errors: FAILED_PRECONDITION (sandbox),
  // INVALID_ARGUMENT (the file, or a function that it lacks), ABORTED (the worker died or took longer than kImportLimit).
  absl::Status Check();
  // As many workers live as there are callers at a time. A call whose worker is lost is tried again on another, after a pause
  // that grows with losses in a row. Errors: as Check; ABORTED (lost in every attempt, the last told; an exception or an answer
  // of wrong length: at once); CANCELLED.
  absl::StatusOr<PythonAnswer> Call(const PythonCall& call, const RewardCall& around);

  static constexpr absl::Duration kImportLimit = absl::Seconds(25);

 private:
  class Worker;
  absl::StatusOr<std::unique_ptr<Worker>> Take(const RewardCall& around);
  absl::StatusOr<std::unique_ptr<Worker>> StartWorker(const RewardCall& around) const;
  absl::Status WaitForTurn(const RewardCall& around) const;

  const Options options_;
  std::vector<std::string> functions_;
  mutable Mutex mutex_;
  std::vector<std::unique_ptr<Worker>> idle_ ABSL_GUARDED_BY(mutex_);
  int losses_in_a_row_ ABSL_GUARDED_BY(mutex_) = 0;
};

// A job's pools, by file and memory limit. Confined to one thread.
class PythonWorkerPools {
 public:
  std::shared_ptr<PythonWorkerPool> Of(const std::string& content, PythonWorkerPool::Options options);

 private:
  std::map<std::pair<std::string, std::uint64_t>, std::shared_ptr<PythonWorkerPool>> pools_;
};

}  // namespace tandem

// Two real daemons as a test runs them: started, killed, stopped, restarted, asked over gRPC. Processes are ended by the id that
// was started, never by name; everything listens on loopback.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "common/base/status.h"
#include "common/gpu/device.h"
#include "proto/job.grpc.pb.h"
#include "proto/rollout.grpc.pb.h"

namespace tandem {

// Where the daemons of system tests run: the CPU, unless the environment says TANDEM_TEST_DEVICE=cuda.
Device TestDevice();
// Whether the sizes that are run by hand are asked for: TANDEM_LONG_TESTS=1.
bool IsLongTest();

// Of the loopback device, no two equal; each is held until all are chosen.
std::vector<int> FreePorts(int count);

enum class Half { kRollout, kTrainer };

struct DaemonPairOptions {
  std::string directory;  // made fresh: run_dir, data_dir, logs
  std::string model;
  std::vector<std::string> flags;               // for both, after those of TestDevice()
  std::vector<std::string> trainer_flags = {};  // for the trainer alone
  bool meets_in_run_dir = false;                // their addresses are sockets there: for daemons whose flags name a --listen
  std::string preloaded;                        // a library beside the test's binary that is loaded into both; empty: none
  std::vector<std::string> environment = {};    // "NAME=VALUE", of both
};

class DaemonPair {
 public:
  explicit DaemonPair(DaemonPairOptions options);
  ~DaemonPair();  // kill -9 of what still runs

  void Start(Half half);
  // Waits until the daemon answers GetStatus. False after `timeout`, or when its process ended.
  bool WaitReady(Half half, absl::Duration timeout);
  void Signal(Half half, int signal);
  // Waits for the process to end; its wait status, or -1 after `timeout`.
  int Wait(Half half, absl::Duration timeout);
  void Kill(Half half);  // SIGKILL and wait
  bool IsAlive(Half half);
  pid_t pid(Half half) const { return pids_[Index(half)]; }

  std::unique_ptr<v1::JobService::Stub> Trainer() const;
  std::unique_ptr<v1::RolloutService::Stub> Rollout() const;
  std::string address(Half half) const { return addresses_[Index(half)]; }
  std::string log(Half half) const;
  std::string data_dir(Half half) const;
  const std::string& directory() const { return options_.directory; }

  // Uploads `rows` as the data set (and held-out set) of `job_text` (fields of JobSpec without `data.content`) and submits it.
  absl::StatusOr<std::string> Submit(const std::string& job_text, const std::string& rows, const std::string& evaluation = "");
  // Waits until the job ends. Errors: DEADLINE_EXCEEDED with the last status.
  absl::StatusOr<v1::JobStatus> WaitForEnd(const std::string& job, absl::Duration timeout);
  absl::StatusOr<v1::JobStatus> GetJob(const std::string& job);
  // The `tandem` command with --json against this pair; `words` go through the shell. What it printed. Errors: UNKNOWN with what
  // it printed and said.
  absl::StatusOr<std::string> Client(const std::string& words);
  // What a step computed, times left out: one line a step, comparable bit for bit between runs.
  std::string Trajectory(const std::string& job);
  // Of the last `num_steps` steps.
  double MeanReward(const std::string& job, std::size_t num_steps);

 private:
  static std::size_t Index(Half half) { return half == Half::kRollout ? 0 : 1; }
  DaemonPairOptions options_;
  pid_t pids_[2] = {-1, -1};
  std::string listens_[2], addresses_[2];
  int metrics_ports_[2] = {0, 0};
};

// What a process has, by /proc.
std::uint64_t AnonymousBytes(pid_t pid);
std::uint64_t NumDescriptors(pid_t pid);
std::uint64_t NumThreads(pid_t pid);

// Looks every few milliseconds until `holds` does; whether it did before `timeout`.
bool WaitUntil(absl::Duration timeout, const std::function<bool()>& holds);

std::unique_ptr<grpc::ClientContext> ContextFor(absl::Duration timeout);
// Collects every message of one Generate call: text prompt, `group_size` members.
struct GenerateResult {
  grpc::Status status;
  std::vector<v1::GenerateResponse> responses;
  std::vector<std::vector<std::uint32_t>> ids;  // by member
  std::vector<std::vector<float>> rollout_logprobs;
  std::vector<std::string> texts;
};
GenerateResult GenerateText(v1::RolloutService::Stub* rollout, const std::string& prompt, const v1::SamplingParams& sampling,
                            int group_size, const std::string& job = "", absl::Duration timeout = absl::Seconds(60));

}  // namespace tandem

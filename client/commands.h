// The commands of `tandem`. Each takes its words after the command's name, talks to a daemon and prints; an error comes back as a
// status whose message a person can act on.
#pragma once

#include <string>
#include <vector>

#include "client/connection.h"
#include "common/base/status.h"

namespace tandem {

using Words = std::vector<std::string>;

struct SubmitOptions {
  bool watch = false;
  std::vector<std::string> overrides;  // text-format fields merged over the file: "seed: 1"
};
absl::Status Submit(const Connection& connection, const Words& words, const SubmitOptions& options);
// `live_sequences`: of full length at a time, in generation; 0: as many as the rollout server runs. Errors, after the plan was
// printed: RESOURCE_EXHAUSTED (the node does not hold the job).
absl::Status Plan(const Connection& connection, const Words& words, const SubmitOptions& options, int live_sequences);
absl::Status ListJobs(const Connection& connection, const Words& words);
absl::Status Watch(const Connection& connection, const Words& words);
absl::Status Cancel(const Connection& connection, const Words& words);
absl::Status Pause(const Connection& connection, const Words& words);
absl::Status Resume(const Connection& connection, const Words& words);
absl::Status Completions(const Connection& connection, const Words& words, int step, int limit);
absl::Status Export(const Connection& connection, const Words& words);
absl::Status ShowStatus(const Connection& connection, const Words& words);

struct GenerateOptions {
  std::string job;       // whose adapter; empty: the base model
  std::string messages;  // JSON array of {"role", "content"}; else the words are one user turn
  bool is_raw = false;   // the words are plain text, without the chat template
  int num_completions = 1;
  v1::SamplingParams sampling;
};
absl::Status Generate(const Connection& connection, const Words& words, const GenerateOptions& options);

}  // namespace tandem

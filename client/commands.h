// The commands of `tandem`. Each takes its words after the command's name, talks to a daemon and prints; an error comes back as a
// status whose message a person can act on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "client/connection.h"
#include "common/base/status.h"

namespace tandem {

using Words = std::vector<std::string>;
// The only word. Errors: INVALID_ARGUMENT with how `command` is used.
absl::StatusOr<std::string> OneWord(const Words& words, const std::string& command, const std::string& what);

struct SubmitOptions {
  bool watch = false;
  std::string tensorboard;             // with watch: see Watch
  std::vector<std::string> overrides;  // each of text-format fields merged over the file: "seed: 1, num_steps: 5"
  std::string rewards;                 // Python functions, "FILE:FUNCTION,FUNCTION"; empty: those of the file alone
};
absl::Status Submit(const Connection& connection, const Words& words, const SubmitOptions& options);
// `live_sequences`: of full length at a time, in generation; 0: as many as the rollout server runs. Errors, after the plan was
// printed: RESOURCE_EXHAUSTED (the node does not hold the job).
absl::Status Plan(const Connection& connection, const Words& words, const SubmitOptions& options, int live_sequences);
struct ListOptions {
  std::vector<std::string> states;  // "queued"; empty: any
  std::uint32_t limit = 0;          // the newest; 0: all
};
absl::Status ListJobs(const Connection& connection, const Words& words, const ListOptions& options);
// The job's status, who submitted it, what it waits for, and its file as it was stored.
absl::Status Show(const Connection& connection, const Words& words);
// `tensorboard`: a directory whose event file follows the job; empty: none.
absl::Status Watch(const Connection& connection, const Words& words, const std::string& tensorboard);
absl::Status Cancel(const Connection& connection, const Words& words);
absl::Status Pause(const Connection& connection, const Words& words);
absl::Status Resume(const Connection& connection, const Words& words);
// A job and a number.
absl::Status SetPriority(const Connection& connection, const Words& words);
// `filters`: all but the job.
absl::Status Completions(const Connection& connection, const Words& words, v1::CompletionsRequest filters);
// Both jobs' settings where they differ, and what came of them.
absl::Status Compare(const Connection& connection, const Words& words);
// What a job recorded: a flat JSON object a line, or TensorBoard's event file under `tensorboard`.
absl::Status History(const Connection& connection, const Words& words, const std::string& tensorboard);
struct PlotOptions {
  std::string png;                   // file; empty: the terminal
  std::vector<std::string> metrics;  // names of the history; empty: the usual six
};
// Needs gnuplot. Errors: FAILED_PRECONDITION (no gnuplot, nothing recorded), INVALID_ARGUMENT (metric, file).
absl::Status Plot(const Connection& connection, const Words& words, const PlotOptions& options);
struct ExportOptions {
  bool merged = false;  // the model with the adapter merged into it
  bool best = false;    // of the best evaluation; else the newest
};
absl::Status Export(const Connection& connection, const Words& words, const ExportOptions& options);
// Asks again while a daemon is not there, for at most `wait`.
absl::Status ShowStatus(const Connection& connection, const Words& words, absl::Duration wait);
struct DoctorOptions {
  std::string run_dir;   // of the pair; empty: the daemons' default
  std::string data_dir;  // holds both daemons' own; empty: the default
  std::string reward_python = "/usr/bin/python3";
  std::string rollout_metrics = "127.0.0.1:9091";
  std::string trainer_metrics = "127.0.0.1:9090";
  std::string http_address = "127.0.0.1:7072";  // "off": not looked at
};
// Whether this node can run the pair, as the user who asks: a line for each thing looked at, with what to do. Changes nothing;
// takes seconds. Errors: FAILED_PRECONDITION with the number of faults.
absl::Status Doctor(const Connection& connection, const Words& words, DoctorOptions options);
// Prints a GRPOConfig of TRL as a job file, what was not kept as comments. Talks to no daemon.
absl::Status ImportTrl(const Connection& connection, const Words& words);

struct GenerateOptions {
  std::string job;                 // whose adapter; empty: the base model
  std::string messages;            // JSON array of {"role", "content"}; else the words are one user turn
  bool is_raw = false;             // the words are plain text, without the chat template
  std::string template_arguments;  // a JSON object: variables of the chat template
  int num_completions = 1;
  v1::SamplingParams sampling;
};
absl::Status Generate(const Connection& connection, const Words& words, const GenerateOptions& options);

}  // namespace tandem

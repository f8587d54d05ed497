// tandem: submits jobs, follows them, and asks the model. See `tandem --help`.
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <iostream>
#include <map>
#include <string_view>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/match.h"
#include "client/commands.h"
#include "common/base/printable.h"

namespace {

// Each --set in the order given: of a flag that is given again, Abseil keeps the last value.
std::vector<std::string>& Overrides() {
  static std::vector<std::string> texts;
  return texts;
}

}  // namespace

ABSL_FLAG(std::string, context, "", "of the configuration file; 'none': without it. Default TANDEM_CONTEXT, else the file's own");
ABSL_FLAG(std::string, trainer, "", "address of trainer_server; default TANDEM_TRAINER, else the context's, else 127.0.0.1:7070");
ABSL_FLAG(std::string, rollout, "", "address of rollout_server; default TANDEM_ROLLOUT, else the context's, else 127.0.0.1:7071");
ABSL_FLAG(std::string, ca, "",
          "PEM file: who signs the servers' certificates; with it TLS is spoken. Default TANDEM_CA, the context's");
ABSL_FLAG(std::string, cert, "", "PEM file: this client's certificate, for mutual TLS. Default TANDEM_CERT, the context's");
ABSL_FLAG(std::string, key, "", "PEM file: its key. Default TANDEM_KEY, the context's");
ABSL_FLAG(std::string, token_file, "", "file with the token. Default TANDEM_TOKEN (the token), TANDEM_TOKEN_FILE, the context's");
ABSL_FLAG(absl::Duration, timeout, absl::Seconds(30),
          "limit of one call, with a unit, as 60s or 10m; streams are not bound by it");
ABSL_FLAG(absl::Duration, wait, absl::ZeroDuration(),
          "status: wait so long for daemons that are starting, with a unit, as 60s or 10m");
ABSL_FLAG(bool, json, false, "print JSON, one object a line");
ABSL_FLAG(std::string, run_dir, "", "doctor: that of the daemons; empty: their default");
ABSL_FLAG(std::string, data_dir, "", "doctor: the folder that holds those of both daemons; empty: their default");
ABSL_FLAG(std::string, reward_python, "/usr/bin/python3", "doctor: that of trainer_server");
ABSL_FLAG(std::string, rollout_metrics, "127.0.0.1:9091", "doctor: --metrics of rollout_server");
ABSL_FLAG(std::string, trainer_metrics, "127.0.0.1:9090", "doctor: --metrics of trainer_server");
ABSL_FLAG(std::string, http_address, "127.0.0.1:7072", "doctor: that of trainer_server");
ABSL_FLAG(bool, watch, false, "submit: follow the job until it ends");
ABSL_FLAG(
    std::string, set, "",
    "submit, plan: fields in text format merged over the job file, as --set='seed: 1,num_steps: 5'; may be given more than once")
    .OnUpdate([] {
      if (const std::string text = absl::GetFlag(FLAGS_set); !text.empty()) Overrides().push_back(text);
    });
ABSL_FLAG(
    std::string, rewards, "",
    "submit, plan: reward functions in Python beside those of the job file, as --rewards=my_rewards.py:correct,well_formed");
ABSL_FLAG(int32_t, live_sequences, 0, "plan: sequences generated at a time; 0: as many as rollout_server runs");
ABSL_FLAG(uint32_t, step, 0, "completions: of which step; 0 for the newest");
ABSL_FLAG(uint32_t, last_step, 0, "completions: of all steps from --step to this one");
ABSL_FLAG(uint32_t, limit, 0, "completions, jobs: how many at most; 0 for all");
ABSL_FLAG(std::vector<std::string>, state, {}, "jobs: those that are queued, running, paused, succeeded, failed or cancelled");
ABSL_FLAG(absl::optional<double>, min_reward, absl::nullopt, "completions: with at least this reward");
ABSL_FLAG(absl::optional<double>, max_reward, absl::nullopt, "completions: with at most this reward");
ABSL_FLAG(std::string, function, "", "completions: the reward whose value --min_reward and --max_reward bound; empty: the sum");
ABSL_FLAG(uint32_t, min_length, 0, "completions: of at least so many tokens");
ABSL_FLAG(uint32_t, max_length, 0, "completions: of at most so many tokens; 0 for any");
ABSL_FLAG(std::string, finish_reason, "", "completions: 'stop' or 'length'; empty for any");
ABSL_FLAG(absl::optional<int64_t>, group, absl::nullopt, "completions: those of this prompt of the step, side by side");
ABSL_FLAG(std::string, tensorboard, "", "watch, submit --watch, history: directory for TensorBoard's event file");
ABSL_FLAG(std::string, png, "", "plot: file to draw into; empty: the terminal");
ABSL_FLAG(std::vector<std::string>, metrics, {}, "plot: names as in `tandem history`; empty: the usual six");
ABSL_FLAG(bool, merged, false, "export: the model with the adapter merged into it, as safetensors in bf16");
ABSL_FLAG(bool, best, false, "export: as of the best evaluation; else the newest checkpoint");
ABSL_FLAG(std::string, template_arguments, "", "generate: a JSON object of variables of the chat template");
ABSL_FLAG(std::string, job, "", "generate: whose adapter; empty for the base model");
ABSL_FLAG(std::string, messages, "", "generate: a JSON array of {\"role\", \"content\"}");
ABSL_FLAG(bool, raw, false, "generate: plain text, without the chat template");
ABSL_FLAG(int32_t, n, 1, "generate: completions");
ABSL_FLAG(double, temperature, 1.0, "generate: 0 is greedy");
ABSL_FLAG(double, top_p, 1.0, "generate");
ABSL_FLAG(uint32_t, top_k, 0, "generate: 0 is off");
ABSL_FLAG(double, min_p, 0.0, "generate");
ABSL_FLAG(uint64_t, seed, 0, "generate");
ABSL_FLAG(uint32_t, max_tokens, 256, "generate");

namespace {

constexpr char kUsage[] = R"(trains language models with GRPO, from any machine.

  tandem submit JOB_FILE [--watch] [--set=...]   check, upload the data, queue
                [--rewards=FILE:FUNCTION,..]     with your own reward functions in Python
  tandem plan JOB_FILE                           the job as it would run: its memory by owner, with warnings
  tandem jobs [--state=queued,running]           all jobs, newest first: place in the queue, submitter, what they wait for
  tandem show JOB                                one job and its file
  tandem watch JOB                               live progress
  tandem pause | resume | cancel JOB
  tandem priority JOB NUMBER                     of a queued job, -100 to 100: the highest goes first
  tandem completions JOB [--step=N] [--group=N]  what the model wrote and what it earned; filters: see --help
  tandem plot JOB [--png=FILE]                   reward, KL, entropy, length, clip ratio, gradient norm
  tandem history JOB [--tensorboard=DIRECTORY]   what was recorded: a JSON object a line, or an event file
  tandem compare JOB JOB                         settings that differ, and what came of them
  tandem export JOB DIRECTORY [--merged]         a PEFT adapter directory, or the whole model
  tandem generate PROMPT [--job=JOB]             ask the model
  tandem status                                  both daemons, memory by owner
  tandem doctor                                  whether this node can run the pair, and what to do
  tandem import-trl CONFIG                       a GRPOConfig (JSON, YAML) as a job file, with what was not kept

Nodes: --context, of ~/.config/tandem/config.json; or --trainer, --rollout, --ca, --cert, --key, --token_file. For scripts: --json.)";

// The arguments of `tandem priority JOB -5`, whose number would be read as a flag, as `priority JOB -- -5`.
std::vector<char*> NumbersLast(std::vector<char*> arguments) {
  static char end_of_flags[] = "--";
  const auto has = [&](std::string_view word) { return std::ranges::find(arguments, word) != arguments.end(); };
  if (!has("priority") || has(end_of_flags)) return arguments;
  const auto numbers = std::stable_partition(arguments.begin(), arguments.end(), [](const char* word) {
    return word[0] != '-' || std::isdigit(static_cast<unsigned char>(word[1])) == 0;
  });
  if (numbers != arguments.end()) arguments.insert(numbers, end_of_flags);
  return arguments;
}

absl::Status Completions(const tandem::Connection& connection, const tandem::Words& words) {
  tandem::v1::CompletionsRequest filters;
  filters.set_step(absl::GetFlag(FLAGS_step));
  filters.set_last_step(absl::GetFlag(FLAGS_last_step));
  filters.set_limit(absl::GetFlag(FLAGS_limit));
  if (const auto least = absl::GetFlag(FLAGS_min_reward)) filters.set_min_reward(*least);
  if (const auto most = absl::GetFlag(FLAGS_max_reward)) filters.set_max_reward(*most);
  filters.set_function(absl::GetFlag(FLAGS_function));
  filters.set_min_tokens(absl::GetFlag(FLAGS_min_length));
  filters.set_max_tokens(absl::GetFlag(FLAGS_max_length));
  const std::string reason = absl::GetFlag(FLAGS_finish_reason);
  if (reason == "stop") filters.set_finish_reason(tandem::v1::FINISH_REASON_STOP);
  if (reason == "length") filters.set_finish_reason(tandem::v1::FINISH_REASON_LENGTH);
  if (!reason.empty() && filters.finish_reason() == tandem::v1::FINISH_REASON_UNSPECIFIED) {
    return absl::InvalidArgumentError(absl::StrCat("--finish_reason: '", reason, "'; must be 'stop' or 'length'"));
  }
  if (const auto group = absl::GetFlag(FLAGS_group)) {
    if (*group < 0 || *group > 65535)
      return absl::InvalidArgumentError(absl::StrCat("--group: ", *group, "; must be 0 to 65535"));
    filters.set_group_index(static_cast<std::uint32_t>(*group));
  }
  return tandem::Completions(connection, words, std::move(filters));
}

}  // namespace

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(kUsage);
  absl::FlagsUsageConfig usage;
  usage.contains_help_flags = [](absl::string_view file) { return absl::EndsWith(file, "client/main.cc"); };
  usage.version_string = [] { return absl::StrCat("tandem ", TANDEM_VERSION, "\n"); };
  absl::SetFlagsUsageConfig(usage);
  std::vector<char*> arguments = NumbersLast({argv, argv + argc});
  const std::vector<char*> positional = absl::ParseCommandLine(static_cast<int>(arguments.size()), arguments.data());
  tandem::Words words(positional.begin() + 1, positional.end());
  if (words.empty()) {
    std::cerr << "tandem " << kUsage << "\n";
    return 1;
  }
  const std::string command = words.front();
  words.erase(words.begin());

  absl::StatusOr<tandem::Connection> resolved = tandem::ResolveConnection(
      {absl::GetFlag(FLAGS_context), absl::GetFlag(FLAGS_trainer), absl::GetFlag(FLAGS_rollout), absl::GetFlag(FLAGS_ca),
       absl::GetFlag(FLAGS_cert), absl::GetFlag(FLAGS_key), absl::GetFlag(FLAGS_token_file)},
      [](const std::string& name) {
        const char* value = std::getenv(name.c_str());
        return std::string(value == nullptr ? "" : value);
      });
  if (!resolved.ok()) {
    std::cerr << "tandem " << command << ": " << resolved.status().message() << "\n";
    return 1;
  }
  tandem::Connection connection = *std::move(resolved);
  connection.timeout = absl::GetFlag(FLAGS_timeout);
  connection.json = absl::GetFlag(FLAGS_json);
  const std::string tensorboard = absl::GetFlag(FLAGS_tensorboard);
  const tandem::SubmitOptions submit{absl::GetFlag(FLAGS_watch), tensorboard, Overrides(), absl::GetFlag(FLAGS_rewards)};

  absl::Status status;
  if (command == "submit")
    status = tandem::Submit(connection, words, submit);
  else if (command == "plan")
    status = tandem::Plan(connection, words, submit, absl::GetFlag(FLAGS_live_sequences));
  else if (command == "jobs")
    status = tandem::ListJobs(connection, words, {absl::GetFlag(FLAGS_state), absl::GetFlag(FLAGS_limit)});
  else if (command == "show")
    status = tandem::Show(connection, words);
  else if (command == "watch")
    status = tandem::Watch(connection, words, tensorboard);
  else if (command == "cancel")
    status = tandem::Cancel(connection, words);
  else if (command == "pause")
    status = tandem::Pause(connection, words);
  else if (command == "resume")
    status = tandem::Resume(connection, words);
  else if (command == "priority")
    status = tandem::SetPriority(connection, words);
  else if (command == "completions")
    status = Completions(connection, words);
  else if (command == "compare")
    status = tandem::Compare(connection, words);
  else if (command == "history")
    status = tandem::History(connection, words, tensorboard);
  else if (command == "plot")
    status = tandem::Plot(connection, words, {absl::GetFlag(FLAGS_png), absl::GetFlag(FLAGS_metrics)});
  else if (command == "export")
    status = tandem::Export(connection, words, {absl::GetFlag(FLAGS_merged), absl::GetFlag(FLAGS_best)});
  else if (command == "status")
    status = tandem::ShowStatus(connection, words, absl::GetFlag(FLAGS_wait));
  else if (command == "doctor")
    status = tandem::Doctor(
        connection, words,
        {absl::GetFlag(FLAGS_run_dir), absl::GetFlag(FLAGS_data_dir), absl::GetFlag(FLAGS_reward_python),
         absl::GetFlag(FLAGS_rollout_metrics), absl::GetFlag(FLAGS_trainer_metrics), absl::GetFlag(FLAGS_http_address)});
  else if (command == "import-trl")
    status = tandem::ImportTrl(connection, words);
  else if (command == "generate") {
    tandem::GenerateOptions options;
    options.job = absl::GetFlag(FLAGS_job);
    options.messages = absl::GetFlag(FLAGS_messages);
    options.is_raw = absl::GetFlag(FLAGS_raw);
    options.template_arguments = absl::GetFlag(FLAGS_template_arguments);
    options.num_completions = absl::GetFlag(FLAGS_n);
    options.sampling.set_temperature(absl::GetFlag(FLAGS_temperature));
    options.sampling.set_top_p(absl::GetFlag(FLAGS_top_p));
    options.sampling.set_top_k(absl::GetFlag(FLAGS_top_k));
    options.sampling.set_min_p(absl::GetFlag(FLAGS_min_p));
    options.sampling.set_seed(absl::GetFlag(FLAGS_seed));
    options.sampling.set_max_tokens(absl::GetFlag(FLAGS_max_tokens));
    status = tandem::Generate(connection, words, options);
  } else {
    status = absl::InvalidArgumentError(absl::StrCat("'", command, "' is not a command; see tandem --help"));
  }
  if (status.ok()) return 0;
  std::cerr << "tandem " << command << ": " << tandem::Printable(std::string(status.message()), tandem::LineEnds::kKeep) << "\n";
  return 1;
}

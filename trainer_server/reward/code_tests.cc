#include <algorithm>
#include <random>

#include "absl/strings/ascii.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "common/base/clock.h"
#include "trainer_server/reward/external_rewards.h"

namespace tandem {
namespace {

constexpr std::uint32_t kLeastMemoryMib = 64, kMostMemoryMib = 65536;
constexpr std::size_t kMaxTests = 64;
constexpr std::size_t kMaxOutputBytes = 1 << 20;
constexpr int kMaxProcesses = 32, kMaxFiles = 64;
constexpr int kMaxStarts = 3;
constexpr char kProgram[] = "/tandem/program.py", kAssertions[] = "/tandem/assertions.py", kHarness[] = "/tandem/harness.py";

// Says the secret on the true standard output when the assertions, run in the program's names, have passed. They share an
// interpreter: a program that looks for the secret can find it. Tests of input and output have none.
constexpr char kHarnessProgram[] = R"(
import os, sys
secret = sys.stdin.buffer.read()
output = os.dup(1)
os.dup2(2, 1)
names = {"__name__": "program"}
for path in ("/tandem/program.py", "/tandem/assertions.py"):
    with open(path) as file:
        exec(compile(file.read(), path, "exec"), names)
os.write(output, secret)
)";

// One test of a row. Program and output, or assertions.
struct CodeTest {
  std::string input, output;
  std::optional<std::string> assertions;
};

absl::StatusOr<std::vector<CodeTest>> ReadTests(const nlohmann::json& entry, const std::string& field,
                                                const std::string& function) {
  if (!entry.is_array() || entry.empty() || entry.size() > kMaxTests) {
    return RowFieldError(field, function,
                         absl::StrCat("must be an array of 1 to ", kMaxTests, " tests, is ",
                                      entry.is_array() ? absl::StrCat("one of ", entry.size()) : entry.type_name()));
  }
  std::vector<CodeTest> tests;
  for (std::size_t i = 0; i < entry.size(); ++i) {
    const nlohmann::json& test = entry[i];
    if (test.is_string()) {
      tests.push_back({.input = {}, .output = {}, .assertions = test.get<std::string>()});
    } else if (test.is_object() && test.contains("output") && test["output"].is_string() &&
               (!test.contains("input") || test["input"].is_string())) {
      tests.push_back({.input = test.value("input", ""), .output = test["output"].get<std::string>(), .assertions = {}});
    } else {
      return RowFieldError(field, function,
                           absl::StrCat("test ", i, " is ", test.dump().substr(0, 80),
                                        ", must be {\"input\": text, \"output\": text} or text of assertions"));
    }
  }
  return tests;
}

bool IsPython(std::string_view language) {
  return language.empty() || language == "python" || language == "python3" || language == "py";
}

// Lines without the space at their ends, nor empty ones at the end.
std::string Lines(std::string_view text) {
  std::string lines;
  for (const absl::string_view line : absl::StrSplit(ToAbsl(text), '\n')) {
    absl::StrAppend(&lines, absl::StripTrailingAsciiWhitespace(line), "\n");
  }
  lines.erase(lines.find_last_not_of('\n') + 1);
  return lines;
}

std::string NewSecret() {
  std::random_device random;
  return absl::StrFormat("%08x%08x%08x%08x", random(), random(), random(), random());
}

class CodeTests final : public RewardFunction {
 public:
  CodeTests(const v1::CodeTests& config, absl::Duration time_limit, std::uint64_t memory_bytes, FailurePolicy policy,
            SandboxSource* sandbox)
      : tests_field_(config.tests_field()),
        wants_all_(config.all()),
        time_limit_(time_limit),
        memory_bytes_(memory_bytes),
        policy_(std::move(policy)),
        sandbox_(sandbox) {}

  const std::string& name() const override { return policy_.identity().name; }
  double weight() const override { return policy_.identity().weight; }
  std::vector<std::string> required_fields() const override { return {tests_field_}; }
  absl::Status Check() const override { return sandbox_->Get().status(); }

  absl::StatusOr<RewardColumn> Score(std::span<const RewardInput> completions, const RewardCall& call) const override {
    TANDEM_ASSIGN_OR_RETURN(const nlohmann::json* entry, RowField(completions.front(), tests_field_, name()));
    if (entry == nullptr) return RewardColumn(completions.size());
    TANDEM_ASSIGN_OR_RETURN(const std::vector<CodeTest> tests, ReadTests(*entry, tests_field_, name()));
    RewardColumn rewards;
    for (std::size_t i = 0; i < completions.size(); ++i) {
      const absl::StatusOr<double> reward = ScoreOne(completions[i].completion, tests, call);
      if (!reward.ok())
        return policy_.OnFailure(Annotate(reward.status(), absl::StrCat("completion ", i)), completions.size(), call);
      rewards.push_back(*reward);
    }
    return rewards;
  }

 private:
  absl::StatusOr<double> ScoreOne(const std::string& completion, const std::vector<CodeTest>& tests,
                                  const RewardCall& call) const {
    const std::optional<std::string> program = LastCodeBlock(completion, IsPython);
    if (!program.has_value()) return 0.0;
    std::size_t num_passed = 0;
    for (const CodeTest& test : tests) {
      TANDEM_ASSIGN_OR_RETURN(const bool is_passed, Passes(*program, test, call));
      if (is_passed) ++num_passed;
      if (!is_passed && wants_all_) return 0.0;
    }
    return static_cast<double>(num_passed) / static_cast<double>(tests.size());
  }

  // Each test has a sandbox of its own, begun afresh: nothing of an earlier program can tell it anything.
  absl::StatusOr<bool> Passes(const std::string& program, const CodeTest& test, const RewardCall& call) const {
    TANDEM_ASSIGN_OR_RETURN(const std::shared_ptr<const Sandbox> sandbox, sandbox_->Get());
    const std::string secret = test.assertions.has_value() ? NewSecret() : "";
    SandboxCommand command{.arguments = {"-I", "-B", test.assertions.has_value() ? kHarness : kProgram},
                           .files = {{kProgram, program}},
                           .input = test.assertions.has_value() ? secret : test.input};
    if (test.assertions.has_value()) {
      command.files.push_back({kAssertions, *test.assertions});
      command.files.push_back({kHarness, kHarnessProgram});
    }
    command.memory_bytes = memory_bytes_;
    command.max_processes = kMaxProcesses;
    command.max_files = kMaxFiles;
    command.cpu_time = time_limit_;
    absl::StatusOr<std::unique_ptr<SandboxedProcess>> process = sandbox->Start(command);
    for (int start = 1; start < kMaxStarts && !process.ok(); ++start) {
      absl::SleepFor(absl::Milliseconds(100 * start));
      process = sandbox->Start(command);
    }
    TANDEM_RETURN_IF_ERROR(process.status());
    std::string output;
    const PumpEnd end = (*process)->Run({.input = {},
                                         .is_done = {},
                                         .deadline = MonotonicTime::Now() + time_limit_,
                                         .max_output_bytes = kMaxOutputBytes,
                                         .max_error_bytes = kMaxOutputBytes,
                                         .is_interrupted = call.is_interrupted},
                                        &output);
    if (end == PumpEnd::kInterrupted) return absl::CancelledError("interrupted");
    if (end != PumpEnd::kExited || (*process)->ExitCode() != 0) return false;
    return test.assertions.has_value() ? output == secret : Lines(output) == Lines(test.output);
  }

  const std::string tests_field_;
  const bool wants_all_;
  const absl::Duration time_limit_;
  const std::uint64_t memory_bytes_;
  const FailurePolicy policy_;
  SandboxSource* const sandbox_;
};

}  // namespace

std::unique_ptr<RewardFunction> MakeCodeTests(const v1::CodeTests& config, FailurePolicy policy,
                                              const RewardSurroundings& surroundings, RewardFaults* faults) {
  const std::size_t faults_before = faults->lines().size();
  if (config.language() != "python") { faults->Add("language", absl::StrCat("'", config.language(), "', must be python")); }
  if (config.tests_field().empty()) faults->Add("tests_field", "empty, must name a field of the data set's rows");
  const std::uint32_t memory_mib = config.memory_limit_mib();
  if (memory_mib < kLeastMemoryMib || memory_mib > kMostMemoryMib) {
    faults->Add("memory_limit_mib", absl::StrCat(memory_mib, ", must be ", kLeastMemoryMib, " to ", kMostMemoryMib));
  }
  const absl::Duration time_limit = CheckTimeLimit(config.time_limit_seconds(), 600, faults);
  if (faults->lines().size() != faults_before) return nullptr;
  return std::make_unique<CodeTests>(config, time_limit, std::uint64_t{memory_mib} << 20, std::move(policy),
                                     surroundings.sandbox);
}

}  // namespace tandem

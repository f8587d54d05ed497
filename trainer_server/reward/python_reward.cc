#include <algorithm>
#include <cctype>
#include <cmath>
#include <fstream>
#include <iterator>

#include "trainer_server/reward/external_rewards.h"
#include "trainer_server/reward/python_worker.h"

namespace tandem {
namespace {

constexpr std::size_t kMaxFileBytes = 1 << 20;
constexpr std::uint64_t kLeastMemoryMib = 64, kMostMemoryMib = 1 << 20;
constexpr std::uint32_t kMostAttempts = 100;

class PythonReward final : public RewardFunction {
 public:
  PythonReward(v1::PythonFunction config, absl::Duration time_limit, FailurePolicy policy, v1::DataConfig data,
               std::shared_ptr<PythonWorkerPool> pool)
      : config_(std::move(config)),
        time_limit_(time_limit),
        policy_(std::move(policy)),
        data_(std::move(data)),
        pool_(std::move(pool)) {}

  const std::string& name() const override { return policy_.identity().name; }
  double weight() const override { return policy_.identity().weight; }
  std::vector<std::string> required_fields() const override { return {}; }
  absl::Status Check() const override { return pool_->Check(); }

  absl::StatusOr<RewardColumn> Score(std::span<const RewardInput> completions, const RewardCall& call) const override {
    PythonCall python{.function = config_.function(),
                      .prompt = nullptr,
                      .columns = *completions.front().row,
                      .completions = completions,
                      .time_limit = time_limit_,
                      .max_attempts = static_cast<int>(config_.max_attempts())};
    SetPrompt(&python);
    const absl::StatusOr<PythonAnswer> answer = pool_->Call(python, call);
    if (!answer.ok()) {
      return policy_.OnFailure(Annotate(answer.status(), absl::StrCat(config_.file_name(), ":", config_.function())),
                               completions.size(), call);
    }
    for (const auto& [completion, fault] : answer->faults) TANDEM_RETURN_IF_ERROR(policy_.OnFault(completion, fault, call));
    return answer->values;
  }

 private:
  // As TRL would have it: a list of messages is a chat, and so are its completions.
  void SetPrompt(PythonCall* python) const {
    const auto prompt = python->columns.find(data_.prompt_field().empty() ? "prompt" : data_.prompt_field());
    if (prompt == python->columns.end()) return;
    python->is_chat = prompt->is_array() || config_.as_messages();
    if (!python->is_chat) {
      python->prompt = *prompt;
      return;
    }
    python->prompt = nlohmann::json::array();
    if (!data_.system_prompt().empty()) python->prompt.push_back({{"role", "system"}, {"content", data_.system_prompt()}});
    if (prompt->is_array()) {
      python->prompt.insert(python->prompt.end(), prompt->begin(), prompt->end());
    } else {
      python->prompt.push_back({{"role", "user"}, {"content", *prompt}});
    }
  }

  const v1::PythonFunction config_;
  const absl::Duration time_limit_;
  const FailurePolicy policy_;
  const v1::DataConfig data_;
  const std::shared_ptr<PythonWorkerPool> pool_;
};

bool IsFileName(const std::string& name) {
  return !name.empty() && name.size() <= 64 && name.front() != '.' &&
         std::ranges::all_of(name, [](unsigned char c) { return std::isalnum(c) != 0 || c == '_' || c == '.' || c == '-'; });
}

bool IsIdentifier(const std::string& name) {
  return !name.empty() && name.size() <= 64 && std::isdigit(static_cast<unsigned char>(name.front())) == 0 &&
         std::ranges::all_of(name, [](unsigned char c) { return std::isalnum(c) != 0 || c == '_'; });
}

}  // namespace

absl::StatusOr<RewardColumn> FailurePolicy::OnFailure(const absl::Status& failure, std::size_t num_completions,
                                                      const RewardCall& call) const {
  const absl::Status named = Annotate(failure, absl::StrCat("reward function '", identity_.name, "'"));
  if (!counts_as_none_ || absl::IsCancelled(failure) || absl::IsFailedPrecondition(failure)) return named;
  if (call.on_failure) call.on_failure({identity_.name, std::string(named.message())});
  return RewardColumn(num_completions);
}

absl::Status FailurePolicy::OnFault(std::size_t completion, const std::string& fault, const RewardCall& call) const {
  const std::string text = absl::StrCat("reward function '", identity_.name, "': completion ", completion, ": ", fault);
  if (!counts_as_none_) return absl::InvalidArgumentError(text);
  if (call.on_failure) call.on_failure({identity_.name, text});
  return absl::OkStatus();
}

absl::Duration CheckTimeLimit(double seconds, double most, RewardFaults* faults) {
  if (std::isfinite(seconds) && seconds >= 0.001 && seconds <= most) return absl::Seconds(seconds);
  faults->Add("time_limit_seconds", absl::StrCat(seconds, ", must be 0.001 to ", most));
  return absl::ZeroDuration();
}

std::unique_ptr<RewardFunction> MakePythonReward(const v1::PythonFunction& config, FailurePolicy policy,
                                                 const RewardSurroundings& surroundings, RewardFaults* faults) {
  const std::size_t faults_before = faults->lines().size();
  if (!config.path().empty())
    faults->Add("path", absl::StrCat("'", config.path(), "', must be replaced by the store's content on submission"));
  if (!IsFileName(config.file_name())) {
    faults->Add("file_name",
                absl::StrCat("'", config.file_name(), "', must be 1 to 64 letters, digits, _, - and ., not begun with ."));
  }
  if (!IsIdentifier(config.function())) {
    faults->Add("function",
                absl::StrCat("'", config.function(), "', must be the name of a function, 1 to 64 letters, digits and _"));
  }
  if (config.memory_limit_mib() < kLeastMemoryMib || config.memory_limit_mib() > kMostMemoryMib) {
    faults->Add("memory_limit_mib",
                absl::StrCat(config.memory_limit_mib(), ", must be ", kLeastMemoryMib, " to ", kMostMemoryMib));
  }
  if (config.max_attempts() > kMostAttempts) {
    faults->Add("max_attempts", absl::StrCat(config.max_attempts(), ", must be 1 to ", kMostAttempts));
  }
  const absl::Duration time_limit = CheckTimeLimit(config.time_limit_seconds(), 3600, faults);
  std::string bytes;
  const absl::StatusOr<std::string> path = surroundings.path_of_content ? surroundings.path_of_content(config.content())
                                                                        : absl::FailedPreconditionError("no content store");
  if (!path.ok()) {
    faults->Add("content", std::string(path.status().message()));
  } else {
    std::ifstream file(*path, std::ios::binary);
    bytes.assign(std::istreambuf_iterator<char>(file), {});
    if (bytes.empty() || bytes.size() > kMaxFileBytes) {
      faults->Add("content", absl::StrCat(bytes.size(), " bytes, must be 1 to ", kMaxFileBytes));
    }
  }
  if (faults->lines().size() != faults_before) return nullptr;
  const std::uint64_t memory_bytes = std::uint64_t{config.memory_limit_mib()} << 20;
  const std::shared_ptr<PythonWorkerPool> pool = surroundings.worker_pools->Of(config.content(), {.sandbox = surroundings.sandbox,
                                                                                                  .file_name = config.file_name(),
                                                                                                  .file_bytes = std::move(bytes),
                                                                                                  .memory_bytes = memory_bytes});
  pool->AddFunction(config.function());
  return std::make_unique<PythonReward>(config, time_limit, std::move(policy), surroundings.data, pool);
}

}  // namespace tandem

#include "trainer_server/job/job_plan.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <set>
#include <utility>

#include "absl/strings/str_join.h"
#include "common/base/units.h"
#include "common/rpc/job_state.h"
#include "google/protobuf/io/tokenizer.h"
#include "google/protobuf/text_format.h"
#include "trainer_server/job/adapter_files.h"
#include "trainer_server/job/evaluation.h"
#include "trainer_server/job/recipe.h"
#include "trainer_server/loss/loss_config.h"
#include "trainer_server/prompt/conversation.h"
#include "trainer_server/prompt/prompt_source.h"
#include "trainer_server/reward/python_worker.h"

namespace tandem {
namespace {

using Lines = std::vector<std::string>;

constexpr std::size_t kMaxRowFaults = 20;
constexpr std::uint32_t kMaxMicroBatchTokens = 1 << 24;

class TextFaults final : public google::protobuf::io::ErrorCollector {
 public:
  explicit TextFaults(Lines* faults) : faults_(faults) {}
  void AddError(int line, int column, const std::string& message) override {
    faults_->push_back(absl::StrCat("job file line ", line + 1, " column ", column + 1, ": ", message));
  }
  void AddWarning(int line, int column, const std::string& message) override { AddError(line, column, message); }

 private:
  Lines* const faults_;
};

absl::Status Faulty(const Lines& faults) { return absl::InvalidArgumentError(absl::StrJoin(faults, "\n")); }

// Collects faults of one message's fields.
class FieldCheck {
 public:
  FieldCheck(std::string prefix, Lines* faults) : prefix_(std::move(prefix)), faults_(faults) {}
  template <typename Value>
  void Expect(bool is_good, const char* field, const Value& value, const std::string& limit) const {
    if (!is_good) faults_->push_back(absl::StrCat(prefix_, field, ": ", value, "; must be ", limit));
  }
  void Range(const char* field, std::uint64_t value, std::uint64_t least, std::uint64_t most) const {
    Expect(value >= least && value <= most, field, value, absl::StrCat(least, " to ", most));
  }

 private:
  const std::string prefix_;
  Lines* const faults_;
};

bool IsFinitePositive(double value) { return std::isfinite(value) && value > 0; }

bool IsJobName(const std::string& text) {
  return !text.empty() && text.size() <= 64 && std::ranges::all_of(text, [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
  });
}

// All but the temperature, which a job's rollouts need and an evaluation may do without. Fills defaults.
void CheckSampling(const JobSurroundings& surroundings, const std::string& prefix, v1::SamplingParams* sampling, Lines* faults) {
  const FieldCheck sampled(prefix, faults);
  if (sampling->top_p() == 0) sampling->set_top_p(1);
  sampled.Expect(sampling->top_p() > 0 && sampling->top_p() <= 1, "top_p", sampling->top_p(), "> 0 and <= 1");
  sampled.Expect(sampling->min_p() >= 0 && sampling->min_p() < 1, "min_p", sampling->min_p(), ">= 0 and < 1");
  if (sampling->repetition_penalty() == 0) sampling->set_repetition_penalty(1);
  sampled.Expect(sampling->repetition_penalty() >= 0.01 && sampling->repetition_penalty() <= 100, "repetition_penalty",
                 sampling->repetition_penalty(), "0.01 to 100");
  sampled.Expect(std::abs(sampling->presence_penalty()) <= 2, "presence_penalty", sampling->presence_penalty(), "-2 to 2");
  const auto max_positions = static_cast<std::uint64_t>(surroundings.model.max_positions);
  sampled.Range("max_tokens", sampling->max_tokens(), 1, max_positions > 1 ? max_positions - 1 : 1);
  sampled.Expect(sampling->stop_token_ids_size() <= 64, "stop_token_ids", sampling->stop_token_ids_size(), "at most 64 ids");
  for (const std::uint32_t id : sampling->stop_token_ids()) {
    sampled.Expect(id < static_cast<std::uint32_t>(surroundings.model.vocab_size), "stop_token_ids", id,
                   absl::StrCat("below the vocabulary's ", surroundings.model.vocab_size));
  }
  sampled.Expect(sampling->stop_strings_size() <= 16, "stop_strings", sampling->stop_strings_size(), "at most 16");
  for (const std::string& stop : sampling->stop_strings()) {
    sampled.Expect(!stop.empty() && stop.size() <= 256, "stop_strings", absl::StrCat(stop.size(), " bytes"), "1 to 256 bytes");
  }
}

void CheckRollout(const JobSurroundings& surroundings, v1::RolloutConfig* rollout, Lines* faults, Lines* warnings) {
  const FieldCheck check("rollout.", faults);
  check.Range("prompts_per_step", rollout->prompts_per_step(), 1, 65536);
  check.Range("group_size", rollout->group_size(), 1, 1024);
  if (rollout->group_size() == 1)
    warnings->push_back("rollout.group_size: 1: with one completion a prompt, group advantages are 0");

  v1::SamplingParams* sampling = rollout->mutable_sampling();
  FieldCheck("rollout.sampling.", faults)
      .Expect(sampling->temperature() >= 1e-4 && sampling->temperature() <= 100, "temperature", sampling->temperature(),
              ">= 1e-4 and <= 100: a job samples");
  CheckSampling(surroundings, "rollout.sampling.", sampling, faults);
  if (sampling->seed() != 0) warnings->push_back("rollout.sampling.seed: has no effect; seeds are derived from the job's");
  if (sampling->top_p() < 1 || sampling->top_k() > 0 || sampling->min_p() > 0) {
    warnings->push_back(
        "rollout.sampling: top_p, top_k or min_p truncate the distribution; the kept mass of each token is recorded and used to "
        "compare the two sides");
  }
  if (sampling->repetition_penalty() != 1 || sampling->presence_penalty() != 0) {
    warnings->push_back(
        "rollout.sampling: penalties change the distribution drawn from, which the trainer's log-probs do not see");
  }
  if (sampling->ignore_end_tokens())
    warnings->push_back("rollout.sampling.ignore_end_tokens: completions never end by themselves");
  if (rollout->has_dynamic_sampling()) {
    FieldCheck("rollout.dynamic_sampling.", faults).Range("max_rounds", rollout->dynamic_sampling().max_rounds(), 2, 64);
  }
}

// Passes and mini-batches of a rollout batch, and the reference that moves beside them.
void CheckUpdates(v1::JobSpec* spec, const LossOptions& options, const AdvantageOptions& advantage, Lines* faults) {
  v1::LossConfig* const loss = spec->mutable_loss();
  if (loss->updates_per_rollout() == 0) loss->set_updates_per_rollout(1);
  if (loss->mini_batches_per_rollout() == 0) loss->set_mini_batches_per_rollout(1);
  const FieldCheck check("loss.", faults);
  check.Range("updates_per_rollout", loss->updates_per_rollout(), 1, 64);
  const std::uint32_t prompts = spec->rollout().prompts_per_step(), parts = loss->mini_batches_per_rollout();
  check.Expect(prompts % parts == 0, "mini_batches_per_rollout", parts,
               absl::StrCat("a divisor of rollout.prompts_per_step, ", prompts));
  if (!loss->has_reference_sync()) return;
  const v1::ReferenceSync& sync = loss->reference_sync();
  check.Range("reference_sync.interval_steps", sync.interval_steps(), 1, 1000000);
  check.Expect(sync.alpha() > 0 && sync.alpha() <= 1, "reference_sync.alpha", sync.alpha(), "> 0 and <= 1");
  if (options.beta == 0 && advantage.kl_in_reward == 0) {
    faults->push_back(
        "loss.reference_sync: set, but neither loss.beta nor advantage.kl_in_reward measures a KL to the reference");
  }
}

std::string JoinNames(const std::vector<LinearKind>& kinds) {
  return absl::StrJoin(kinds, ", ", [](std::string* out, LinearKind kind) { *out += LinearKindName(kind); });
}

// A start adapter is trained on as it is: its shape and scale are the job's.
void CheckStartShape(const PeftConfig& config, const v1::AdapterConfig& adapter, const JobPlan& plan, Lines* faults) {
  const FieldCheck check("adapter.", faults);
  check.Expect(config.rank == plan.policy.rank, "rank", adapter.rank(), absl::StrCat("the start adapter's ", config.rank));
  check.Expect(static_cast<float>(config.scale()) == plan.policy.scale, "alpha", adapter.alpha(),
               absl::StrCat("such that the scale, ", plan.policy.scale, ", is the start adapter's ", config.scale()));
  check.Expect(config.targets == plan.policy.targets, "targets", JoinNames(plan.policy.targets),
               absl::StrCat("the start adapter's ", JoinNames(config.targets)));
}

void CheckStartAdapter(const JobSurroundings& surroundings, const v1::AdapterConfig& adapter, const JobPlan& plan,
                       Lines* faults) {
  const auto start = OpenStartAdapter(adapter, surroundings.model, *surroundings.content);
  if (start.ok()) return CheckStartShape(start->config(), adapter, plan, faults);
  faults->push_back(absl::StrCat("adapter.start_config_content: ", start.status().message()));
}

// A job that `spec` comes after, whose id takes the place of its name in `named`. A job can name only what was there before it,
// so that no circle can close. Null: a fault.
std::optional<StoredJob> FindPrerequisite(const JobSurroundings& surroundings, const v1::JobSpec& spec, const std::string& field,
                                          std::string* named, Lines* faults) {
  const auto fault = [&](const std::string& limit) {
    faults->push_back(absl::StrCat(field, ": '", named->substr(0, 80), "'", limit));
    return std::nullopt;
  };
  if (*named == spec.name()) return fault(" is the name of the job itself; an earlier job of this name is named by its id");
  const absl::StatusOr<StoredJob> found =
      surroundings.find_job ? surroundings.find_job(*named) : absl::NotFoundError("there are no jobs");
  if (!found.ok()) return fault("; must be the id of a job of this trainer, or the name of one of your own");
  const v1::JobState state = found->status.state();
  if (EndedWithoutSuccess(state)) {
    return fault(absl::StrCat(" is job ", found->status.job(), ", which is ", StateWord(state),
                              "; must be queued, paused, running or succeeded"));
  }
  *named = found->status.job();
  return *found;
}

void CheckPrerequisites(const JobSurroundings& surroundings, JobOrigin origin, const JobPlan& plan, v1::JobSpec* spec,
                        Lines* faults) {
  const FieldCheck check("", faults);
  check.Expect(spec->priority() >= -kMaxPriority && spec->priority() <= kMaxPriority, "priority", spec->priority(),
               absl::StrCat(-kMaxPriority, " to ", kMaxPriority));
  check.Expect(spec->after_size() <= kMaxAfter, "after", absl::StrCat(spec->after_size(), " jobs"),
               absl::StrCat("at most ", kMaxAfter));
  v1::AdapterConfig* const adapter = spec->mutable_adapter();
  const bool has_start_job = !adapter->start_job().empty();
  const FieldCheck adapter_check("adapter.", faults);
  adapter_check.Expect(!adapter->start_best() || has_start_job, "start_best", "true", "given with start_job");
  adapter_check.Expect(!has_start_job || adapter->start_config_content().empty(), "start_job", adapter->start_job(),
                       "given without another start adapter");
  if (origin != JobOrigin::kSubmitted || spec->after_size() > kMaxAfter) return;
  std::set<std::string> after;
  for (std::string& named : *spec->mutable_after()) {
    if (!FindPrerequisite(surroundings, *spec, "after", &named, faults).has_value()) continue;
    check.Expect(after.insert(named).second, "after", named, "given once");
  }
  if (!has_start_job) return;
  const std::optional<StoredJob> start =
      FindPrerequisite(surroundings, *spec, "adapter.start_job", adapter->mutable_start_job(), faults);
  v1::JobSpec start_spec;
  if (!start.has_value() || !google::protobuf::TextFormat::ParseFromString(start->job_text, &start_spec)) return;
  CheckStartShape(PeftConfigOf(start_spec.adapter()), *adapter, plan, faults);
  adapter_check.Expect(!adapter->start_best() || start_spec.has_evaluation(), "start_best", "true",
                       absl::StrCat("false: job ", adapter->start_job(), " has no evaluation"));
}

void CheckAdapter(const JobSurroundings& surroundings, v1::AdapterConfig* adapter, Lines* faults, JobPlan* plan) {
  const FieldCheck check("adapter.", faults);
  const bool is_rank_good = adapter->rank() >= 1 && adapter->rank() <= 1024;
  check.Range("rank", adapter->rank(), 1, 1024);
  check.Expect(IsFinitePositive(adapter->alpha()), "alpha", adapter->alpha(), "> 0");
  check.Expect(adapter->dropout() >= 0 && adapter->dropout() < 1, "dropout", adapter->dropout(), ">= 0 and < 1");
  if (adapter->targets().empty()) {
    for (int kind = v1::LINEAR_KIND_Q_PROJ; kind <= v1::LINEAR_KIND_DOWN_PROJ; ++kind) {
      adapter->add_targets(static_cast<v1::LinearKind>(kind));
    }
  }
  std::set<LinearKind> targets;
  for (const int kind : adapter->targets()) {
    const bool is_known = kind >= v1::LINEAR_KIND_Q_PROJ && kind <= v1::LINEAR_KIND_DOWN_PROJ;
    check.Expect(is_known, "targets", kind, "LINEAR_KIND_Q_PROJ to LINEAR_KIND_DOWN_PROJ");
    if (!is_known) continue;
    const bool is_new = targets.insert(static_cast<LinearKind>(kind - 1)).second;
    check.Expect(is_new, "targets", v1::LinearKind_Name(kind), "given once");
  }
  check.Expect(adapter->start_path().empty(), "start_path", adapter->start_path(),
               "replaced by the store's content on submission");
  const bool has_config = !adapter->start_config_content().empty(), has_weights = !adapter->start_weights_content().empty();
  check.Expect(has_config == has_weights, "start_config_content", adapter->start_config_content(),
               "given together with start_weights_content");
  // Repeated fields keep the order of slots and files.
  adapter->clear_targets();
  for (const LinearKind kind : targets) adapter->add_targets(static_cast<v1::LinearKind>(static_cast<int>(kind) + 1));
  if (!is_rank_good || targets.empty()) return;
  plan->policy.rank = static_cast<int>(adapter->rank());
  const double divisor = adapter->rank_stabilised() ? std::sqrt(adapter->rank()) : adapter->rank();
  plan->policy.scale = static_cast<float>(adapter->alpha() / divisor);
  plan->policy.targets.assign(targets.begin(), targets.end());
  plan->policy.dropout = adapter->dropout();
  plan->layout = AdapterLayout::Create(surroundings.model, plan->policy.rank, plan->policy.targets);
  if (has_config && has_weights) CheckStartAdapter(surroundings, *adapter, *plan, faults);
}

void CheckOptimizer(const v1::JobSpec& spec, v1::OptimizerConfig* optimizer, Lines* faults, JobPlan* plan) {
  if (!optimizer->has_beta1()) optimizer->set_beta1(0.9);
  if (!optimizer->has_beta2()) optimizer->set_beta2(0.99);
  if (!optimizer->has_epsilon()) optimizer->set_epsilon(1e-8);
  if (!optimizer->has_max_grad_norm()) optimizer->set_max_grad_norm(1);
  if (optimizer->schedule() == v1::LEARNING_RATE_SCHEDULE_UNSPECIFIED) {
    optimizer->set_schedule(v1::LEARNING_RATE_SCHEDULE_CONSTANT);
  }
  const FieldCheck check("optimizer.", faults);
  check.Expect(IsFinitePositive(optimizer->learning_rate()), "learning_rate", optimizer->learning_rate(), "> 0");
  check.Expect(optimizer->beta1() >= 0 && optimizer->beta1() < 1, "beta1", optimizer->beta1(), ">= 0 and < 1");
  check.Expect(optimizer->beta2() >= 0 && optimizer->beta2() < 1, "beta2", optimizer->beta2(), ">= 0 and < 1");
  check.Expect(IsFinitePositive(optimizer->epsilon()), "epsilon", optimizer->epsilon(), "> 0");
  check.Expect(std::isfinite(optimizer->weight_decay()) && optimizer->weight_decay() >= 0, "weight_decay",
               optimizer->weight_decay(), ">= 0");
  check.Expect(std::isfinite(optimizer->max_grad_norm()) && optimizer->max_grad_norm() >= 0, "max_grad_norm",
               optimizer->max_grad_norm(), ">= 0; 0 switches it off");
  check.Expect(optimizer->final_learning_rate_ratio() >= 0 && optimizer->final_learning_rate_ratio() <= 1,
               "final_learning_rate_ratio", optimizer->final_learning_rate_ratio(), "0 to 1");
  check.Expect(optimizer->warmup_steps() < std::max(spec.num_steps(), 1u), "warmup_steps", optimizer->warmup_steps(),
               absl::StrCat("below num_steps, ", spec.num_steps()));
  check.Expect(v1::LearningRateSchedule_IsValid(optimizer->schedule()), "schedule", static_cast<int>(optimizer->schedule()),
               "a known schedule");
  plan->adamw = {optimizer->beta1(), optimizer->beta2(), optimizer->epsilon(), optimizer->weight_decay(),
                 optimizer->max_grad_norm()};
  plan->learning_rate.peak = optimizer->learning_rate();
  plan->learning_rate.decay = optimizer->schedule() == v1::LEARNING_RATE_SCHEDULE_LINEAR   ? LearningRateDecay::kLinear
                              : optimizer->schedule() == v1::LEARNING_RATE_SCHEDULE_COSINE ? LearningRateDecay::kCosine
                                                                                           : LearningRateDecay::kConstant;
  plan->learning_rate.warmup_steps = optimizer->warmup_steps();
  plan->learning_rate.num_steps = spec.num_steps();
  plan->learning_rate.final_ratio = optimizer->final_learning_rate_ratio();
}

void CheckRewards(const JobSurroundings& surroundings, JobOrigin origin, v1::JobSpec* spec, Lines* faults, JobPlan* plan) {
  for (v1::RewardConfig& reward : *spec->mutable_rewards()) FillRewardDefaults(&reward);
  absl::StatusOr<RewardSet> rewards = RewardSet::Create(
      spec->rewards(),
      {.sandbox = surroundings.sandbox,
       .path_of_content = [&surroundings](const std::string& sha256) { return surroundings.content->PathOf(sha256); },
       .data = spec->data(),
       .worker_pools = std::make_shared<PythonWorkerPools>()});
  if (!rewards.ok()) {
    faults->push_back(std::string(rewards.status().message()));
    return;
  }
  if (origin == JobOrigin::kSubmitted) {
    const absl::Status checked = rewards->Check();
    if (!checked.ok()) faults->push_back(std::string(checked.message()));
  }
  for (int i = 0; i < spec->rewards_size(); ++i)
    spec->mutable_rewards(i)->set_name(rewards->names()[static_cast<std::size_t>(i)]);
  plan->advantage.weights = rewards->weights();
  plan->advantage.function_names = rewards->names();
  const std::string& named = spec->rollout().dynamic_sampling().reward();
  if (!named.empty() && std::ranges::find(rewards->names(), named) == rewards->names().end()) {
    faults->push_back(absl::StrCat("rollout.dynamic_sampling.reward: '", named,
                                   "'; must be one of the rewards: ", absl::StrJoin(rewards->names(), ", ")));
  }
  plan->rewards = *std::move(rewards);
}

std::shared_ptr<const DataSet> OpenContent(const JobSurroundings& surroundings, const std::string& field,
                                           const std::string& content, Lines* faults) {
  const absl::StatusOr<std::string> path = surroundings.content->PathOf(content);
  if (!path.ok()) {
    faults->push_back(absl::StrCat(field, ".content: ", path.status().message()));
    return nullptr;
  }
  auto data = DataSet::Open(*path);
  if (!data.ok()) {
    faults->push_back(absl::StrCat(field, ": ", data.status().message()));
    return nullptr;
  }
  return *std::move(data);
}

// Some rows of a data set.
struct RowView {
  const DataSet& data;
  const RowIndices& rows;
  std::size_t size() const { return rows == nullptr ? data.num_rows() : rows->size(); }
  std::size_t operator[](std::size_t place) const { return rows == nullptr ? place : (*rows)[place]; }
};

// By place: those whose prompts are encoded before they are drawn.
std::vector<bool> RowsToEncode(const RowView& view) {
  std::vector<bool> is_encoded(view.size(), false);
  const std::size_t first = std::min(view.size(), kMaxEncodedRows);
  std::fill_n(is_encoded.begin(), first, true);
  std::vector<std::size_t> others(view.size() - first);
  std::iota(others.begin(), others.end(), first);
  const std::size_t num_long = std::min(others.size(), kMaxEncodedLongRows);
  std::ranges::partial_sort(others, others.begin() + static_cast<std::ptrdiff_t>(num_long), std::ranges::greater(),
                            [&](std::size_t place) { return view.data.size_bytes_of(view[place]); });
  for (std::size_t i = 0; i < num_long; ++i) is_encoded[others[i]] = true;
  return is_encoded;
}

// Tokens at most behind the first turn; 0 where there is but one.
absl::StatusOr<std::uint64_t> FurtherTokens(const JobSurroundings& surroundings, const v1::DataConfig& config,
                                            const EncodedPrompt& prompt, std::uint64_t max_tokens) {
  if (prompt.messages.empty()) return std::uint64_t{0};
  const Conversation conversation(surroundings.encoder.get(), config.template_arguments(), prompt.messages);
  TANDEM_ASSIGN_OR_RETURN(const std::uint64_t tokens, MostConversationTokens(conversation, max_tokens));
  return tokens - max_tokens;
}

void Take(std::uint64_t num_tokens, std::uint64_t further_tokens, std::optional<PromptLengths>* lengths) {
  if (!lengths->has_value()) *lengths = PromptLengths{num_tokens, num_tokens, 0};
  (*lengths)->most_further = std::max((*lengths)->most_further, further_tokens);
  (*lengths)->shortest = std::min((*lengths)->shortest, num_tokens);
  (*lengths)->longest = std::max((*lengths)->longest, num_tokens);
}

absl::Status MeasurePrompts(const JobSurroundings& surroundings, const v1::DataConfig& config, const RowView& view,
                            std::uint64_t max_tokens, std::optional<PromptLengths>* lengths) {
  const std::vector<bool> is_encoded = RowsToEncode(view);
  for (std::size_t i = 0; i < view.size(); ++i) {
    if (!is_encoded[i]) continue;
    TANDEM_ASSIGN_OR_RETURN(const nlohmann::json row, view.data.ReadRow(view[i]));
    TANDEM_ASSIGN_OR_RETURN(const EncodedPrompt prompt,
                            EncodePrompt(*surroundings.encoder, config, row, view.data.line_of(view[i])));
    TANDEM_ASSIGN_OR_RETURN(const std::uint64_t further, FurtherTokens(surroundings, config, prompt, max_tokens));
    Take(prompt.token_ids.size(), further, lengths);
  }
  return absl::OkStatus();
}

// Every row is an object with the fields that the rewards need; its prompt can be encoded and leaves room for the completion.
void CheckRows(const JobSurroundings& surroundings, const JobPlan& plan, const RowView& view, const std::string& field,
               std::uint64_t max_completion_tokens, Lines* faults, std::optional<PromptLengths>* lengths) {
  const std::uint64_t max_prompt_tokens =
      static_cast<std::uint64_t>(std::max(surroundings.model.max_positions, 0)) -
      std::min<std::uint64_t>(max_completion_tokens, static_cast<std::uint64_t>(std::max(surroundings.model.max_positions, 0)));
  const Lines needed = plan.rewards.has_value() ? plan.rewards->required_fields() : Lines();
  const std::vector<bool> is_encoded = RowsToEncode(view);
  std::size_t num_faults = 0;
  for (std::size_t i = 0; i < view.size() && num_faults < kMaxRowFaults; ++i) {
    const std::size_t line = view.data.line_of(view[i]);
    const auto fault = [&](const std::string& message) {
      faults->push_back(absl::StrCat(field, ": ", message));
      ++num_faults;
    };
    const auto row = view.data.ReadRow(view[i]);
    if (!row.ok()) {
      fault(std::string(row.status().message()));
      continue;
    }
    for (const std::string& name : needed) {
      if (!row->contains(name)) {
        fault(absl::StrCat("data set line ", line, " has no field '", name, "', which a reward needs"));
      }
    }
    if (!is_encoded[i]) continue;
    const auto prompt = EncodePrompt(*surroundings.encoder, plan.spec.data(), *row, line);
    if (!prompt.ok()) {
      fault(std::string(prompt.status().message()));
      continue;
    }
    const auto further = FurtherTokens(surroundings, plan.spec.data(), *prompt, max_completion_tokens);
    if (!further.ok()) {
      fault(absl::StrCat("data set line ", line, ": ", further.status().message()));
    } else if (prompt->token_ids.size() + *further > max_prompt_tokens) {
      fault(absl::StrCat("data set line ", line, ": the prompt", *further > 0 ? " and its further turns have " : " has ",
                         prompt->token_ids.size() + *further, " tokens; the limit is ", max_prompt_tokens, ": the model's ",
                         surroundings.model.max_positions, " positions less max_tokens ", max_completion_tokens,
                         ". data.max_prompt_tokens leaves such rows out"));
    } else {
      Take(prompt->token_ids.size(), *further, lengths);
    }
  }
  if (num_faults >= kMaxRowFaults) faults->push_back(absl::StrCat(field, ": further rows were not checked"));
}

// Of which rows. False when that is a fault already.
bool ChooseRows(const JobSurroundings& surroundings, Lines* faults, JobPlan* plan) {
  if (plan->data == nullptr) return false;
  auto rows = SelectRows(*surroundings.encoder, plan->spec.data(), *plan->data);
  if (!rows.ok()) {
    faults->push_back(absl::StrCat("data.", rows.status().message()));
    return false;
  }
  plan->rows = *std::move(rows);
  return true;
}

// Held-out rows of the data set, or a file of its own.
void OpenEvaluation(const JobSurroundings& surroundings, Lines* faults, JobPlan* plan) {
  const v1::JobSpec& spec = plan->spec;
  if (!spec.has_evaluation()) {
    if (plan->rows.held_out == nullptr) return;
    plan->warnings.push_back(absl::StrCat("data.held_out_share: ", plan->rows.counts.held_out(),
                                          " rows are held out and nothing scores them: add evaluation {}"));
    return;
  }
  const FieldCheck check("evaluation.", faults);
  check.Expect(spec.evaluation().path().empty(), "path", spec.evaluation().path(), "replaced by the store's content");
  if (!spec.evaluation().content().empty()) {
    plan->evaluation = OpenContent(surroundings, "evaluation", spec.evaluation().content(), faults);
    if (plan->rows.held_out != nullptr) {
      plan->warnings.push_back("evaluation.path: has rows of its own; those that data.held_out_share keeps back are not scored");
    }
  } else if (plan->rows.held_out != nullptr) {
    plan->evaluation = plan->data;
    plan->evaluation_rows = plan->rows.held_out;
  } else {
    check.Expect(false, "path", "''", "a file, or data.held_out_share above 0");
  }
}

void CheckData(const JobSurroundings& surroundings, JobOrigin origin, Lines* faults, JobPlan* plan) {
  v1::JobSpec& spec = plan->spec;
  const FieldCheck check("data.", faults);
  check.Expect(spec.data().path().empty(), "path", spec.data().path(), "replaced by the store's content on submission");
  if (spec.data().prompt_field().empty()) spec.mutable_data()->set_prompt_field("prompt");
  const double share = spec.data().held_out_share();
  check.Expect(share >= 0 && share < 1, "held_out_share", share, "0 to less than 1");
  const std::uint32_t most = spec.data().max_prompt_tokens();
  check.Expect(most == 0 || most >= spec.data().min_prompt_tokens(), "max_prompt_tokens", most,
               absl::StrCat("0, or at least min_prompt_tokens, ", spec.data().min_prompt_tokens()));
  bool is_good = share >= 0 && share < 1;
  if (!spec.data().template_arguments().empty()) {
    const absl::Status arguments = PromptEncoder::CheckTemplateArguments(spec.data().template_arguments());
    if (!arguments.ok()) faults->push_back(absl::StrCat("data.", arguments.message()));
    is_good = is_good && arguments.ok();
  }
  if (origin == JobOrigin::kSettings) return;
  plan->data = OpenContent(surroundings, "data", spec.data().content(), faults);
  const bool has_rows = is_good && ChooseRows(surroundings, faults, plan);
  if (has_rows || !spec.evaluation().content().empty()) OpenEvaluation(surroundings, faults, plan);
  if (!has_rows) return;
  if (origin == JobOrigin::kSubmitted) {
    const std::uint64_t max_tokens = spec.rollout().sampling().max_tokens();
    const std::uint64_t evaluation_max_tokens = EvaluationSampling(spec).max_tokens();
    CheckRows(surroundings, *plan, {*plan->data, plan->rows.trained}, "data", max_tokens, faults, &plan->prompts);
    if (plan->evaluation != nullptr &&
        (spec.evaluation().content() != spec.data().content() || evaluation_max_tokens > max_tokens)) {
      CheckRows(surroundings, *plan, {*plan->evaluation, plan->evaluation_rows}, "evaluation", evaluation_max_tokens, faults,
                &plan->evaluation_prompts);
    }
  }
  if (plan->evaluation != nullptr) {
    const std::uint64_t num_rows = RowView{*plan->evaluation, plan->evaluation_rows}.size();
    if (spec.evaluation().num_prompts() == 0) spec.mutable_evaluation()->set_num_prompts(static_cast<std::uint32_t>(num_rows));
    FieldCheck("evaluation.", faults).Range("num_prompts", spec.evaluation().num_prompts(), 1, num_rows);
    plan->rows.counts.set_evaluated(spec.evaluation().num_prompts());
  }
  if (spec.rollout().prompts_per_step() == 0) return;
  const std::uint64_t num_rows = plan->rows.counts.trained(), prompts = spec.rollout().prompts_per_step();
  plan->steps_per_epoch = (num_rows + prompts - 1) / prompts;
  if (num_rows < prompts) {
    plan->warnings.push_back(absl::StrCat("rollout.prompts_per_step: ", prompts, " is more than the data set's ", num_rows,
                                          " rows: a step draws some rows more than once"));
  }
  // A filter has encoded them all.
  const std::uint64_t most_tokens = spec.data().max_prompt_tokens() + std::uint64_t{spec.rollout().sampling().max_tokens()};
  const bool is_bounded =
      spec.data().max_prompt_tokens() > 0 && most_tokens <= static_cast<std::uint64_t>(surroundings.model.max_positions);
  if (num_rows > kMaxEncodedRows + kMaxEncodedLongRows && !is_bounded) {
    plan->warnings.push_back(absl::StrCat("data: prompts beyond row ", kMaxEncodedRows, " of ", num_rows, ", but for the ",
                                          kMaxEncodedLongRows, " longest lines, are checked when they are drawn"));
  }
}

// The loss and advantage as they will run, so that `plan` shows what a preset means.
void EchoRecipe(JobPlan* plan) {
  v1::LossConfig* loss = plan->spec.mutable_loss();
  if (loss->preset() == v1::LOSS_PRESET_UNSPECIFIED) loss->set_preset(v1::LOSS_PRESET_DAPO);
  loss->set_surrogate(static_cast<v1::Surrogate>(static_cast<int>(plan->loss.surrogate) + 1));
  loss->set_ratio_level(static_cast<v1::RatioLevel>(static_cast<int>(plan->loss.ratio_level) + 1));
  loss->set_aggregation(static_cast<v1::Aggregation>(static_cast<int>(plan->loss.aggregation) + 1));
  if (plan->loss.surrogate == Surrogate::kClip || plan->loss.surrogate == Surrogate::kGmpo) {
    loss->set_epsilon_low(plan->loss.epsilon_low);
    loss->set_epsilon_high(plan->loss.epsilon_high);
  }
  if (plan->loss.surrogate == Surrogate::kCispo) loss->set_cispo_max_ratio(plan->loss.cispo_max_ratio);
  if (plan->loss.surrogate == Surrogate::kSapo) {
    loss->set_sapo_temperature_positive(plan->loss.sapo_temperature_positive);
    loss->set_sapo_temperature_negative(plan->loss.sapo_temperature_negative);
  }
  if (plan->loss.surrogate == Surrogate::kVespo) {
    loss->set_vespo_k_positive(plan->loss.vespo_k_positive);
    loss->set_vespo_lambda_positive(plan->loss.vespo_lambda_positive);
    loss->set_vespo_k_negative(plan->loss.vespo_k_negative);
    loss->set_vespo_lambda_negative(plan->loss.vespo_lambda_negative);
  }
  if (plan->loss.aggregation == Aggregation::kConstant) loss->set_constant_divisor(plan->loss.max_completion_length);
  loss->set_beta(plan->loss.beta);
  if (plan->loss.beta != 0) {
    loss->set_kl_estimator(static_cast<v1::KlEstimator>(static_cast<int>(plan->loss.kl_estimator) + 1));
    loss->set_kl_log_ratio_clamp(*plan->loss.kl_log_ratio_clamp);
    loss->set_kl_output_clamp(*plan->loss.kl_output_clamp);
  }
  v1::RolloutCorrection* correction = loss->mutable_rollout_correction();
  correction->set_mode(static_cast<v1::RolloutCorrectionMode>(static_cast<int>(plan->loss.rollout_correction) + 1));
  if (plan->loss.correction_min.has_value()) correction->set_min(*plan->loss.correction_min);
  if (plan->loss.correction_max.has_value()) correction->set_max(*plan->loss.correction_max);
  plan->spec.mutable_advantage()->set_estimator(
      static_cast<v1::AdvantageEstimator>(static_cast<int>(plan->advantage.estimator) + 1));
  if (plan->advantage.estimator == AdvantageEstimator::kGroup &&
      plan->advantage.aggregation == RewardAggregation::kSumThenNormalize) {
    plan->spec.mutable_advantage()->set_scale(static_cast<v1::AdvantageScale>(static_cast<int>(plan->advantage.scale) + 1));
  }
}

void WarnOfCosts(JobPlan* plan) {
  if (plan->loss.beta != 0) {
    plan->warnings.push_back(
        absl::StrCat("loss.beta: ", plan->loss.beta, " costs a scoring pass of the reference policy each step"));
  }
  if (plan->advantage.kl_in_reward != 0) {
    plan->warnings.push_back("advantage.kl_in_reward: costs two scoring passes each step, of the policy and of its reference");
  }
  if (plan->spec.loss().updates_per_rollout() * plan->spec.loss().mini_batches_per_rollout() > 1) {
    plan->warnings.push_back(
        "loss.updates_per_rollout, mini_batches_per_rollout: several updates cost a scoring pass of the policy before the first");
  }
  if (plan->loss.top_entropy_quantile < 1) {
    plan->warnings.push_back("loss.top_entropy_quantile: costs a scoring pass of the policy before each update");
  }
}

}  // namespace

absl::StatusOr<JobPlan> PlanJob(const std::string& job_text, const JobSurroundings& surroundings, JobOrigin origin) {
  if (job_text.size() > kMaxJobTextBytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the job file has ", job_text.size(), " bytes; the limit is ", kMaxJobTextBytes));
  }
  JobPlan plan;
  Lines faults;
  TextFaults collector(&faults);
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&collector);
  parser.SetRecursionLimit(32);
  if (!parser.ParseFromString(job_text, &plan.spec)) return Faulty(faults);

  v1::JobSpec& spec = plan.spec;
  const v1::JobSpec given = spec;
  // A stored job is resolved: a later version's recipe is not its.
  std::set<std::string> by_recipe;
  if (origin == JobOrigin::kSubmitted) by_recipe = ApplyRecipe(&spec, &plan.warnings, &faults);
  if (!faults.empty()) return Faulty(faults);  // all that the recipe would have filled is missing
  const FieldCheck check("", &faults);
  check.Expect(IsJobName(spec.name()), "name", absl::StrCat("'", spec.name().substr(0, 80), "'"), "[a-z0-9_-]{1,64}");
  check.Range("num_steps", spec.num_steps(), 1, 1000000);
  CheckRollout(surroundings, spec.mutable_rollout(), &faults, &plan.warnings);
  plan.loss = LossOptionsFromConfig(spec.loss(), spec.rollout().sampling().max_tokens(), &faults);
  plan.advantage = AdvantageOptionsFromConfig(spec.advantage(), spec.loss().preset(), &faults);
  CheckRecipe(plan.loss, plan.advantage, &faults);
  CheckUpdates(&spec, plan.loss, plan.advantage, &faults);
  CheckRewards(surroundings, origin, &spec, &faults, &plan);
  CheckEvaluation(&spec, &faults);
  if (spec.evaluation().has_sampling()) {
    v1::SamplingParams sampling = EvaluationSampling(spec);
    const double temperature = sampling.temperature();
    FieldCheck("evaluation.sampling.", &faults)
        .Expect(temperature >= 0 && temperature <= 100, "temperature", temperature, ">= 0 and <= 100");
    CheckSampling(surroundings, "evaluation.sampling.", &sampling, &faults);
  }
  CheckAdapter(surroundings, spec.mutable_adapter(), &faults, &plan);
  CheckPrerequisites(surroundings, origin, plan, &spec, &faults);
  CheckOptimizer(spec, spec.mutable_optimizer(), &faults, &plan);
  const FieldCheck batch("batch.", &faults);
  batch.Range("micro_batch_tokens", spec.batch().micro_batch_tokens(), 0, kMaxMicroBatchTokens);
  if (spec.batch().micro_batch_tokens() > 0) {
    batch.Expect(spec.batch().micro_batch_tokens() > spec.rollout().sampling().max_tokens(), "micro_batch_tokens",
                 spec.batch().micro_batch_tokens(),
                 absl::StrCat("above rollout.sampling.max_tokens, ", spec.rollout().sampling().max_tokens(), ", or 0"));
  }
  batch.Range("logit_chunk", spec.batch().logit_chunk(), 0, 1 << 20);
  if (spec.checkpoint().interval_steps() == 0) spec.mutable_checkpoint()->set_interval_steps(10);
  if (spec.checkpoint().keep() == 0) spec.mutable_checkpoint()->set_keep(2);
  FieldCheck("checkpoint.", &faults).Range("keep", spec.checkpoint().keep(), 1, 1000);
  CheckData(surroundings, origin, &faults, &plan);
  for (std::string& fault : faults) {
    if (!by_recipe.contains(fault.substr(0, fault.find(':')))) continue;
    absl::StrAppend(&fault, " (given by recipe '", spec.recipe(), "')");
  }
  if (!faults.empty()) return Faulty(faults);

  plan.policy.temperature = spec.rollout().sampling().temperature();
  plan.policy.logit_chunk = static_cast<int>(spec.batch().logit_chunk());
  plan.policy.seed = spec.seed();
  EchoRecipe(&plan);
  WarnOfCosts(&plan);
  for (std::string& warning : MisleadingSettings(given, spec)) plan.warnings.push_back(std::move(warning));
  return plan;
}

absl::StatusOr<std::string> JobText(const JobPlan& plan) {
  std::string text;
  if (!google::protobuf::TextFormat::PrintToString(plan.spec, &text)) return absl::InternalError("the job cannot be printed");
  if (text.size() > kMaxJobTextBytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the job with its defaults has ", text.size(), " bytes; the limit is ", kMaxJobTextBytes));
  }
  return text;
}

absl::Status MeasureMemory(const JobSurroundings& surroundings, const NodeMemory& node, JobPlan* plan) {
  const v1::JobSpec& spec = plan->spec;
  if (!plan->prompts.has_value()) {
    TANDEM_RETURN_IF_ERROR(MeasurePrompts(surroundings, spec.data(), {*plan->data, plan->rows.trained},
                                          spec.rollout().sampling().max_tokens(), &plan->prompts));
  }
  if (plan->evaluation != nullptr && !plan->evaluation_prompts.has_value()) {
    if (spec.evaluation().content() == spec.data().content()) {
      plan->evaluation_prompts = plan->prompts;
    } else {
      TANDEM_RETURN_IF_ERROR(MeasurePrompts(surroundings, spec.data(), {*plan->evaluation, plan->evaluation_rows},
                                            EvaluationSampling(spec).max_tokens(), &plan->evaluation_prompts));
    }
  }
  const bool is_kl_in_reward = plan->advantage.kl_in_reward != 0, needs_entropies = plan->loss.top_entropy_quantile < 1;
  const std::uint64_t updates = spec.loss().updates_per_rollout();
  const bool needs_old = updates * spec.loss().mini_batches_per_rollout() > 1 || is_kl_in_reward;
  JobMemory& needs = plan->needs;
  needs.rank = plan->policy.rank;
  needs.adapter_bytes = plan->layout.total_bytes;
  needs.has_reference_adapter = HasStartAdapter(spec.adapter()) || spec.loss().has_reference_sync();
  needs.has_dropout = plan->policy.dropout > 0;
  needs.prompts_per_step = spec.rollout().prompts_per_step();
  needs.group_size = spec.rollout().group_size();
  needs.shortest_prompt_tokens = plan->spec.batch().score_prompts() ? 0 : plan->prompts->shortest;
  needs.longest_prompt_tokens = plan->prompts->longest;
  // What an evaluation's completions are longer than the job's counts as if it were the prompt's.
  const std::uint64_t max_tokens = spec.rollout().sampling().max_tokens(), own = EvaluationSampling(spec).max_tokens();
  needs.longest_evaluation_prompt_tokens =
      plan->evaluation_prompts.has_value() ? plan->evaluation_prompts->longest + (own - std::min(own, max_tokens)) : 0;
  const std::uint64_t evaluation_further = plan->evaluation_prompts.has_value() ? plan->evaluation_prompts->most_further : 0;
  needs.further_tokens = std::max(plan->prompts->most_further, evaluation_further);
  needs.max_completion_tokens = max_tokens + needs.further_tokens;
  needs.micro_batch_tokens = spec.batch().micro_batch_tokens();
  needs.logit_chunk = spec.batch().logit_chunk();
  needs.updates_per_rollout = updates;
  // The entropies of the first update come with the old log-probs, unless it sees but a part of the batch.
  const std::uint64_t policy_passes =
      needs_entropies ? updates + (spec.loss().mini_batches_per_rollout() > 1 ? 1 : 0) : needs_old;
  needs.scoring_passes = (plan->loss.beta != 0 || is_kl_in_reward ? 1 : 0) + policy_passes;
  plan->memory = PlanMemory(surroundings.model, needs, node);
  return absl::OkStatus();
}

void KeepGroupsWhole(const JobSurroundings& surroundings, const NodeMemory& node, JobPlan* plan) {
  if (plan->spec.batch().micro_batch_tokens() > 0) return;
  JobMemory needs = plan->needs;
  needs.micro_batch_tokens = RowsOfWholeGroup(needs);
  if (needs.micro_batch_tokens == 0 || needs.micro_batch_tokens > kMaxMicroBatchTokens) return;
  PlannedMemory memory = PlanMemory(surroundings.model, needs, node);
  if (!memory.faults.empty()) return;
  plan->spec.mutable_batch()->set_micro_batch_tokens(static_cast<std::uint32_t>(needs.micro_batch_tokens));
  plan->needs = needs;
  plan->memory = std::move(memory);
}

absl::Status CheckMemory(const PlannedMemory& memory) {
  if (memory.faults.empty()) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrJoin(memory.faults, "\n"));
}

}  // namespace tandem

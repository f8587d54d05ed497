#include "trainer_server/reward/reward.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "absl/strings/str_join.h"
#include "trainer_server/reward/external_rewards.h"
#include "trainer_server/reward/reward_functions.h"

namespace tandem {
namespace {

class FormulaReward final : public RewardFunction {
 public:
  FormulaReward(RewardIdentity identity, std::vector<std::string> required_fields, RewardFormula formula)
      : identity_(std::move(identity)), required_fields_(std::move(required_fields)), formula_(std::move(formula)) {}

  const std::string& name() const override { return identity_.name; }
  double weight() const override { return identity_.weight; }
  absl::StatusOr<RewardColumn> Score(std::span<const RewardInput> completions, const RewardCall&) const override {
    RewardColumn rewards;
    for (std::size_t i = 0; i < completions.size(); ++i) {
      const absl::StatusOr<std::optional<double>> reward = formula_(completions[i]);
      if (!reward.ok()) return Annotate(reward.status(), absl::StrCat("scoring completion ", i));
      rewards.push_back(*reward);
    }
    return rewards;
  }
  std::vector<std::string> required_fields() const override { return required_fields_; }

 private:
  RewardIdentity identity_;
  std::vector<std::string> required_fields_;
  RewardFormula formula_;
};

RewardFormula MakeEndedByItself() {
  return [](const RewardInput& input) -> absl::StatusOr<std::optional<double>> { return input.is_truncated ? 0.0 : 1.0; };
}

// Functions of a kind that may fail for reasons of their own.
bool MayFail(v1::RewardConfig::FunctionCase function) {
  return function == v1::RewardConfig::kPythonFunction || function == v1::RewardConfig::kRemote ||
         function == v1::RewardConfig::kCodeTests;
}

// The name of the function that is set, as job.proto writes it; empty when none is.
std::string FunctionName(const v1::RewardConfig& config) {
  const auto* set =
      config.GetReflection()->GetOneofFieldDescriptor(config, v1::RewardConfig::descriptor()->FindOneofByName("function"));
  return set == nullptr ? std::string() : set->name();
}

// A function that the user named bears that name in logs.
std::string DefaultName(const v1::RewardConfig& config, const std::string& function) {
  if (config.has_python_function()) return config.python_function().function();
  if (config.has_remote()) return config.remote().function();
  return function;
}

std::string KnownFunctions() {
  const auto* oneof = v1::RewardConfig::descriptor()->FindOneofByName("function");
  std::string names;
  for (int i = 0; i < oneof->field_count(); ++i) absl::StrAppend(&names, i == 0 ? "" : ", ", oneof->field(i)->name());
  return names;
}

bool IsLogName(const std::string& name) {
  return !name.empty() && name.size() <= 64 && std::ranges::all_of(name, [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-' || c == '.';
  });
}

}  // namespace

void RewardFaults::Add(std::string_view field, std::string_view text) {
  lines_.push_back(absl::StrCat(path_, ToAbsl(field), ": ", ToAbsl(text)));
}

absl::Status RowFieldError(const std::string& field, const std::string& function, std::string_view text) {
  return absl::InvalidArgumentError(absl::StrCat("reward function '", function, "': row field '", field, "' ", ToAbsl(text)));
}

absl::StatusOr<const nlohmann::json*> RowField(const RewardInput& input, const std::string& field, const std::string& function) {
  if (input.row == nullptr || !input.row->is_object()) {
    return RowFieldError(field, function, "cannot be read: the row is not an object");
  }
  const auto entry = input.row->find(field);
  if (entry == input.row->end()) return RowFieldError(field, function, "is absent");
  return entry->is_null() ? nullptr : &*entry;
}

void CheckAnswerField(const std::string& field, RewardFaults* faults) {
  if (field.empty()) faults->Add("answer_field", "empty, must name a field of the data set's rows");
}

std::unique_ptr<RewardFunction> MakeFormulaReward(RewardIdentity identity, std::vector<std::string> required_fields,
                                                  RewardFormula formula) {
  return std::make_unique<FormulaReward>(std::move(identity), std::move(required_fields), std::move(formula));
}

void FillRewardDefaults(v1::RewardConfig* config) {
  const auto fill = [](auto value, auto fallback) { return value == 0 ? fallback : value; };
  if (MayFail(config->function_case()) && config->on_failure() == v1::REWARD_FAILURE_POLICY_UNSPECIFIED) {
    config->set_on_failure(v1::REWARD_FAILURE_POLICY_FAIL_JOB);
  }
  if (config->has_python_function()) {
    v1::PythonFunction* python = config->mutable_python_function();
    if (python->file_name().empty()) python->set_file_name("rewards.py");
    python->set_time_limit_seconds(fill(python->time_limit_seconds(), 30.0));
    python->set_memory_limit_mib(fill(python->memory_limit_mib(), 2048u));
    python->set_max_attempts(fill(python->max_attempts(), 3u));
  }
  if (config->has_remote()) {
    v1::RemoteReward* remote = config->mutable_remote();
    remote->set_time_limit_seconds(fill(remote->time_limit_seconds(), 30.0));
    remote->set_max_attempts(fill(remote->max_attempts(), 5u));
  }
  if (config->has_code_tests()) {
    v1::CodeTests* tests = config->mutable_code_tests();
    if (tests->language().empty()) tests->set_language("python");
    tests->set_time_limit_seconds(fill(tests->time_limit_seconds(), 10.0));
    tests->set_memory_limit_mib(fill(tests->memory_limit_mib(), 512u));
  }
  if (config->has_cosine_length()) {
    v1::CosineLength* length = config->mutable_cosine_length();
    if (!length->has_correct_short()) length->set_correct_short(1);
    if (!length->has_correct_long()) length->set_correct_long(0.5);
    if (!length->has_wrong_short()) length->set_wrong_short(-1);
    if (!length->has_wrong_long()) length->set_wrong_long(-0.5);
  }
}

absl::StatusOr<std::unique_ptr<RewardFunction>> MakeRewardFunction(const v1::RewardConfig& given, const std::string& field_path,
                                                                   const RewardSurroundings& surroundings) {
  v1::RewardConfig config = given;
  FillRewardDefaults(&config);
  const std::string function = FunctionName(config);
  RewardIdentity identity{.name = config.name().empty() ? DefaultName(config, function) : config.name(),
                          .weight = config.weight()};
  RewardFaults own(field_path), inner(absl::StrCat(field_path, function, "."));
  if (!function.empty() && !IsLogName(identity.name)) {
    own.Add("name", absl::StrCat("'", identity.name, "', must be 1 to 64 letters, digits, _, - and ."));
  }
  if (!std::isfinite(config.weight()) || config.weight() == 0) {
    own.Add("weight", absl::StrCat(config.weight(), ", must be finite and not 0"));
  }
  if (config.on_failure() != v1::REWARD_FAILURE_POLICY_UNSPECIFIED && !MayFail(config.function_case())) {
    own.Add("on_failure", "has no meaning here, is for python_function, remote and code_tests");
  }
  const FailurePolicy policy(identity, config.on_failure());
  RewardFormula formula;
  std::unique_ptr<RewardFunction> made;
  std::vector<std::string> required_fields;
  switch (config.function_case()) {
    case v1::RewardConfig::kNumericAnswer:
      formula = MakeNumericAnswer(config.numeric_answer(), identity, &inner);
      required_fields = {config.numeric_answer().answer_field()};
      break;
    case v1::RewardConfig::kNumericDistance:
      formula = MakeNumericDistance(config.numeric_distance(), identity, &inner);
      required_fields = {config.numeric_distance().answer_field()};
      break;
    case v1::RewardConfig::kEndedByItself:
      formula = MakeEndedByItself();
      break;
    case v1::RewardConfig::kAnswerTags:
      formula = MakeAnswerTags(config.answer_tags(), &inner);
      break;
    case v1::RewardConfig::kIntegerOnly:
      formula = MakeIntegerOnly(config.integer_only(), &inner);
      break;
    case v1::RewardConfig::kTagCount:
      formula = MakeTagCount(config.tag_count(), &inner);
      break;
    case v1::RewardConfig::kKeywords:
      formula = MakeKeywords(config.keywords(), &inner);
      break;
    case v1::RewardConfig::kLength:
      formula = MakeLengthReward(config.length(), &inner);
      break;
    case v1::RewardConfig::kMathAnswer:
      formula = MakeMathAnswer(config.math_answer(), identity, &inner);
      required_fields = {config.math_answer().answer_field()};
      break;
    case v1::RewardConfig::kMultipleChoice:
      formula = MakeMultipleChoice(config.multiple_choice(), identity, &inner);
      required_fields = {config.multiple_choice().answer_field()};
      break;
    case v1::RewardConfig::kRegularExpression:
      formula = MakeRegularExpression(config.regular_expression(), &inner);
      break;
    case v1::RewardConfig::kRepetition:
      formula = MakeRepetition(config.repetition(), &inner);
      break;
    case v1::RewardConfig::kLengthTarget:
      formula = MakeLengthTarget(config.length_target(), &inner);
      break;
    case v1::RewardConfig::kScriptShare:
      formula = MakeScriptShare(config.script_share(), &inner);
      break;
    case v1::RewardConfig::kNumericBands:
      formula = MakeNumericBands(config.numeric_bands(), identity, &inner);
      required_fields = {config.numeric_bands().answer_field()};
      break;
    case v1::RewardConfig::kEmailChecklist:
      formula = MakeEmailChecklist(config.email_checklist(), &inner);
      break;
    case v1::RewardConfig::kJsonSchema:
      formula = MakeJsonSchema(config.json_schema(), identity, &inner);
      if (!config.json_schema().schema_field().empty()) required_fields = {config.json_schema().schema_field()};
      break;
    case v1::RewardConfig::kCosineLength:
      formula = MakeCosineLength(config.cosine_length(), identity, &inner);
      required_fields = {config.cosine_length().answer().answer_field()};
      break;
    case v1::RewardConfig::kPythonFunction:
      made = MakePythonReward(config.python_function(), policy, surroundings, &inner);
      break;
    case v1::RewardConfig::kRemote:
      made = MakeRemoteReward(config.remote(), policy, &inner);
      break;
    case v1::RewardConfig::kCodeTests:
      made = MakeCodeTests(config.code_tests(), policy, surroundings, &inner);
      break;
    case v1::RewardConfig::FUNCTION_NOT_SET:
      own.Add("function", absl::StrCat("none is set, must be one of ", KnownFunctions()));
      break;
  }
  std::vector<std::string> faults = own.lines();
  faults.insert(faults.end(), inner.lines().begin(), inner.lines().end());
  if (!faults.empty()) return absl::InvalidArgumentError(absl::StrJoin(faults, "\n"));
  if (made != nullptr) return made;
  return MakeFormulaReward(std::move(identity), std::move(required_fields), std::move(formula));
}

}  // namespace tandem

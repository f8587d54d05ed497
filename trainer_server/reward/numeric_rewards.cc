#include <cmath>

#include "trainer_server/reward/number_text.h"
#include "trainer_server/reward/reward_functions.h"

namespace tandem {
namespace {

// The right answer of a row: a JSON number, or the last number of a string ("#### 42" of GSM8K). nullopt: the field is null.
absl::StatusOr<std::optional<Number>> RightAnswer(const RewardInput& input, const std::string& field,
                                                  const std::string& function) {
  const auto error = [&](std::string_view text) {
    return absl::InvalidArgumentError(absl::StrCat("reward function '", function, "': row field '", field, "' ", ToAbsl(text)));
  };
  if (input.row == nullptr || !input.row->is_object()) return error("cannot be read: the row is not an object");
  const auto entry = input.row->find(field);
  if (entry == input.row->end()) return error("is absent");
  if (entry->is_null()) return std::optional<Number>();
  if (entry->is_number()) {
    const std::string text = entry->dump();
    std::optional<Number> number = FindLastNumber(text);
    const double value = entry->get<double>();
    if (!number.has_value() || !std::isfinite(value)) return error("is not a finite number");
    if (text.find('e') != std::string::npos) number->digits.clear();  // 1e+20 has no plain digits
    number->value = value;
    return number;
  }
  if (!entry->is_string()) return error(absl::StrCat("is of type ", entry->type_name(), ", must be a number or a string"));
  const std::optional<Number> number = FindLastNumber(entry->get_ref<const std::string&>());
  if (!number.has_value() || !std::isfinite(number->value)) return error("holds no finite number");
  return number;
}

void CheckAnswerField(const std::string& field, RewardFaults* faults) {
  if (field.empty()) faults->Add("answer_field", "empty, must name a field of the data set's rows");
}

}  // namespace

RewardFormula MakeNumericAnswer(const v1::NumericAnswer& config, const RewardIdentity& identity, RewardFaults* faults) {
  CheckAnswerField(config.answer_field(), faults);
  if (!std::isfinite(config.tolerance()) || config.tolerance() < 0) {
    faults->Add("tolerance", absl::StrCat(config.tolerance(), ", must be finite and >= 0"));
  }
  return [config, name = identity.name](const RewardInput& input) -> absl::StatusOr<std::optional<double>> {
    TANDEM_ASSIGN_OR_RETURN(const std::optional<Number> right, RightAnswer(input, config.answer_field(), name));
    if (!right.has_value()) return std::optional<double>();
    if (config.must_end() && input.is_truncated) return 0.0;
    std::string_view text = input.completion;
    if (config.in_tags()) text = TextInTag(text, "answer").value_or(text);
    const std::optional<Number> given = FindLastNumber(text);
    return given.has_value() && IsSameNumber(*given, *right, config.tolerance()) ? 1.0 : 0.0;
  };
}

RewardFormula MakeNumericDistance(const v1::NumericDistance& config, const RewardIdentity& identity, RewardFaults* faults) {
  CheckAnswerField(config.answer_field(), faults);
  if (!std::isfinite(config.scale()) || config.scale() <= 0) {
    faults->Add("scale", absl::StrCat(config.scale(), ", must be finite and > 0"));
  }
  return [config, name = identity.name](const RewardInput& input) -> absl::StatusOr<std::optional<double>> {
    TANDEM_ASSIGN_OR_RETURN(const std::optional<Number> right, RightAnswer(input, config.answer_field(), name));
    if (!right.has_value()) return std::optional<double>();
    const std::optional<Number> given = FindLastNumber(input.completion);
    return given.has_value() ? std::exp(-std::abs(given->value - right->value) / config.scale()) : 0.0;
  };
}

}  // namespace tandem

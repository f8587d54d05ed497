#include <algorithm>
#include <cmath>
#include <numbers>

#include "trainer_server/reward/math_value.h"
#include "trainer_server/reward/number_text.h"
#include "trainer_server/reward/reward_functions.h"

namespace tandem {
namespace {

// The right answer of a row: a JSON number, or a string's last number, which with a marker stands just behind the last marker
// ("#### 42" of GSM8K). nullopt: the field is null.
absl::StatusOr<std::optional<Number>> RightAnswer(const RewardInput& input, const std::string& field, const std::string& marker,
                                                  const std::string& function) {
  const auto error = [&](std::string_view text) { return RowFieldError(field, function, text); };
  TANDEM_ASSIGN_OR_RETURN(const nlohmann::json* entry, RowField(input, field, function));
  if (entry == nullptr) return std::optional<Number>();
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
  const std::string_view text = entry->get_ref<const std::string&>();
  if (marker.empty()) {
    const std::optional<Number> number = FindLastNumber(text);
    if (!number.has_value() || !std::isfinite(number->value)) return error("holds no finite number");
    return number;
  }
  const std::size_t at = text.rfind(marker);
  if (at == std::string_view::npos) return error(absl::StrCat("holds no '", marker, "'"));
  const std::optional<Number> number = LeadingNumber(text.substr(at + marker.size()));
  if (!number.has_value() || !std::isfinite(number->value)) {
    return error(absl::StrCat("has no finite number behind its last '", marker, "'"));
  }
  return number;
}

// PlainMath's text without space, a full stop and a unit around; the text behind the last "=".
std::string MathAnswerText(std::string_view text, const std::vector<std::string>& units) {
  const std::string plain = PlainMath(text);
  std::string_view answer = plain;
  if (const std::size_t equals = answer.rfind('='); equals != std::string_view::npos) answer.remove_prefix(equals + 1);
  answer = TrimSpace(answer);
  if (answer.ends_with('.')) answer = TrimSpace(answer.substr(0, answer.size() - 1));
  const auto unit = std::ranges::find_if(units, [&](const std::string& u) { return answer.ends_with(u); });
  if (unit != units.end()) answer = TrimSpace(answer.substr(0, answer.size() - unit->size()));
  return std::string(answer);
}

// The row's answer as MathAnswerText gives it. nullopt: the field is null.
absl::StatusOr<std::optional<std::string>> RightMathText(const RewardInput& input, const v1::MathAnswer& config,
                                                         const std::vector<std::string>& units, const std::string& function) {
  const std::string& field = config.answer_field();
  TANDEM_ASSIGN_OR_RETURN(const nlohmann::json* entry, RowField(input, field, function));
  if (entry == nullptr) return std::optional<std::string>();
  if (entry->is_number()) {
    const std::string digits = entry->dump();
    if (ParseMathValue(digits).has_value()) return std::optional<std::string>(digits);
    return RowFieldError(field, function, absl::StrCat("is ", digits, ", must be a string to be compared exactly"));
  }
  if (!entry->is_string()) {
    return RowFieldError(field, function, absl::StrCat("is of type ", entry->type_name(), ", must be a number or a string"));
  }
  std::string_view text = entry->get_ref<const std::string&>();
  constexpr std::string_view kMarker = "####";
  if (const auto boxed = TextInBox(text); boxed.has_value()) {
    text = *boxed;
  } else if (const std::size_t at = text.rfind(kMarker); at != std::string_view::npos) {
    text.remove_prefix(at + kMarker.size());
  }
  std::string answer = MathAnswerText(text, units);
  if (answer.empty()) return RowFieldError(field, function, "holds no answer");
  return std::optional<std::string>(std::move(answer));
}

std::string_view LastLine(std::string_view text) {
  text = TrimSpace(text);
  return text.substr(text.rfind('\n') + 1);
}

std::string WithoutSpaces(std::string text) {
  std::erase(text, ' ');
  return text;
}

}  // namespace

RewardFormula MakeNumericAnswer(const v1::NumericAnswer& config, const RewardIdentity& identity, RewardFaults* faults) {
  CheckAnswerField(config.answer_field(), faults);
  if (!std::isfinite(config.tolerance()) || config.tolerance() < 0) {
    faults->Add("tolerance", absl::StrCat(config.tolerance(), ", must be finite and >= 0"));
  }
  if (config.answer_marker().size() > 64) {
    faults->Add("answer_marker", absl::StrCat(config.answer_marker().size(), " bytes, must be at most 64"));
  }
  return [config, name = identity.name](const RewardInput& input) -> absl::StatusOr<std::optional<double>> {
    TANDEM_ASSIGN_OR_RETURN(const std::optional<Number> right,
                            RightAnswer(input, config.answer_field(), config.answer_marker(), name));
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
    TANDEM_ASSIGN_OR_RETURN(const std::optional<Number> right, RightAnswer(input, config.answer_field(), "", name));
    if (!right.has_value()) return std::optional<double>();
    const std::optional<Number> given = FindLastNumber(input.completion);
    return given.has_value() ? std::exp(-std::abs(given->value - right->value) / config.scale()) : 0.0;
  };
}

RewardFormula MakeNumericBands(const v1::NumericBands& config, const RewardIdentity& identity, RewardFaults* faults) {
  CheckAnswerField(config.answer_field(), faults);
  if (config.bands_size() < 1 || config.bands_size() > 16) {
    faults->Add("bands", absl::StrCat(config.bands_size(), " bands, must be 1 to 16"));
  }
  double narrower = 0;
  for (int i = 0; i < config.bands_size(); ++i) {
    const v1::NumericBand& band = config.bands(i);
    const std::string path = absl::StrCat("bands[", i, "].");
    if (!std::isfinite(band.relative_error()) || band.relative_error() <= narrower) {
      faults->Add(path + "relative_error", absl::StrCat(band.relative_error(), ", must be finite and > ", narrower));
    }
    if (!std::isfinite(band.reward())) faults->Add(path + "reward", absl::StrCat(band.reward(), ", must be finite"));
    narrower = band.relative_error();
  }
  if (!std::isfinite(config.otherwise())) faults->Add("otherwise", absl::StrCat(config.otherwise(), ", must be finite"));
  return [config, name = identity.name](const RewardInput& input) -> absl::StatusOr<std::optional<double>> {
    TANDEM_ASSIGN_OR_RETURN(const std::optional<Number> right, RightAnswer(input, config.answer_field(), "", name));
    if (!right.has_value()) return std::optional<double>();
    const std::optional<Number> given = FindLastNumber(input.completion);
    if (!given.has_value()) return config.otherwise();
    if (IsSameNumber(*given, *right, 0)) return 1.0;
    const double distance = std::abs(given->value - right->value);
    for (const v1::NumericBand& band : config.bands()) {
      if (distance <= band.relative_error() * std::abs(right->value)) return band.reward();
    }
    return config.otherwise();
  };
}

RewardFormula MakeMathAnswer(const v1::MathAnswer& config, const RewardIdentity& identity, RewardFaults* faults) {
  CheckAnswerField(config.answer_field(), faults);
  if (!std::isfinite(config.tolerance()) || config.tolerance() < 0) {
    faults->Add("tolerance", absl::StrCat(config.tolerance(), ", must be finite and >= 0"));
  }
  if (config.units_size() > 64) faults->Add("units", absl::StrCat(config.units_size(), " units, must be at most 64"));
  for (int i = 0; i < config.units_size(); ++i) {
    const std::string& unit = config.units(i);
    if (unit.empty() || unit.size() > 64 || unit.find_first_of("0123456789%") != std::string::npos) {
      faults->Add(absl::StrCat("units[", i, "]"), absl::StrCat("'", unit, "', must be 1 to 64 bytes without digits and %"));
    }
  }
  std::vector<std::string> units(config.units().begin(), config.units().end());
  std::ranges::stable_sort(units, std::ranges::greater(), &std::string::size);  // "km" before "m"
  return [config, units, name = identity.name](const RewardInput& input) -> absl::StatusOr<std::optional<double>> {
    TANDEM_ASSIGN_OR_RETURN(const std::optional<std::string> right, RightMathText(input, config, units, name));
    if (!right.has_value()) return std::optional<double>();
    const std::string_view completion = input.completion;
    std::optional<std::string_view> marked = TextInBox(completion);
    if (!marked.has_value()) marked = TextInTag(completion, "answer");
    const std::optional<MathValue> right_value = ParseMathValue(*right);
    if (!right_value.has_value()) {
      const std::string given = MathAnswerText(marked.value_or(LastLine(completion)), units);
      return WithoutSpaces(given) == WithoutSpaces(*right) ? 1.0 : 0.0;
    }
    const std::optional<MathValue> given =
        marked.has_value() ? ParseMathValue(MathAnswerText(*marked, units)) : FindLastMathValue(PlainMath(completion));
    return given.has_value() && IsSameValue(*given, *right_value, config.tolerance()) ? 1.0 : 0.0;
  };
}

RewardFormula MakeCosineLength(const v1::CosineLength& config, const RewardIdentity& identity, RewardFaults* faults) {
  RewardFormula is_correct = MakeMathAnswer(config.answer(), identity, faults);
  if (config.max_tokens() < 1) faults->Add("max_tokens", absl::StrCat(config.max_tokens(), ", must be >= 1"));
  struct Ends {
    double at_zero, at_max;
  };
  const Ends correct{config.correct_short(), config.correct_long()}, wrong{config.wrong_short(), config.wrong_long()};
  for (const auto& [field, value] : {std::pair("correct_short", correct.at_zero), std::pair("correct_long", correct.at_max),
                                     std::pair("wrong_short", wrong.at_zero), std::pair("wrong_long", wrong.at_max),
                                     std::pair("truncated", config.truncated())}) {
    if (!std::isfinite(value)) faults->Add(field, absl::StrCat(value, ", must be finite"));
  }
  return [is_correct, correct, wrong, config](const RewardInput& input) -> absl::StatusOr<std::optional<double>> {
    TANDEM_ASSIGN_OR_RETURN(const std::optional<double> given, is_correct(input));
    if (!given.has_value()) return given;
    if (input.is_truncated && config.has_truncated()) return config.truncated();
    const Ends& ends = *given == 1 ? correct : wrong;
    const double share = std::min(1.0, static_cast<double>(input.completion_tokens) / config.max_tokens());
    return ends.at_max + 0.5 * (ends.at_zero - ends.at_max) * (1 + std::cos(share * std::numbers::pi));
  };
}

}  // namespace tandem

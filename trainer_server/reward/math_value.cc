#include "trainer_server/reward/math_value.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <utility>
#include <vector>

namespace tandem {
namespace {

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

std::string WithoutLeadingZeros(std::string digits) {
  digits.erase(0, std::min(digits.find_first_not_of('0'), digits.size() - 1));
  return digits;
}

std::string Multiply(std::string_view a, std::string_view b) {
  std::vector<int> sums(a.size() + b.size(), 0);  // least digit first
  for (std::size_t i = 0; i < a.size(); ++i) {
    int carry = 0;
    for (std::size_t j = 0; j < b.size() || carry > 0; ++j) {
      int& place = sums[i + j];
      place += carry + (j < b.size() ? (a[a.size() - 1 - i] - '0') * (b[b.size() - 1 - j] - '0') : 0);
      carry = place / 10;
      place %= 10;
    }
  }
  std::string digits;
  for (auto place = sums.rbegin(); place != sums.rend(); ++place) digits += static_cast<char>('0' + *place);
  return WithoutLeadingZeros(digits);
}

std::string Add(std::string_view a, std::string_view b) {
  std::string digits;
  int carry = 0;
  for (std::size_t i = 0; i < a.size() || i < b.size() || carry > 0; ++i) {
    const int sum = carry + (i < a.size() ? a[a.size() - 1 - i] - '0' : 0) + (i < b.size() ? b[b.size() - 1 - i] - '0' : 0);
    digits += static_cast<char>('0' + sum % 10);
    carry = sum / 10;
  }
  std::ranges::reverse(digits);
  return WithoutLeadingZeros(digits);
}

// Reads one value from the front of a text; what it does not take stays. Each function takes nothing when it fails.
class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}
  std::string_view rest() const { return text_; }

  bool Take(std::string_view prefix) {
    if (!text_.starts_with(prefix)) return false;
    text_.remove_prefix(prefix.size());
    return true;
  }
  void SkipSpaces() { text_.remove_prefix(std::min(text_.find_first_not_of(' '), text_.size())); }

  // [sign] (decimal | decimal/decimal | integer fraction | fraction) [%], fraction = \frac{..}{..} or, after an integer, a/b.
  std::optional<MathValue> Value() {
    const std::string_view start = text_;
    const bool is_negative = Sign();
    std::optional<MathValue> value = Fraction();
    if (!value.has_value()) value = DecimalOrMixed();
    if (!value.has_value()) {
      text_ = start;
      return std::nullopt;
    }
    const std::string_view end = text_;
    SkipSpaces();
    if (Take("%")) {
      value->denominator += "00";
    } else {
      text_ = end;
    }
    if (is_negative && value->numerator != "0") value->is_negative = !value->is_negative;
    return value;
  }

 private:
  bool Sign() {
    if (Take("-") || Take("\xe2\x88\x92")) return true;  // U+2212, the minus sign
    Take("+");
    return false;
  }

  std::string_view Digits() {
    const auto end = std::ranges::find_if_not(text_, IsDigit);
    const std::string_view digits = text_.substr(0, static_cast<std::size_t>(end - text_.begin()));
    text_.remove_prefix(digits.size());
    return digits;
  }

  // 12, 1,234.50 or .5.
  std::optional<MathValue> Decimal() {
    const std::string_view start = text_;
    std::string digits(Digits());
    if (!digits.empty() && digits.size() <= 3 && digits[0] != '0') {
      while (text_.starts_with(',') && std::min(text_.find_first_not_of("0123456789", 1), text_.size()) == 4) {
        digits += text_.substr(1, 3);
        text_.remove_prefix(4);
      }
    }
    std::string_view decimals;
    if (text_.size() > 1 && text_[0] == '.' && IsDigit(text_[1])) {
      text_.remove_prefix(1);
      decimals = Digits();
    }
    digits += decimals;
    if (digits.empty() || digits.size() > kMaxMathDigits) {
      text_ = start;
      return std::nullopt;
    }
    return MathValue{.is_negative = false,
                     .numerator = WithoutLeadingZeros(std::move(digits)),
                     .denominator = "1" + std::string(decimals.size(), '0')};
  }

  static std::optional<MathValue> Divide(const MathValue& a, const MathValue& b) {
    if (b.numerator == "0") return std::nullopt;
    MathValue value{.is_negative = false,
                    .numerator = Multiply(a.numerator, b.denominator),
                    .denominator = Multiply(a.denominator, b.numerator)};
    value.is_negative = a.is_negative != b.is_negative && value.numerator != "0";
    return value;
  }

  // {-3.5} or one digit.
  std::optional<MathValue> FractionPart() {
    SkipSpaces();
    if (!text_.empty() && IsDigit(text_[0])) {
      const std::string digit(text_.substr(0, 1));
      text_.remove_prefix(1);
      return MathValue{.is_negative = false, .numerator = digit, .denominator = "1"};
    }
    if (!Take("{")) return std::nullopt;
    SkipSpaces();
    const bool is_negative = Sign();
    std::optional<MathValue> value = Decimal();
    SkipSpaces();
    if (!value.has_value() || !Take("}")) return std::nullopt;
    value->is_negative = is_negative && value->numerator != "0";
    return value;
  }

  std::optional<MathValue> Fraction() {
    const std::string_view start = text_;
    if (Take("\\frac")) {
      const std::optional<MathValue> above = FractionPart();
      const std::optional<MathValue> below = above.has_value() ? FractionPart() : std::nullopt;
      std::optional<MathValue> value = below.has_value() ? Divide(*above, *below) : std::nullopt;
      if (value.has_value()) return value;
    }
    text_ = start;
    return std::nullopt;
  }

  // a/b, spaces around the slash allowed.
  std::optional<MathValue> Quotient() {
    const std::string_view start = text_;
    const std::optional<MathValue> above = Decimal();
    SkipSpaces();
    if (above.has_value() && Take("/")) {
      SkipSpaces();
      const std::optional<MathValue> below = Decimal();
      std::optional<MathValue> value = below.has_value() ? Divide(*above, *below) : std::nullopt;
      if (value.has_value()) return value;
    }
    text_ = start;
    return std::nullopt;
  }

  std::optional<MathValue> DecimalOrMixed() {
    if (std::optional<MathValue> quotient = Quotient(); quotient.has_value()) return quotient;
    std::optional<MathValue> whole = Decimal();
    if (!whole.has_value() || whole->denominator != "1") return whole;
    const std::string_view end = text_;
    SkipSpaces();
    const bool has_space = text_.size() < end.size();
    std::optional<MathValue> part = Fraction();
    if (!part.has_value() && has_space) part = Quotient();
    if (!part.has_value() || part->is_negative) {
      text_ = end;
      return whole;
    }
    return MathValue{.is_negative = false,
                     .numerator = Add(Multiply(whole->numerator, part->denominator), part->numerator),
                     .denominator = part->denominator};
  }

  std::string_view text_;
};

double ToDouble(const MathValue& value) {
  const double ratio = std::strtod(value.numerator.c_str(), nullptr) / std::strtod(value.denominator.c_str(), nullptr);
  return value.is_negative ? -ratio : ratio;
}

}  // namespace

std::string PlainMath(std::string_view text) {
  constexpr std::pair<std::string_view, std::string_view> kReplaced[] = {
      {"\\left", ""}, {"\\right", ""}, {"\\,", ""},  {"\\!", ""},           {"\\;", ""},           {"\\:", ""},  {"~", " "},
      {"\\$", ""},    {"$", ""},       {"\\%", "%"}, {"\\dfrac", "\\frac"}, {"\\tfrac", "\\frac"}, {"{,}", ","},
  };
  constexpr std::string_view kUnwrapped[] = {"\\text{", "\\mathrm{", "\\textbf{", "\\mathbf{"};
  std::string plain;
  std::vector<bool> keeps_brace;  // of the open braces
  while (true) {
    const std::size_t special = std::min(text.find_first_of("\\$~{}"), text.size());
    plain += text.substr(0, special);
    text.remove_prefix(special);
    if (text.empty()) return plain;
    const auto* const replaced =
        std::ranges::find_if(kReplaced, [&](const auto& entry) { return text.starts_with(entry.first); });
    if (replaced != std::ranges::end(kReplaced)) {
      plain += replaced->second;
      text.remove_prefix(replaced->first.size());
      continue;
    }
    const auto* const unwrapped =
        std::ranges::find_if(kUnwrapped, [&](std::string_view prefix) { return text.starts_with(prefix); });
    if (unwrapped != std::ranges::end(kUnwrapped)) {
      keeps_brace.push_back(false);
      text.remove_prefix(unwrapped->size());
      continue;
    }
    const char c = text[0];
    text.remove_prefix(1);
    if (c == '{') keeps_brace.push_back(true);
    const bool is_kept = c != '}' || keeps_brace.empty() || keeps_brace.back();
    if (c == '}' && !keeps_brace.empty()) keeps_brace.pop_back();
    if (is_kept) plain += c;
  }
}

std::optional<MathValue> ParseMathValue(std::string_view text) {
  Reader reader(text);
  reader.SkipSpaces();
  std::optional<MathValue> value = reader.Value();
  reader.SkipSpaces();
  return reader.rest().empty() ? value : std::nullopt;
}

std::optional<MathValue> FindLastMathValue(std::string_view text) {
  std::optional<MathValue> last;
  while (!text.empty()) {
    Reader reader(text);
    const std::optional<MathValue> value = reader.Value();
    if (value.has_value()) {
      last = value;
      text = reader.rest();
    } else {
      const std::size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
      text.remove_prefix(std::max<std::size_t>(digits, 1));
    }
  }
  return last;
}

bool IsSameValue(const MathValue& a, const MathValue& b, double tolerance) {
  if (tolerance > 0) return std::abs(ToDouble(a) - ToDouble(b)) <= tolerance;
  return a.is_negative == b.is_negative && Multiply(a.numerator, b.denominator) == Multiply(b.numerator, a.denominator);
}

std::optional<std::string_view> TextInBox(std::string_view text) {
  constexpr std::string_view kOpen = "\\boxed{";
  const std::size_t at = text.rfind(kOpen);
  if (at == std::string_view::npos) return std::nullopt;
  text.remove_prefix(at + kOpen.size());
  std::size_t depth = 1;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '{') ++depth;
    if (text[i] == '}' && --depth == 0) return text.substr(0, i);
  }
  return std::nullopt;
}

}  // namespace tandem

// Values as mathematics writes them: 1,234.5, -3/4, \frac{3}{4}, 1 1/2, 25%, also inside $..$ and \text{..}. Exact fractions,
// never rounded. Pure functions, linear in the text; thread-safe.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace tandem {

// numerator / denominator in decimal digits without leading zeros, not reduced. The denominator is never "0", and zero is
// never negative.
struct MathValue {
  bool is_negative = false;
  std::string numerator = "0";
  std::string denominator = "1";
};

// Numbers of more digits are no values.
inline constexpr std::size_t kMaxMathDigits = 500;

// `text` without what only sets it: $, \left, \right, \, \! \; \: ~, the braces of \text, \mathrm, \textbf and \mathbf; \% is %,
// \dfrac and \tfrac are \frac, {,} is a comma.
std::string PlainMath(std::string_view text);

// Both want PlainMath's text. ParseMathValue reads all of it but space around, FindLastMathValue the last value that stands in
// it.
std::optional<MathValue> ParseMathValue(std::string_view text);
std::optional<MathValue> FindLastMathValue(std::string_view text);

// Equal as fractions; tolerance > 0: at most that far apart as doubles.
bool IsSameValue(const MathValue& a, const MathValue& b, double tolerance);

// What stands inside the last \boxed{..}, braces balanced.
std::optional<std::string_view> TextInBox(std::string_view text);

}  // namespace tandem

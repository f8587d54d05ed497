#include "trainer_server/reward/number_text.h"

#include <charconv>
#include <cmath>
#include <limits>

namespace tandem {
namespace {

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

std::size_t EndOfDigits(std::string_view text, std::size_t begin) {
  while (begin < text.size() && IsDigit(text[begin])) ++begin;
  return begin;
}

// The end of an integer that begins at `begin`, comma groups of three included.
std::size_t EndOfInteger(std::string_view text, std::size_t begin) {
  std::size_t end = EndOfDigits(text, begin);
  if (end - begin > 3 || text[begin] == '0') return end;
  while (end < text.size() && text[end] == ',' && EndOfDigits(text, end + 1) == end + 4) end += 4;
  return end;
}

Number MakeNumber(bool is_negative, std::string_view integer, std::string_view fraction) {
  std::string digits;
  for (const char c : integer) {
    if (c == ',' || (c == '0' && digits.empty())) continue;
    digits += c;
  }
  if (digits.empty()) digits = "0";
  while (fraction.ends_with('0')) fraction.remove_suffix(1);
  if (!fraction.empty()) digits.append(".").append(fraction);
  if (is_negative && digits != "0") digits.insert(0, "-");

  Number number{.digits = digits, .value = 0};
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number.value);
  if (error == std::errc::result_out_of_range) {
    const bool is_tiny = digits.starts_with("0.") || digits.starts_with("-0.");
    number.value = std::copysign(is_tiny ? 0 : std::numeric_limits<double>::infinity(), is_negative ? -1.0 : 1.0);
  }
  return number;
}

}  // namespace

std::optional<Number> FindLastNumber(std::string_view text) {
  struct Found {
    bool is_negative = false;
    std::string_view integer, fraction;
  };
  std::optional<Found> last;
  for (std::size_t i = 0; i < text.size();) {
    const bool is_negative = text[i] == '-';
    const std::size_t begin = i + (is_negative ? 1 : 0);
    if (begin >= text.size() || !IsDigit(text[begin])) {
      ++i;
      continue;
    }
    i = EndOfInteger(text, begin);
    last = Found{.is_negative = is_negative, .integer = text.substr(begin, i - begin), .fraction = {}};
    if (i + 1 < text.size() && text[i] == '.' && IsDigit(text[i + 1])) {
      const std::size_t end = EndOfDigits(text, i + 1);
      last->fraction = text.substr(i + 1, end - i - 1);
      i = end;
    }
  }
  if (!last.has_value()) return std::nullopt;
  return MakeNumber(last->is_negative, last->integer, last->fraction);
}

bool IsSameNumber(const Number& a, const Number& b, double tolerance) {
  if (tolerance > 0) return std::abs(a.value - b.value) <= tolerance;
  if (!a.digits.empty() && !b.digits.empty()) return a.digits == b.digits;
  return a.value == b.value;
}

}  // namespace tandem

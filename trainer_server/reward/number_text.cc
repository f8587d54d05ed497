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

struct Found {
  bool is_negative = false;
  std::string_view integer, fraction;
  std::size_t end = 0;
};

std::optional<Found> NumberAt(std::string_view text, std::size_t at) {
  const bool is_negative = text[at] == '-';
  const std::size_t begin = at + (is_negative ? 1 : 0);
  if (begin >= text.size() || !IsDigit(text[begin])) return std::nullopt;
  Found found{.is_negative = is_negative, .integer = {}, .fraction = {}, .end = EndOfInteger(text, begin)};
  found.integer = text.substr(begin, found.end - begin);
  if (found.end + 1 < text.size() && text[found.end] == '.' && IsDigit(text[found.end + 1])) {
    const std::size_t end = EndOfDigits(text, found.end + 1);
    found.fraction = text.substr(found.end + 1, end - found.end - 1);
    found.end = end;
  }
  return found;
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
  std::optional<Found> last;
  for (std::size_t i = 0; i < text.size();) {
    const std::optional<Found> found = NumberAt(text, i);
    i = found.has_value() ? found->end : i + 1;
    if (found.has_value()) last = found;
  }
  if (!last.has_value()) return std::nullopt;
  return MakeNumber(last->is_negative, last->integer, last->fraction);
}

std::optional<Number> LeadingNumber(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(" \t\r\n$");
  if (begin == std::string_view::npos) return std::nullopt;
  const std::optional<Found> found = NumberAt(text, begin);
  if (!found.has_value()) return std::nullopt;
  return MakeNumber(found->is_negative, found->integer, found->fraction);
}

bool IsSameNumber(const Number& a, const Number& b, double tolerance) {
  if (tolerance > 0) return std::abs(a.value - b.value) <= tolerance;
  if (!a.digits.empty() && !b.digits.empty()) return a.digits == b.digits;
  return a.value == b.value;
}

}  // namespace tandem

// Finds numbers in text: `-?\d+(\.\d+)?`, left to right, where digits may be grouped by commas in threes (1,234.5). Pure
// functions; thread-safe.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace tandem {

struct Number {
  std::string digits;  // exact: no separators, no leading or trailing zeros, "-0" is "0". Empty: only the value is known
  double value = 0;    // nearest double; infinite when beyond its range
};

// The last number; "5-3" holds 5 and -3, "1.2.3" holds 1.2 and 3.
std::optional<Number> FindLastNumber(std::string_view text);
// The first number; nullopt when text other than space and currency signs ($) stands before it.
std::optional<Number> LeadingNumber(std::string_view text);

// Exact by digits where both have them, so that integers beyond 2^53 are told apart; tolerance > 0 compares the values.
bool IsSameNumber(const Number& a, const Number& b, double tolerance);

}  // namespace tandem

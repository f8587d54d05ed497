#include "common/base/units.h"

#include <cmath>
#include <cstdlib>

namespace tandem {

std::string FormatBytes(std::uint64_t bytes) {
  if (bytes >= kGiB) return absl::StrFormat("%.1f GiB", static_cast<double>(bytes) / static_cast<double>(kGiB));
  if (bytes >= kMiB) return absl::StrFormat("%.1f MiB", static_cast<double>(bytes) / static_cast<double>(kMiB));
  if (bytes >= kKiB) return absl::StrFormat("%.1f KiB", static_cast<double>(bytes) / static_cast<double>(kKiB));
  return absl::StrFormat("%d B", bytes);
}

absl::StatusOr<std::uint64_t> ParseBytes(std::string_view text) {
  const std::string copy(text);
  char* end = nullptr;
  const double value = std::strtod(copy.c_str(), &end);
  std::string_view unit(end);
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  double factor = 0;
  if (unit.empty() || unit == "B")
    factor = 1;
  else if (unit == "KiB")
    factor = static_cast<double>(kKiB);
  else if (unit == "MiB")
    factor = static_cast<double>(kMiB);
  else if (unit == "GiB")
    factor = static_cast<double>(kGiB);
  if (end == copy.c_str() || factor == 0 || !std::isfinite(value) || value < 0 || value * factor >= 9.2e18) {
    return absl::InvalidArgumentError(absl::StrCat("'", copy, "' is not a size: write 1048576, 64MiB or 1.5GiB"));
  }
  return static_cast<std::uint64_t>(value * factor);
}

}  // namespace tandem

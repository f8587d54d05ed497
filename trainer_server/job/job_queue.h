// Which queued job runs next, as plain data. The highest priority goes first; among equals the submitter whose jobs have held the
// device for the least time lately; of a submitter's jobs the oldest. A job that runs is never put aside for another.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace tandem {

inline constexpr std::int32_t kMaxPriority = 100;  // the least is its negative

// A job that could start.
struct QueuedJob {
  std::int64_t ordinal = 0;  // rises with the time of submission
  std::int32_t priority = 0;
  std::string submitter;
};

// Seconds of device time by submitter; who is absent has used none.
using DeviceSeconds = std::map<std::string, double>;

// Lately: half of what was used counts a day later, a quarter after two. Of a negative age, as after a clock was set back, all.
inline constexpr absl::Duration kDeviceTimeHalfLife = absl::Hours(24);
double DecayedSeconds(double seconds, absl::Duration age);

// Ordinals in the order in which `jobs` would run, if each held the device for `seconds_of_a_job` and none came beside them. Of
// submitters with equal device time the one with the oldest job goes first. n jobs of s submitters take O(n (log n + log s)).
std::vector<std::int64_t> OrderQueue(std::span<const QueuedJob> jobs, DeviceSeconds used, double seconds_of_a_job);

}  // namespace tandem

// States of jobs, as both ends of a call speak of them. Stateless.
#pragma once

#include <string>

#include "absl/strings/ascii.h"
#include "proto/job.pb.h"

namespace tandem {

// "running"
inline std::string StateWord(v1::JobState state) {
  const std::string name = v1::JobState_Name(state), prefix = "JOB_STATE_";
  return absl::AsciiStrToLower(name.starts_with(prefix) ? name.substr(prefix.size()) : name);
}

// Though one that failed may be resumed.
inline bool HasEnded(v1::JobState state) {
  return state == v1::JOB_STATE_SUCCEEDED || state == v1::JOB_STATE_FAILED || state == v1::JOB_STATE_CANCELLED;
}

// What comes after such a job never runs.
inline bool EndedWithoutSuccess(v1::JobState state) { return HasEnded(state) && state != v1::JOB_STATE_SUCCEEDED; }

}  // namespace tandem

// One log line format for both daemons, on stderr:
//   2026-11-29T18:20:01.123456Z I rollout_server engine: admitted sequence=3 tokens=28
// TANDEM_LOG(kInfo, "engine", "admitted sequence=", id, " tokens=", n). Values are key=value. Thread-safe; one write(2) a line,
// and a line a message: what a message quotes of others neither ends it nor moves a terminal (printable.h).
#pragma once

#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"

namespace tandem {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// Called once in main, before threads: the program's name in each line and the least level that is written.
void StartLog(std::string_view program, LogLevel least_level);
// "debug", "info", "warning", "error"; false when `name` is none of them.
bool ParseLogLevel(std::string_view name, LogLevel* level);
void WriteLog(LogLevel level, std::string_view room, std::string_view message);
bool LogEnabled(LogLevel level);

}  // namespace tandem

#define TANDEM_LOG(level, room, ...)                                                  \
  do {                                                                                \
    if (::tandem::LogEnabled(::tandem::LogLevel::level))                              \
      ::tandem::WriteLog(::tandem::LogLevel::level, room, absl::StrCat(__VA_ARGS__)); \
  } while (false)

#include "common/base/log.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/base/check.h"
#include "common/base/printable.h"

namespace tandem {
namespace {

std::string* program_name = nullptr;  // written once by StartLog, before threads
std::atomic<LogLevel> least{LogLevel::kInfo};

void WriteLine(char letter, std::string_view room, std::string_view message) {
  std::string line = absl::FormatTime("%Y-%m-%dT%H:%M:%E6SZ", absl::Now(), absl::UTCTimeZone());
  line.append({' ', letter, ' '});
  line.append(program_name ? *program_name : "tandem")
      .append(" ")
      .append(room)
      .append(": ")
      .append(Printable(message, LineEnds::kEscape))
      .append("\n");
  // A log that cannot be written must not stop the daemon.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace

void StartLog(std::string_view program, LogLevel least_level) {
  delete program_name;
  program_name = new std::string(program);
  least.store(least_level);
}

bool ParseLogLevel(std::string_view name, LogLevel* level) {
  if (name == "debug")
    *level = LogLevel::kDebug;
  else if (name == "info")
    *level = LogLevel::kInfo;
  else if (name == "warning")
    *level = LogLevel::kWarning;
  else if (name == "error")
    *level = LogLevel::kError;
  else
    return false;
  return true;
}

bool LogEnabled(LogLevel level) { return level >= least.load(std::memory_order_relaxed); }

void WriteLog(LogLevel level, std::string_view room, std::string_view message) {
  WriteLine("DIWE"[static_cast<int>(level)], room, message);
}

namespace internal {

void CheckFailed(const char* file, int line, const char* condition, const std::string& message) {
  WriteLine('F', "check", absl::StrCat(file, ":", line, ": ", condition, " is false: ", message));
  std::abort();
}

}  // namespace internal
}  // namespace tandem

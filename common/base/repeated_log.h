// Warnings of what is tried again and again. Confined to one thread.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "common/base/log.h"

namespace tandem {

class RepeatedLog {
 public:
  explicit RepeatedLog(std::string_view room) : room_(room) {}
  // Writes the line unless it is the one before.
  void Warn(const std::string& message) {
    if (message != std::exchange(last_, message)) TANDEM_LOG(kWarning, room_, message);
  }
  // It has succeeded: the next line is written whatever it says.
  void Forget() { last_.clear(); }

 private:
  const std::string_view room_;
  std::string last_;
};

}  // namespace tandem

// TANDEM_CHECK(condition, message...): for what only a bug can break. Prints where and why, then aborts.
#pragma once

#include <string>

#include "absl/strings/str_cat.h"

namespace tandem::internal {
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition, const std::string& message);
}  // namespace tandem::internal

#define TANDEM_CHECK(condition, ...)                                                                              \
  do {                                                                                                            \
    if (!(condition)) ::tandem::internal::CheckFailed(__FILE__, __LINE__, #condition, absl::StrCat(__VA_ARGS__)); \
  } while (false)

// One Status for the whole project: absl::Status at every boundary between rooms, passed by value up to main.
//
// Debian's Abseil has a string_view of its own; everything here takes std:: types and converts once.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace tandem {

// Debian's Abseil predates conversion from std::string_view.
inline absl::string_view ToAbsl(std::string_view text) { return absl::string_view(text.data(), text.size()); }

// Puts `context` ("loading model /m") before the message of a failed status; OK passes unchanged.
inline absl::Status Annotate(const absl::Status& status, std::string_view context) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(ToAbsl(context), ": ", status.message()));
}

}  // namespace tandem

#define TANDEM_CONCAT_INNER(a, b) a##b
#define TANDEM_CONCAT(a, b) TANDEM_CONCAT_INNER(a, b)

#define TANDEM_RETURN_IF_ERROR(expr)                                                    \
  do {                                                                                  \
    if (absl::Status tandem_status = (expr); !tandem_status.ok()) return tandem_status; \
  } while (false)

#define TANDEM_ASSIGN_OR_RETURN(lhs, expr) TANDEM_ASSIGN_OR_RETURN_IMPL(TANDEM_CONCAT(tandem_or_, __LINE__), lhs, expr)
#define TANDEM_ASSIGN_OR_RETURN_IMPL(tmp, lhs, expr) \
  auto tmp = (expr);                                 \
  if (!tmp.ok()) return tmp.status();                \
  lhs = *std::move(tmp)

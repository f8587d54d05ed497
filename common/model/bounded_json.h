// JSON from a file that is not trusted: bounded depth, no key twice in one object, only valid UTF-8. Stateless.
#pragma once

#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

#include "common/base/status.h"

namespace tandem {

inline constexpr int kMaxJsonDepth = 64;

// `file` names the text in messages. Errors: INVALID_ARGUMENT naming file and fault ("header is not JSON", the key, the depth).
absl::StatusOr<nlohmann::json> ParseBoundedJson(std::string_view text, const std::string& file, const std::string& part);

}  // namespace tandem

// JSON that is not trusted: bounded depth and number of values, no key twice in one object, only valid UTF-8. Stateless.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

#include "common/base/status.h"

namespace tandem {

inline constexpr int kMaxJsonDepth = 64;
// A value takes up to a hundred bytes of memory, of two bytes of text. Of a file: its size is bounded too.
inline constexpr std::size_t kMaxJsonValues = std::size_t{1} << 24;

// `file` names the text in messages. Errors: INVALID_ARGUMENT naming file and fault ("header is not JSON", the key, the depth,
// the number of values).
absl::StatusOr<nlohmann::json> ParseBoundedJson(std::string_view text, const std::string& file, const std::string& part,
                                                std::size_t max_values = kMaxJsonValues);

}  // namespace tandem

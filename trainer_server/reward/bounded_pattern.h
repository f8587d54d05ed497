// A regular expression whose matching is bounded in work, so that no text holds a step up. Immutable; thread-safe.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "common/base/status.h"

namespace tandem {

class BoundedPattern {
 public:
  static constexpr std::size_t kMaxBytes = 4096;

  // PCRE2 with Unicode classes. Errors: INVALID_ARGUMENT: pattern and what is wrong with it, without the field's name.
  static absl::StatusOr<BoundedPattern> Compile(const std::string& pattern);
  // Whether it matches somewhere, or all of the text. A match that takes four million units of work (items of the pattern tried,
  // and characters moved over) counts as none.
  bool Matches(std::string_view text, bool is_full) const;

 private:
  struct Code;
  std::shared_ptr<const Code> code_;
};

}  // namespace tandem

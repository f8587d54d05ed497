#include "trainer_server/reward/bounded_pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <cstdint>

namespace tandem {
namespace {

constexpr std::int64_t kMaxMatchWork = 4'000'000;
constexpr std::uint32_t kMatchHeapKib = 64 * 1024;

struct FreeMatchData {
  void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
};
struct FreeMatchContext {
  void operator()(pcre2_match_context* context) const { pcre2_match_context_free(context); }
};

// PCRE2's match limit starts anew at each position of the text. Work counts over all of them: one for each item of the pattern
// that is tried, and the distance that the match moved since the last.
struct MatchWork {
  std::int64_t work = 0;
  PCRE2_SIZE position = 0;
};

int CountWork(pcre2_callout_block* block, void* data) {
  auto* work = static_cast<MatchWork*>(data);
  const PCRE2_SIZE at = block->current_position;
  work->work += 1 + static_cast<std::int64_t>(std::max(at, work->position) - std::min(at, work->position));
  work->position = at;
  return work->work > kMaxMatchWork ? PCRE2_ERROR_MATCHLIMIT : 0;
}

}  // namespace

struct BoundedPattern::Code {
  explicit Code(pcre2_code* made) : code(made) {}
  ~Code() { pcre2_code_free(code); }
  Code(const Code&) = delete;
  Code& operator=(const Code&) = delete;
  pcre2_code* const code;
};

absl::StatusOr<BoundedPattern> BoundedPattern::Compile(const std::string& pattern) {
  if (pattern.empty() || pattern.size() > kMaxBytes) {
    return absl::InvalidArgumentError(absl::StrCat(pattern.size(), " bytes, must be 1 to ", kMaxBytes));
  }
  constexpr std::uint32_t kOptions =
      PCRE2_UTF | PCRE2_UCP | PCRE2_MATCH_INVALID_UTF | PCRE2_AUTO_CALLOUT | PCRE2_NEVER_BACKSLASH_C;
  int error = 0;
  PCRE2_SIZE error_at = 0;
  BoundedPattern compiled;
  auto code = std::make_shared<const Code>(
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), kOptions, &error, &error_at, nullptr));
  if (code->code == nullptr) {
    PCRE2_UCHAR message[256] = {};
    pcre2_get_error_message(error, message, sizeof(message));
    return absl::InvalidArgumentError(
        absl::StrCat("'", pattern, "', fails at byte ", error_at, ": ", reinterpret_cast<const char*>(message)));
  }
  std::uint32_t last_back_reference = 0;
  pcre2_pattern_info(code->code, PCRE2_INFO_BACKREFMAX, &last_back_reference);
  if (last_back_reference > 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", pattern, "', refers back to group ", last_back_reference, ", must have no back references"));
  }
  compiled.code_ = std::move(code);
  return compiled;
}

bool BoundedPattern::Matches(std::string_view text, bool is_full) const {
  const std::unique_ptr<pcre2_match_data, FreeMatchData> data(pcre2_match_data_create(1, nullptr));
  const std::unique_ptr<pcre2_match_context, FreeMatchContext> context(pcre2_match_context_create(nullptr));
  MatchWork work;
  pcre2_set_callout(context.get(), CountWork, &work);
  pcre2_set_heap_limit(context.get(), kMatchHeapKib);
  return pcre2_match(code_->code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), 0,
                     is_full ? PCRE2_ANCHORED | PCRE2_ENDANCHORED : 0, data.get(), context.get()) >= 0;
}

}  // namespace tandem

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/ascii.h"
#include "trainer_server/reward/reward_functions.h"
#include "unicode/unistr.h"

namespace tandem {
namespace {

std::string Open(std::string_view tag) { return absl::StrCat("<", ToAbsl(tag), ">"); }
std::string Close(std::string_view tag) { return absl::StrCat("</", ToAbsl(tag), ">"); }

constexpr std::string_view kSpace = " \t\r\n\f\v";

std::string_view SkipSpace(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(kSpace), text.size()));
  return text;
}

std::size_t CountOf(std::string_view text, std::string_view part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string_view::npos; at = text.find(part, at + part.size())) ++count;
  return count;
}

std::size_t NumCharacters(std::string_view text) {
  return static_cast<std::size_t>(std::ranges::count_if(text, [](char c) { return (c & 0xC0) != 0x80; }));
}

bool Consume(std::string_view* text, std::string_view prefix) {
  if (!text->starts_with(prefix)) return false;
  text->remove_prefix(prefix.size());
  return true;
}

// Drops everything up to and including `marker`.
bool ConsumeThrough(std::string_view* text, std::string_view marker) {
  const std::size_t at = text->find(marker);
  if (at == std::string_view::npos) return false;
  text->remove_prefix(at + marker.size());
  return true;
}

// <reasoning>..</reasoning> <answer>..</answer> and nothing else but space around.
bool HasSoftForm(std::string_view text, std::string_view reasoning, std::string_view answer) {
  text = TrimSpace(text);
  if (!Consume(&text, Open(reasoning)) || !ConsumeThrough(&text, Close(reasoning))) return false;
  text = SkipSpace(text);
  return Consume(&text, Open(answer)) && ConsumeThrough(&text, Close(answer)) && text.empty();
}

// Each tag on a line of its own; a newline after the last is optional, for a completion ends there.
bool HasStrictForm(std::string_view text, std::string_view reasoning, std::string_view answer) {
  if (!Consume(&text, Open(reasoning) + "\n") || !ConsumeThrough(&text, "\n" + Close(reasoning) + "\n")) return false;
  if (!Consume(&text, Open(answer) + "\n") || !ConsumeThrough(&text, "\n" + Close(answer))) return false;
  return text.empty() || text == "\n";
}

void CheckTagName(std::string_view field, std::string_view tag, RewardFaults* faults) {
  const bool is_name = !tag.empty() && tag.size() <= 64 && std::ranges::all_of(tag, [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
  });
  if (!is_name) faults->Add(field, absl::StrCat("'", ToAbsl(tag), "', must be a bare name of 1 to 64 letters, digits, _ and -"));
}

}  // namespace

std::string FoldCase(std::string_view text) {
  std::string folded;
  icu::UnicodeString::fromUTF8(icu::StringPiece(text.data(), static_cast<int>(text.size()))).foldCase().toUTF8String(folded);
  return folded;
}

std::string ToValidUtf8(std::string_view text) {
  std::string valid;
  icu::UnicodeString::fromUTF8(icu::StringPiece(text.data(), static_cast<int>(text.size()))).toUTF8String(valid);
  return valid;
}

std::string_view TrimSpace(std::string_view text) {
  text = SkipSpace(text);
  return text.substr(0, text.find_last_not_of(kSpace) + 1);
}

std::size_t TextPieceEnd(std::string_view text, std::size_t begin, std::size_t limit) {
  if (text.size() - begin <= limit) return text.size();
  std::size_t end = begin + limit;
  while (end > begin + 1 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  return end;
}

std::optional<std::string> LastCodeBlock(std::string_view text, const std::function<bool(std::string_view language)>& is_wanted) {
  std::optional<std::string> last, open;
  std::string language;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end), trimmed = TrimSpace(line);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (!trimmed.starts_with("```")) {
      if (open.has_value()) open->append(line).append("\n");
    } else if (!open.has_value()) {
      open = "";
      language = absl::AsciiStrToLower(ToAbsl(TrimSpace(trimmed.substr(3))));
    } else {
      std::optional<std::string> closed = std::exchange(open, std::nullopt);
      if (is_wanted(language)) last = std::move(closed);
    }
  }
  return last;
}

std::optional<std::string_view> TextInTag(std::string_view text, std::string_view tag) {
  const std::string open = Open(tag);
  const std::size_t end = text.rfind(Close(tag));
  if (end == std::string_view::npos) return std::nullopt;
  const std::size_t begin = text.substr(0, end).rfind(open);
  if (begin == std::string_view::npos) return std::nullopt;
  return text.substr(begin + open.size(), end - begin - open.size());
}

RewardFormula MakeAnswerTags(const v1::AnswerTags& config, RewardFaults* faults) {
  const std::string reasoning = config.reasoning_tag().empty() ? "reasoning" : config.reasoning_tag();
  const std::string answer = config.answer_tag().empty() ? "answer" : config.answer_tag();
  const bool is_strict = config.strictness() == v1::TAG_STRICTNESS_STRICT;
  if (!is_strict && config.strictness() != v1::TAG_STRICTNESS_SOFT) {
    faults->Add("strictness", absl::StrCat(static_cast<int>(config.strictness()), ", must be TAG_STRICTNESS_STRICT or _SOFT"));
  }
  CheckTagName("reasoning_tag", reasoning, faults);
  CheckTagName("answer_tag", answer, faults);
  if (reasoning == answer) faults->Add("answer_tag", absl::StrCat("'", answer, "', must differ from reasoning_tag"));
  return [reasoning, answer, is_strict](const RewardInput& input) -> absl::StatusOr<std::optional<double>> {
    for (const std::string& tag : {Open(reasoning), Close(reasoning), Open(answer), Close(answer)}) {
      if (CountOf(input.completion, tag) != 1) return 0.0;
    }
    const bool holds =
        is_strict ? HasStrictForm(input.completion, reasoning, answer) : HasSoftForm(input.completion, reasoning, answer);
    return holds ? 1.0 : 0.0;
  };
}

RewardFormula MakeIntegerOnly(const v1::IntegerOnly& config, RewardFaults* faults) {
  if (!config.answer_tag().empty()) CheckTagName("answer_tag", config.answer_tag(), faults);
  return [tag = config.answer_tag()](const RewardInput& input) -> absl::StatusOr<std::optional<double>> {
    std::string_view text = input.completion;
    if (!tag.empty()) text = TextInTag(text, tag).value_or(std::string_view());
    text = TrimSpace(text);
    return !text.empty() && std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; }) ? 1.0 : 0.0;
  };
}

RewardFormula MakeTagCount(const v1::TagCount& config, RewardFaults* faults) {
  if (config.tags_size() < 1 || config.tags_size() > 64) {
    faults->Add("tags", absl::StrCat(config.tags_size(), " tags, must be 1 to 64"));
  }
  for (int i = 0; i < config.tags_size(); ++i) {
    const std::string& tag = config.tags(i);
    if (tag.size() > 256 || tag.find('<') == std::string::npos) {
      faults->Add(absl::StrCat("tags[", i, "]"),
                  absl::StrCat("'", tag, "', must be written as it stands in text, such as '</answer>', in at most 256 bytes"));
    }
  }
  if (!std::isfinite(config.trailing_penalty()) || config.trailing_penalty() < 0) {
    faults->Add("trailing_penalty", absl::StrCat(config.trailing_penalty(), ", must be finite and >= 0"));
  }
  const std::vector<std::string> tags(config.tags().begin(), config.tags().end());
  return [tags, penalty = config.trailing_penalty()](const RewardInput& input) -> absl::StatusOr<std::optional<double>> {
    const std::string_view text = input.completion;
    const auto count = std::ranges::count_if(tags, [&](const std::string& tag) { return CountOf(text, tag) == 1; });
    const std::size_t last = text.rfind(tags.back());
    const std::string_view trailing = last == std::string_view::npos ? "" : text.substr(last + tags.back().size());
    const double share = static_cast<double>(count) / static_cast<double>(tags.size());
    return std::max(0.0, share - penalty * static_cast<double>(NumCharacters(trailing)));
  };
}

RewardFormula MakeKeywords(const v1::Keywords& config, RewardFaults* faults) {
  if (config.words_size() < 1 || config.words_size() > 256) {
    faults->Add("words", absl::StrCat(config.words_size(), " words, must be 1 to 256"));
  }
  std::vector<std::string> words;
  for (int i = 0; i < config.words_size(); ++i) {
    const std::string& word = config.words(i);
    if (word.empty() || word.size() > 256) {
      faults->Add(absl::StrCat("words[", i, "]"), absl::StrCat(word.size(), " bytes, must be 1 to 256"));
    }
    words.push_back(config.ignore_case() ? FoldCase(word) : word);
  }
  return [words, ignores_case = config.ignore_case(),
          needs_all = config.all()](const RewardInput& input) -> absl::StatusOr<std::optional<double>> {
    const std::string text = ignores_case ? FoldCase(input.completion) : input.completion;
    const auto found =
        std::ranges::count_if(words, [&](const std::string& word) { return text.find(word) != std::string::npos; });
    const double share = static_cast<double>(found) / static_cast<double>(words.size());
    return needs_all ? (share == 1 ? 1.0 : 0.0) : share;
  };
}

// Soft overlong punishment (Yu et al. 2025, 2503.14476, eq. 13).
RewardFormula MakeLengthReward(const v1::LengthReward& config, RewardFaults* faults) {
  if (config.max_tokens() < 1) faults->Add("max_tokens", absl::StrCat(config.max_tokens(), ", must be >= 1"));
  if (config.cache_tokens() < 1 || config.cache_tokens() > config.max_tokens()) {
    faults->Add("cache_tokens", absl::StrCat(config.cache_tokens(), ", must be 1 to max_tokens = ", config.max_tokens()));
  }
  return [longest = static_cast<double>(config.max_tokens()),
          cache = static_cast<double>(config.cache_tokens())](const RewardInput& input) -> absl::StatusOr<std::optional<double>> {
    const double length = input.completion_tokens, edge = longest - cache;
    if (length <= edge) return 0.0;
    return length <= longest ? (edge - length) / cache : -1.0;
  };
}

}  // namespace tandem

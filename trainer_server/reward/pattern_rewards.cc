#include <algorithm>
#include <cctype>

#include "absl/strings/ascii.h"
#include "trainer_server/reward/bounded_pattern.h"
#include "trainer_server/reward/reward_functions.h"
#include "unicode/uchar.h"
#include "unicode/unistr.h"

namespace tandem {
namespace {

// ---- Multiple choice ---------------------------------------------------------------------------------------------------------

// Whether a letter beside this character is part of a word. Ideographs make no words with Latin letters.
bool JoinsWords(UChar32 c) {
  if (c == '\'' || c == '_' || c == '-' || c == 0x2019) return true;
  return u_isalnum(c) != 0 && u_hasBinaryProperty(c, UCHAR_IDEOGRAPHIC) == 0;
}

icu::UnicodeString Characters(std::string_view utf8) {
  return icu::UnicodeString::fromUTF8(icu::StringPiece(utf8.data(), static_cast<int>(utf8.size())));
}

bool IsChoiceAt(std::string_view text, std::size_t at, int num_choices) {
  if (at >= text.size() || text[at] < 'A' || text[at] >= 'A' + num_choices) return false;
  const icu::UnicodeString before = Characters(text.substr(at - std::min<std::size_t>(at, 4), std::min<std::size_t>(at, 4)));
  const icu::UnicodeString after = Characters(text.substr(at + 1, 4));
  return (before.isEmpty() || !JoinsWords(before.char32At(before.length() - 1))) &&
         (after.isEmpty() || !JoinsWords(after.char32At(0)));
}

// The index of the letter behind the last "answer is" or "answer:" that has one, else of the last letter that stands alone.
std::optional<int> LastChoice(std::string_view text, int num_choices) {
  const std::string lower = absl::AsciiStrToLower(ToAbsl(text));
  constexpr std::string_view kAnswer = "answer";
  for (std::size_t at = lower.rfind(kAnswer); at != std::string::npos;
       at = at == 0 ? std::string::npos : lower.rfind(kAnswer, at - 1)) {
    const std::string_view behind = std::string_view(lower).substr(at + kAnswer.size());
    if (!behind.starts_with(" is") && !behind.starts_with(":")) continue;
    const std::size_t begin = at + kAnswer.size() + (behind.starts_with(":") ? 1 : 3);
    const std::size_t letter = text.substr(0, begin + 32).find_first_not_of(" \t\n:*([{\"'`$", begin);
    if (letter != std::string_view::npos && IsChoiceAt(text, letter, num_choices)) return text[letter] - 'A';
  }
  for (std::size_t i = text.size(); i-- > 0;) {
    if (IsChoiceAt(text, i, num_choices)) return text[i] - 'A';
  }
  return std::nullopt;
}

// ---- E-mail ------------------------------------------------------------------------------------------------------------------

std::vector<std::string> TrimmedLines(std::string_view text) {
  std::vector<std::string> lines;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    if (const std::string_view line = TrimSpace(text.substr(0, end)); !line.empty()) lines.emplace_back(line);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

bool IsSubject(std::string_view line) {
  constexpr std::string_view kSubject = "subject:";
  return absl::AsciiStrToLower(ToAbsl(line)).starts_with(kSubject) && !TrimSpace(line.substr(kSubject.size())).empty();
}

bool IsGreeting(std::string_view line) {
  constexpr std::string_view kGreetings[] = {
      "dear", "hello", "hi", "good morning", "good afternoon", "good evening", "to whom it may concern"};
  if (!line.ends_with(',') && !line.ends_with(':') && !line.ends_with('!')) return false;
  const std::string lower = absl::AsciiStrToLower(ToAbsl(line));
  return std::ranges::any_of(kGreetings, [&](std::string_view greeting) {
    return lower.starts_with(greeting) && std::isalpha(static_cast<unsigned char>(lower[greeting.size()])) == 0;
  });
}

bool IsClosing(std::string_view line) {
  constexpr std::string_view kClosings[] = {"regards",         "best regards",    "kind regards",     "warm regards", "sincerely",
                                            "yours sincerely", "sincerely yours", "yours faithfully", "best wishes",  "best",
                                            "thanks",          "many thanks",     "thank you",        "respectfully", "cheers"};
  std::string lower = absl::AsciiStrToLower(ToAbsl(line));
  if (lower.ends_with(',')) lower.pop_back();
  return std::ranges::find(kClosings, lower) != std::ranges::end(kClosings);
}

// [Your Name], unless it is a link: [text](address).
bool HasPlaceholder(std::string_view line) {
  for (std::size_t open = line.find('['); open != std::string_view::npos; open = line.find('[', open + 1)) {
    const std::size_t close = line.find(']', open);
    if (close == std::string_view::npos) return false;
    if (close > open + 1 && !line.substr(close + 1).starts_with('(')) return true;
  }
  return false;
}

std::size_t NumWords(std::string_view line) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < line.size(); ++i) count += line[i] != ' ' && (i == 0 || line[i - 1] == ' ') ? 1 : 0;
  return count;
}

}  // namespace

RewardFormula MakeMultipleChoice(const v1::MultipleChoice& config, const RewardIdentity& identity, RewardFaults* faults) {
  CheckAnswerField(config.answer_field(), faults);
  if (config.num_choices() < 2 || config.num_choices() > 10) {
    faults->Add("num_choices", absl::StrCat(config.num_choices(), ", must be 2 to 10"));
  }
  return [field = config.answer_field(), num_choices = static_cast<int>(config.num_choices()),
          name = identity.name](const RewardInput& input) -> absl::StatusOr<std::optional<double>> {
    TANDEM_ASSIGN_OR_RETURN(const nlohmann::json* entry, RowField(input, field, name));
    if (entry == nullptr) return std::optional<double>();
    std::int64_t right = -1;
    if (entry->is_number_integer()) right = entry->get<std::int64_t>();
    if (entry->is_string()) {
      const std::string_view text = TrimSpace(entry->get_ref<const std::string&>());
      if (text.size() == 1) right = text[0] - 'A';
    }
    if (right < 0 || right >= num_choices) {
      return RowFieldError(
          field, name,
          absl::StrCat("is ", entry->dump().substr(0, 64), ", must be a letter A to ",
                       std::string(1, static_cast<char>('A' + num_choices - 1)), " or its index 0 to ", num_choices - 1));
    }
    return LastChoice(input.completion, num_choices) == right ? 1.0 : 0.0;
  };
}

RewardFormula MakeRegularExpression(const v1::RegularExpression& config, RewardFaults* faults) {
  const absl::StatusOr<BoundedPattern> pattern = BoundedPattern::Compile(config.pattern());
  if (!pattern.ok()) {
    faults->Add("pattern", std::string(pattern.status().message()));
    return nullptr;
  }
  return [pattern = *pattern, is_full = config.full()](const RewardInput& input) -> absl::StatusOr<std::optional<double>> {
    return pattern.Matches(input.completion, is_full) ? 1.0 : 0.0;
  };
}

RewardFormula MakeEmailChecklist(const v1::EmailChecklist& config, RewardFaults* faults) {
  if (config.min_words() < 1) faults->Add("min_words", absl::StrCat(config.min_words(), ", must be >= 1"));
  if (config.max_words() < config.min_words()) {
    faults->Add("max_words", absl::StrCat(config.max_words(), ", must be >= min_words = ", config.min_words()));
  }
  return [min_words = config.min_words(),
          max_words = config.max_words()](const RewardInput& input) -> absl::StatusOr<std::optional<double>> {
    const std::vector<std::string> lines = TrimmedLines(input.completion);
    const auto greeting = std::ranges::find_if(lines, IsGreeting);
    if (greeting == lines.end()) return !lines.empty() && IsSubject(lines[0]) ? 0.2 : 0.0;
    const auto closing = std::find_if(greeting, lines.end(), IsClosing);
    std::size_t num_words = 0;
    for (auto line = greeting + 1; line < closing; ++line) num_words += NumWords(*line);
    const bool is_closed = closing != lines.end() && closing + 1 != lines.end();
    int points = 1;
    if (IsSubject(lines[0])) ++points;
    if (is_closed) ++points;
    if (is_closed && num_words >= min_words && num_words <= max_words) ++points;
    if (std::ranges::none_of(lines, HasPlaceholder)) ++points;
    return points / 5.0;
  };
}

}  // namespace tandem

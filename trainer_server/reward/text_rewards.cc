#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "trainer_server/reward/reward_functions.h"
#include "unicode/uchar.h"
#include "unicode/unistr.h"
#include "unicode/uscript.h"

namespace tandem {
namespace {

// Words, folded to one case, a space behind each; `begins` has where each begins, and the end of the text.
struct Words {
  std::string text;
  std::vector<std::size_t> begins;
};

Words SplitWords(std::string_view text) {
  const std::string folded = FoldCase(text);
  constexpr std::string_view kSpace = " \t\r\n\f\v";
  Words words;
  std::string_view rest = folded;
  while (true) {
    words.begins.push_back(words.text.size());
    const std::size_t begin = rest.find_first_not_of(kSpace);
    if (begin == std::string_view::npos) return words;
    const std::size_t end = std::min(rest.find_first_of(kSpace, begin), rest.size());
    words.text.append(rest.substr(begin, end - begin)).append(" ");
    rest.remove_prefix(end);
  }
}

}  // namespace

// As the repetition penalty of Yeo et al. 2025, 2502.03373, with the share of repeated n-grams for a rate; its scale is the
// weight.
RewardFormula MakeRepetition(const v1::Repetition& config, RewardFaults* faults) {
  if (config.ngram_size() < 1 || config.ngram_size() > 32) {
    faults->Add("ngram_size", absl::StrCat(config.ngram_size(), ", must be 1 to 32"));
  }
  return
      [size = static_cast<std::size_t>(config.ngram_size())](const RewardInput& input) -> absl::StatusOr<std::optional<double>> {
        const Words words = SplitWords(input.completion);
        if (words.begins.size() <= size) return 0.0;
        const std::size_t num_ngrams = words.begins.size() - size;
        std::unordered_set<std::string_view> distinct;
        for (std::size_t i = 0; i < num_ngrams; ++i) {
          distinct.insert(std::string_view(words.text).substr(words.begins[i], words.begins[i + size] - words.begins[i]));
        }
        return static_cast<double>(distinct.size()) / static_cast<double>(num_ngrams) - 1.0;
      };
}

// Linear in the distance from a wanted length, as in L1 (Aggarwal and Welleck 2025, 2503.04697), bounded below by 0.
RewardFormula MakeLengthTarget(const v1::LengthTarget& config, RewardFaults* faults) {
  if (config.target_tokens() < 1) faults->Add("target_tokens", absl::StrCat(config.target_tokens(), ", must be >= 1"));
  if (config.width_tokens() < 1) faults->Add("width_tokens", absl::StrCat(config.width_tokens(), ", must be >= 1"));
  return [target = static_cast<double>(config.target_tokens()),
          width = static_cast<double>(config.width_tokens())](const RewardInput& input) -> absl::StatusOr<std::optional<double>> {
    return std::max(0.0, 1.0 - std::abs(input.completion_tokens - target) / width);
  };
}

// Language consistency (DeepSeek-AI 2025, 2501.12948, section 2.3.2), by letters and scripts where the paper counts words.
RewardFormula MakeScriptShare(const v1::ScriptShare& config, RewardFaults* faults) {
  if (config.scripts_size() < 1 || config.scripts_size() > 16) {
    faults->Add("scripts", absl::StrCat(config.scripts_size(), " scripts, must be 1 to 16"));
  }
  std::vector<UScriptCode> scripts;
  for (int i = 0; i < config.scripts_size(); ++i) {
    const int script = u_getPropertyValueEnum(UCHAR_SCRIPT, config.scripts(i).c_str());
    if (script <= USCRIPT_INHERITED) {
      faults->Add(absl::StrCat("scripts[", i, "]"),
                  absl::StrCat("'", config.scripts(i), "', must be the name of a Unicode script, as Latin, Cyrillic or Han"));
    }
    scripts.push_back(static_cast<UScriptCode>(script));
  }
  return [scripts](const RewardInput& input) -> absl::StatusOr<std::optional<double>> {
    const icu::UnicodeString text =
        icu::UnicodeString::fromUTF8(icu::StringPiece(input.completion.data(), static_cast<int>(input.completion.size())));
    int num_letters = 0, num_wanted = 0;
    for (int i = 0; i < text.length(); i = text.moveIndex32(i, 1)) {
      const UChar32 letter = text.char32At(i);
      if (u_isalpha(letter) == 0) continue;
      ++num_letters;
      if (std::ranges::any_of(scripts, [&](UScriptCode script) { return uscript_hasScript(letter, script) != 0; })) ++num_wanted;
    }
    return num_letters == 0 ? 0.0 : static_cast<double>(num_wanted) / num_letters;
  };
}

}  // namespace tandem

// The families of reward functions, made from validated parts. Internal to this room: MakeRewardFunction is the entry.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "trainer_server/reward/reward.h"

namespace tandem {

// What every function has.
struct RewardIdentity {
  std::string name;
  double weight = 1;
};

// A function that is a plain formula over its input.
using RewardFormula = std::function<absl::StatusOr<std::optional<double>>(const RewardInput&)>;
std::unique_ptr<RewardFunction> MakeFormulaReward(RewardIdentity identity, std::vector<std::string> required_fields,
                                                  RewardFormula formula);

// Collects "field: value, limit" lines below one path.
class RewardFaults {
 public:
  explicit RewardFaults(std::string path) : path_(std::move(path)) {}
  void Add(std::string_view field, std::string_view text);
  const std::vector<std::string>& lines() const { return lines_; }

 private:
  std::string path_;
  std::vector<std::string> lines_;
};

// Each takes its message, adds its faults, and returns the formula; the caller drops the result when there are faults.
RewardFormula MakeNumericAnswer(const v1::NumericAnswer& config, const RewardIdentity& identity, RewardFaults* faults);
RewardFormula MakeNumericDistance(const v1::NumericDistance& config, const RewardIdentity& identity, RewardFaults* faults);
RewardFormula MakeAnswerTags(const v1::AnswerTags& config, RewardFaults* faults);
RewardFormula MakeIntegerOnly(const v1::IntegerOnly& config, RewardFaults* faults);
RewardFormula MakeTagCount(const v1::TagCount& config, RewardFaults* faults);
RewardFormula MakeKeywords(const v1::Keywords& config, RewardFaults* faults);
RewardFormula MakeLengthReward(const v1::LengthReward& config, RewardFaults* faults);
RewardFormula MakeMathAnswer(const v1::MathAnswer& config, const RewardIdentity& identity, RewardFaults* faults);
RewardFormula MakeMultipleChoice(const v1::MultipleChoice& config, const RewardIdentity& identity, RewardFaults* faults);
RewardFormula MakeRegularExpression(const v1::RegularExpression& config, RewardFaults* faults);
RewardFormula MakeRepetition(const v1::Repetition& config, RewardFaults* faults);
RewardFormula MakeLengthTarget(const v1::LengthTarget& config, RewardFaults* faults);
RewardFormula MakeScriptShare(const v1::ScriptShare& config, RewardFaults* faults);
RewardFormula MakeNumericBands(const v1::NumericBands& config, const RewardIdentity& identity, RewardFaults* faults);
RewardFormula MakeEmailChecklist(const v1::EmailChecklist& config, RewardFaults* faults);
RewardFormula MakeJsonSchema(const v1::JsonSchema& config, const RewardIdentity& identity, RewardFaults* faults);
RewardFormula MakeCosineLength(const v1::CosineLength& config, const RewardIdentity& identity, RewardFaults* faults);

void CheckAnswerField(const std::string& field, RewardFaults* faults);
// The row's field. nullptr: it is null. Errors: INVALID_ARGUMENT (RowFieldError) when there is none.
absl::StatusOr<const nlohmann::json*> RowField(const RewardInput& input, const std::string& field, const std::string& function);
absl::Status RowFieldError(const std::string& field, const std::string& function, std::string_view text);

// Unicode's full case folding.
std::string FoldCase(std::string_view text);

// Text with U+FFFD in place of what is no UTF-8.
std::string ToValidUtf8(std::string_view text);

// Text without the ASCII space around it.
std::string_view TrimSpace(std::string_view text);

// Where a piece of at most `limit` bytes that begins at `begin` ends: between two characters, the text's end at most.
std::size_t TextPieceEnd(std::string_view text, std::size_t begin, std::size_t limit);

// What stands in the last fenced code block that is closed. `is_wanted`: of its language, in lower case.
std::optional<std::string> LastCodeBlock(std::string_view text, const std::function<bool(std::string_view language)>& is_wanted);

// What stands inside the last complete <tag>..</tag>.
std::optional<std::string_view> TextInTag(std::string_view text, std::string_view tag);

}  // namespace tandem

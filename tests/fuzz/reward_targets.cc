// What reward functions read: patterns, schemas, mathematics, rows and completions.
#include <cmath>

#include "common/base/check.h"
#include "google/protobuf/text_format.h"
#include "nlohmann/json.hpp"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"
#include "trainer_server/reward/bounded_pattern.h"
#include "trainer_server/reward/json_schema.h"
#include "trainer_server/reward/math_value.h"
#include "trainer_server/reward/number_text.h"
#include "trainer_server/reward/python_worker.h"
#include "trainer_server/reward/reward.h"

namespace tandem::fuzz {

FuzzTarget PatternTarget() {
  const auto read = [](const std::string& input) {
    const std::vector<std::string> parts = SplitParts(input, 2);
    const auto pattern = BoundedPattern::Compile(parts[0]);
    if (!pattern.ok()) return;
    pattern->Matches(parts[1], /*is_full=*/false);
    pattern->Matches(parts[1], /*is_full=*/true);
  };
  return {.read = read,
          .seeds = {JoinParts({"(a+)+$", std::string(64, 'a') + "b"}),
                    JoinParts({"(?s)<think>(?!.*<think>).*?</think>.*", "<think>a</think>b"}),
                    JoinParts({"^(?:[A-Z]\\p{Ll}+ ?){2,8}\\b", "Ada Lovelace \xc3\xa9"}),
                    JoinParts({"(?<=a|bc)\\d{1,3}(?=x)", "a12x"})},
          .words = {"(?",          "(?=",    "(?<!", "(?R)",        "(?1)",  "(?>",     "(*",        "\\Q",
                    "\\E",         "\\p{L}", "\\X",  "\\K",         "\\R",   "{1000,}", "++",        "*?",
                    "[[:alpha:]]", "|",      "(?C",  "\\x{10ffff}", "(?<n>", "(?i)",    "(*ACCEPT)", "(*COMMIT)"}};
}

FuzzTarget JsonSchemaTarget() {
  const auto read = [](const std::string& input) {
    const std::vector<std::string> parts = SplitParts(input, 2);
    nlohmann::json schema = ParseJson(parts[0]);
    if (schema.is_discarded()) return;
    const auto validator = JsonSchemaValidator::Create(std::move(schema));
    const nlohmann::json value = ParseJson(parts[1]);
    if (validator.ok() && !value.is_discarded()) validator->Holds(value);
  };
  return {
      .read = read,
      .seeds =
          {JoinParts(
               {R"({"type": "object", "required": ["a"], "properties": {"a": {"type": "integer", "minimum": 1, "multipleOf": 2}},
                           "additionalProperties": false})",
                R"({"a": 4})"}),
           JoinParts(
               {R"({"$defs": {"t": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/t"}, "uniqueItems": true}, {"const": 1}]}},
                           "$ref": "#/$defs/t"})",
                "[[1], []]"}),
           JoinParts(
               {R"({"oneOf": [{"type": "string", "pattern": "^a+$", "maxLength": 5}, {"enum": [null, 1.5]}], "not": {"const": "aa"}})",
                "\"aaa\""})},
      .words = {"\"type\"",
                "\"$ref\"",
                "\"#/$defs/t\"",
                "\"#\"",
                "\"allOf\"",
                "\"anyOf\"",
                "\"oneOf\"",
                "\"not\"",
                "\"items\"",
                "\"prefixItems\"",
                "\"properties\"",
                "\"pattern\"",
                "\"multipleOf\"",
                "\"enum\"",
                "\"minLength\"",
                "\"maxProperties\"",
                "\"exclusiveMinimum\"",
                "1e-300",
                "1e308",
                "-0.0",
                "18446744073709551615",
                "[[[[",
                "\\ud800"}};
}

FuzzTarget MathValueTarget() {
  const auto read = [](const std::string& input) {
    const std::vector<std::string> parts = SplitParts(input, 2);
    const std::string plain = PlainMath(parts[0]);
    const auto a = ParseMathValue(plain), b = FindLastMathValue(PlainMath(parts[1]));
    if (a.has_value()) TANDEM_CHECK(IsSameValue(*a, *a, 0), plain);
    if (a.has_value() && b.has_value()) {
      TANDEM_CHECK(IsSameValue(*a, *b, 0) == IsSameValue(*b, *a, 0), input);
      IsSameValue(*a, *b, 0.01);
    }
    TextInBox(parts[0]);
    const auto last = FindLastNumber(parts[0]), leading = LeadingNumber(parts[1]);
    if (last.has_value() && leading.has_value()) IsSameNumber(*last, *leading, 0.5);
  };
  return {.read = read,
          .seeds = {JoinParts({"\\frac{3}{4}", "so it is $0.75$"}), JoinParts({"1,234.50", "\\boxed{1\\frac12}"}),
                    JoinParts({"-25\\%", "x = \\dfrac{-1}{4}"}), JoinParts({"\\text{12} cm", "1 1/2"})},
          .words = {"\\frac", "\\dfrac", "\\boxed{", "\\left", "\\text{", "{,}", "\\%", "$", "1/0", "00", "-",
                    "9999999999999999999", ".", "e308"}};
}

FuzzTarget RewardFunctionTarget() {
  const auto read = [](const std::string& input) {
    const std::vector<std::string> parts = SplitParts(input, 3);
    v1::RewardConfig config;
    google::protobuf::TextFormat::Parser parser;
    google::protobuf::io::ErrorCollector* const silent = nullptr;
    parser.RecordErrorsTo(silent);
    parser.SetRecursionLimit(32);
    if (!parser.ParseFromString(parts[0], &config)) return;
    if (config.has_python_function() || config.has_remote() || config.has_code_tests()) return;  // those leave this process
    const auto function = MakeRewardFunction(config, "rewards[0].");
    if (!function.ok()) return;
    const nlohmann::json row = ParseJson(parts[1]);
    RewardInput completion{.row = &row, .completion = parts[2], .completion_tokens = 5};
    completion.token_ids = {1, 2, 3, 1, 2};
    (*function)->Score({&completion, 1}, {}).IgnoreError();
  };
  FuzzTarget target{.read = read, .seeds = {}, .words = {}};
  const std::string row = R"({"answer": 42, "letter": "B", "text": "#### 1,000", "schema": {"type": "integer"}, "none": null})";
  for (const char* config :
       {"numeric_answer { answer_field: 'text' answer_marker: '####' tolerance: 0.1 in_tags: true }",
        "numeric_distance { answer_field: 'answer' scale: 2 }", "answer_tags { strictness: TAG_STRICTNESS_STRICT }",
        "integer_only { answer_tag: 'answer' }", "tag_count { tags: '<a>' tags: '</a>' trailing_penalty: 0.001 }",
        "keywords { words: 'Stra\303\237e' ignore_case: true }", "length { max_tokens: 10 cache_tokens: 4 }",
        "math_answer { answer_field: 'answer' units: 'cm' }", "multiple_choice { answer_field: 'letter' num_choices: 4 }",
        "regular_expression { pattern: '[0-9]+' full: true }", "repetition { ngram_size: 2 }", "length_target { target: 3 }",
        "script_share { script: 'Latin' }", "numeric_bands { answer_field: 'answer' bands { relative_error: 0.1 reward: 0.5 } }",
        "email_checklist { min_words: 1 max_words: 50 }", "json_schema { schema_field: 'schema' }",
        "cosine_length { answer { answer_field: 'answer' } max_tokens: 10 }"}) {
    target.seeds.push_back(
        JoinParts({absl::StrCat("weight: 1 ", config), row,
                   "Subject: hi\nDear Ada,\n<answer>\\boxed{42}</answer>\n```json\n7\n```\nThe answer is B\nBest,\nBob"}));
  }
  const auto* const config = v1::RewardConfig::descriptor();
  for (int i = 0; i < config->field_count(); ++i) {
    target.words.push_back(config->field(i)->name() + " {");
    const auto* const inner = config->field(i)->message_type();
    for (int k = 0; inner != nullptr && k < inner->field_count(); ++k) target.words.push_back(inner->field(k)->name() + ":");
  }
  for (const char* word :
       {"nan", "inf", "-1", "4294967295", "1e308", "\"\\377\"", "<answer>", "</answer>", "\\boxed{", "```", "null"}) {
    target.words.push_back(word);
  }
  return target;
}

FuzzTarget WorkerAnswerTarget() {
  const auto read = [](const std::string& input) {
    const auto answer = ReadAnswer(input, 3);
    if (!answer.ok()) return;
    TANDEM_CHECK(answer->values.size() == 3, answer->values.size());
    for (const auto& value : answer->values) TANDEM_CHECK(!value.has_value() || std::isfinite(*value), input);
    for (const auto& [completion, fault] : answer->faults) {
      TANDEM_CHECK(completion < 3 && !answer->values[completion].has_value(), input);
    }
  };
  return {.read = read,
          .seeds = {R"({"values": [1, null, -0.5], "faults": {}})", R"({"values": [0, 1, 2], "faults": {"1": "no number"}})",
                    R"({"error": "ValueError: no such column"})", R"({})"},
          .words = {"\"values\"", "\"faults\"", "\"error\"", "null", "1e999", "-0.0", "18446744073709551615", "\\ud800", "true"}};
}

}  // namespace tandem::fuzz

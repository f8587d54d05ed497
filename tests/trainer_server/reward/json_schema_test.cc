#include "trainer_server/reward/json_schema.h"

#include <cmath>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/trainer_server/reward/reward_testing.h"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Case {
  const char* schema;
  std::vector<const char*> good, bad;
};

TEST(JsonSchemaTest, EachKeywordHoldsAndFails) {
  const Case cases[] = {
      {R"({})", {"1", "null", "[]"}, {}},
      {R"(false)", {}, {"1", "null"}},
      {R"({"type": "integer"})", {"1", "1.0", "-3"}, {"1.5", "\"1\"", "true", "null"}},
      {R"({"type": "number"})", {"1", "1.5e3"}, {"\"1\"", "true"}},
      {R"({"type": ["string", "null"]})", {"\"a\"", "null"}, {"1", "[]"}},
      {R"({"type": "boolean"})", {"true"}, {"0", "\"true\""}},
      {R"({"enum": ["a", 1, null]})", {"\"a\"", "1", "1.0", "null"}, {"\"b\"", "2", "false"}},
      {R"({"const": {"a": [1]}})", {"{\"a\": [1]}"}, {"{\"a\": [2]}", "{}"}},
      {R"({"properties": {"a": {"type": "integer"}}, "required": ["a"]})",
       {"{\"a\": 1}", "{\"a\": 1, \"b\": 2}", "3"},
       {"{}", "{\"a\": \"1\"}"}},
      {R"({"properties": {"a": {}}, "additionalProperties": false})", {"{\"a\": 1}", "{}"}, {"{\"b\": 1}"}},
      {R"({"additionalProperties": {"type": "string"}})", {"{\"b\": \"x\"}"}, {"{\"b\": 1}"}},
      {R"({"minProperties": 1, "maxProperties": 2})", {"{\"a\": 1}"}, {"{}", "{\"a\": 1, \"b\": 1, \"c\": 1}"}},
      {R"({"items": {"type": "integer"}, "minItems": 1, "maxItems": 2})", {"[1]", "[1, 2]"}, {"[]", "[1, 2, 3]", "[\"a\"]"}},
      {R"({"prefixItems": [{"type": "string"}], "items": {"type": "integer"}})", {"[\"a\", 1]", "[]"}, {"[1]", "[\"a\", \"b\"]"}},
      {R"({"uniqueItems": true})", {"[1, 2]", "[]", "[[1], [2]]"}, {"[1, 1]", "[{\"a\": 1}, {\"a\": 1}]"}},
      {R"({"minLength": 2, "maxLength": 3})", {"\"ab\"", "\"\u00e4\u00f6\u00fc\"", "7"}, {"\"a\"", "\"abcd\""}},
      {R"({"pattern": "^[a-z]+$"})", {"\"abc\""}, {"\"a1\"", "\"\""}},
      {R"({"minimum": 1, "exclusiveMaximum": 2})", {"1", "1.99", "\"text\""}, {"0.5", "2"}},
      {R"({"exclusiveMinimum": 1, "maximum": 2, "multipleOf": 0.1})", {"1.1", "2"}, {"1", "1.15", "2.1"}},
      {R"({"allOf": [{"minimum": 1}, {"maximum": 2}]})", {"1"}, {"0", "3"}},
      {R"({"anyOf": [{"type": "string"}, {"minimum": 5}]})", {"\"a\"", "6"}, {"4"}},
      {R"({"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]})", {"2", "3"}, {"6", "5"}},
      {R"({"not": {"type": "null"}})", {"1"}, {"null"}},
      {R"({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}}})",
       {"{\"next\": {\"next\": {}}}"},
       {"{\"next\": {\"next\": 1}}"}},
      {R"({"title": "x", "description": "y", "format": "date", "default": 1, "examples": [1], "$schema": "z", "$comment": "c"})",
       {"1"},
       {}},
      {R"({"$ref": "#"})", {}, {"1"}},
  };
  for (const Case& entry : cases) {
    const auto schema = JsonSchemaValidator::Create(Json::parse(entry.schema));
    ASSERT_TRUE(schema.ok()) << entry.schema << schema.status();
    for (const char* good : entry.good) EXPECT_TRUE(schema->Holds(Json::parse(good))) << entry.schema << " of " << good;
    for (const char* bad : entry.bad) EXPECT_FALSE(schema->Holds(Json::parse(bad))) << entry.schema << " of " << bad;
  }
}

TEST(JsonSchemaTest, FaultySchemasAreRefusedWithTheirPlace) {
  const std::pair<const char*, const char*> cases[] = {
      {R"(3)", "#: is of type number, must be a schema"},
      {R"({"type": "text"})", "#/type: \"text\", must be null, boolean"},
      {R"({"properties": {"a": {"minimum": "1"}}})", "#/properties/a/minimum: must be a number"},
      {R"({"items": {"pattern": "("}})", "#/items/pattern: '(', fails at byte 1"},
      {R"({"minItems": -1})", "#/minItems: must be a count"},
      {R"({"anyOf": []})", "#/anyOf: must be an array of schemas"},
      {R"({"$ref": "other.json"})", "#/$ref: \"other.json\", must point into the same schema"},
      {R"({"$ref": "#/absent"})", "must point into the same schema"},
      {R"({"$ref": "#/default", "default": {"type": 5}})", "#/$ref: must point to a schema"},
      {R"({"items": {"$ref": "#/const"}, "const": {"pattern": "a"}})", "#/items/$ref: must point to a schema"},
      {R"({"$ref": "#/anyOf", "anyOf": [true]})", "#/$ref: must point to a schema"},
      {R"({"patternProperties": {}})", "#/patternProperties: is no keyword that this function knows"},
      {R"({"required": [1]})", "#/required: must be an array of names"},
      {R"({"multipleOf": 0})", "#/multipleOf: must be a number, of multipleOf above 0"},
  };
  for (const auto& [schema, said] : cases) {
    EXPECT_THAT(std::string(JsonSchemaValidator::Create(Json::parse(schema)).status().message()), HasSubstr(said)) << schema;
  }
}

TEST(JsonSchemaTest, WorkIsBounded) {
  const std::string branching = R"({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]})";
  EXPECT_FALSE(JsonSchemaValidator::Create(Json::parse(branching))->Holds(1));
  const auto function = Make(R"(json_schema { schema: '{"type": "array"}' })");
  EXPECT_EQ(Score(*function, std::string(100'000, '[')), 0);
  EXPECT_EQ(Score(*function, std::string(100, '[') + std::string(100, ']')), 0) << "deeper than 64";
  const auto pattern = Make(R"(json_schema { schema: '{"pattern": "^(a+)+$"}' })");
  EXPECT_EQ(Score(*pattern, "\"" + std::string(50'000, 'a') + "b\""), 0);
}

TEST(JsonSchemaRewardTest, LooksInTagBlockOrAll) {
  const std::string schema = R"(schema: '{"type": "object", "required": ["a"]}')";
  const auto plain = Make("json_schema { " + schema + " }");
  EXPECT_EQ(Score(*plain, " {\"a\": 1}\n"), 1);
  EXPECT_EQ(Score(*plain, "It is {\"a\": 1}"), 0);
  EXPECT_EQ(Score(*plain, "It is\n```json\n{\"a\": 1}\n```\nas asked"), 1);
  EXPECT_EQ(Score(*plain, "```json\n{\"a\": 1}\n```\n```\n{}\n```"), 0) << "the last block counts";
  EXPECT_EQ(Score(*plain, "{\"a\": 1,}"), 0);
  EXPECT_EQ(Score(*plain, ""), 0);
  const auto tagged = Make("json_schema { tag: 'answer' " + schema + " }");
  EXPECT_EQ(Score(*tagged, "<answer>{\"a\": 1}</answer> {}"), 1);
  EXPECT_EQ(Score(*tagged, "{\"a\": 1}"), 0);
  const auto of_row = Make("name: 'shape' json_schema { schema_field: 'schema' }");
  EXPECT_THAT(of_row->required_fields(), ElementsAre("schema"));
  EXPECT_EQ(Score(*of_row, "3", {{"schema", {{"type", "integer"}}}}), 1);
  EXPECT_EQ(Score(*of_row, "3", {{"schema", "{\"type\": \"string\"}"}}), 0);
  EXPECT_FALSE(ScoreRow(*of_row, {{"schema", nullptr}}, "3")->has_value());
  EXPECT_THAT(std::string(ScoreRow(*of_row, {{"schema", "{"}}, "3").status().message()),
              HasSubstr("reward function 'shape': row field 'schema' is no schema: #: is of type discarded"));
  EXPECT_THAT(Faults("weight: 1 json_schema {}"),
              HasSubstr("rewards[2].json_schema.schema: must be given, or else schema_field"));
  EXPECT_THAT(Faults("weight: 1 json_schema { schema: '{' }"),
              HasSubstr("json_schema.schema: is no JSON of at most 65536 bytes"));
  EXPECT_THAT(Faults(R"(weight: 1 json_schema { schema: '{"typ": 1}' })"), HasSubstr("json_schema.schema: #/typ: is no keyword"));
}

TEST(CosineLengthTest, RunsFromShortToLongAlongHalfACosine) {
  const auto function = Make("cosine_length { answer { answer_field: 'answer' } max_tokens: 100 truncated: -2 }");
  const Json row = {{"answer", "1/2"}};
  const auto score = [&](const char* completion, int tokens, bool is_truncated = false) {
    const RewardInput input{.row = &row, .completion = completion, .completion_tokens = tokens, .is_truncated = is_truncated};
    return function->Score({&input, 1}, {})->at(0).value();
  };
  // As Open-R1's cosine scaled reward: correct 1 to 0.5, wrong -1 to -0.5.
  EXPECT_DOUBLE_EQ(score("0.5", 0), 1);
  EXPECT_DOUBLE_EQ(score("0.5", 50), 0.75);
  EXPECT_DOUBLE_EQ(score("0.5", 25), 0.5 + 0.25 * (1 + std::sqrt(0.5)));
  EXPECT_DOUBLE_EQ(score("0.5", 100), 0.5);
  EXPECT_DOUBLE_EQ(score("0.5", 900), 0.5);
  EXPECT_DOUBLE_EQ(score("3", 0), -1);
  EXPECT_DOUBLE_EQ(score("3", 50), -0.75);
  EXPECT_DOUBLE_EQ(score("3", 100), -0.5);
  EXPECT_DOUBLE_EQ(score("0.5", 50, true), -2);
  EXPECT_FALSE(ScoreRow(*function, {{"answer", nullptr}}, "3")->has_value());
  EXPECT_EQ(Faults("weight: 1 cosine_length { wrong_long: nan }"),
            "rewards[2].cosine_length.answer_field: empty, must name a field of the data set's rows\n"
            "rewards[2].cosine_length.max_tokens: 0, must be >= 1\nrewards[2].cosine_length.wrong_long: nan, must be finite");
}

}  // namespace
}  // namespace tandem

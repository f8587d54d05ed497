// JSON Schema, the part of draft 2020-12 that tells the shape of an answer. No library that Debian 12 has matches patterns in
// bounded work, which text of a model demands. Immutable; thread-safe.
//
// Keywords: type, enum, const; properties, required, additionalProperties, minProperties, maxProperties; items, prefixItems,
// minItems, maxItems, uniqueItems; minLength, maxLength, pattern; minimum, maximum, exclusiveMinimum, exclusiveMaximum,
// multipleOf; allOf, anyOf, oneOf, not; $ref to #/.. of the same schema, $defs, definitions. Annotations (title, description,
// default, examples, format, $schema, $id, $comment) say nothing. Others are errors.
#pragma once

#include <map>
#include <string>

#include "common/base/status.h"
#include "nlohmann/json.hpp"
#include "trainer_server/reward/bounded_pattern.h"

namespace tandem {

class JsonSchemaValidator {
 public:
  // Errors: INVALID_ARGUMENT naming the place ("#/properties/age/type") and what is wrong there.
  static absl::StatusOr<JsonSchemaValidator> Create(nlohmann::json schema);
  // False too where it takes more than a million looks, or goes deeper than 128: a schema may refer to itself.
  bool Holds(const nlohmann::json& value) const;

 private:
  struct Checked;
  struct Walk;
  JsonSchemaValidator() = default;
  absl::Status Check(const nlohmann::json& schema, const std::string& place, int depth, Checked* checked);
  absl::Status CheckKeyword(const std::string& keyword, const nlohmann::json& value, const std::string& place, int depth,
                            Checked* checked);
  bool Holds(const nlohmann::json& schema, const nlohmann::json& value, int depth, Walk* walk) const;
  bool HoldsOfObject(const nlohmann::json& schema, const nlohmann::json& value, int depth, Walk* walk) const;
  bool HoldsOfArray(const nlohmann::json& schema, const nlohmann::json& value, int depth, Walk* walk) const;
  bool HoldsOfText(const nlohmann::json& schema, const std::string& text) const;

  nlohmann::json schema_;
  std::map<std::string, BoundedPattern> patterns_;
};

// A JSON text, nested at most 64 deep; discarded() where it is none.
nlohmann::json ParseJson(std::string_view text);

}  // namespace tandem

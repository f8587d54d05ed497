#include "trainer_server/reward/json_schema.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <utility>
#include <vector>

#include "trainer_server/reward/reward_functions.h"

namespace tandem {
namespace {

using Json = nlohmann::json;

constexpr int kMaxParsedDepth = 64, kMaxDepth = 128;
constexpr int kMaxLooks = 1'000'000;
constexpr std::size_t kMaxSchemaBytes = 64 << 10;

constexpr std::array kTypes = {"null", "boolean", "integer", "number", "string", "array", "object"};
constexpr std::array kAnnotations = {"title", "description", "default", "examples", "format", "$schema", "$id", "$comment"};
constexpr std::array kCounts = {"minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength"};
constexpr std::array kBounds = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"};

bool IsOneOf(const std::string& word, std::span<const char* const> words) {
  return std::ranges::any_of(words, [&](const char* known) { return word == known; });
}

bool IsInteger(const Json& value) {
  return value.is_number_integer() || (value.is_number_float() && std::trunc(value.get<double>()) == value.get<double>());
}

bool IsOfType(const Json& value, const std::string& type) {
  if (type == "integer") return IsInteger(value);
  if (type == "number") return value.is_number();
  return type == value.type_name();
}

absl::Status Fault(const std::string& place, const std::string& text) {
  return absl::InvalidArgumentError(absl::StrCat(place, ": ", text));
}

// Characters of UTF-8 text.
std::size_t NumCharacters(std::string_view text) {
  return static_cast<std::size_t>(std::ranges::count_if(text, [](char c) { return (c & 0xC0) != 0x80; }));
}

// Whether a count is within "min" + what and "max" + what.
bool IsWithin(const Json& schema, const std::string& what, std::size_t count) {
  const auto least = schema.find("min" + what), most = schema.find("max" + what);
  return (least == schema.end() || count >= least->get<std::uint64_t>()) &&
         (most == schema.end() || count <= most->get<std::uint64_t>());
}

bool HoldsOfNumber(const Json& schema, double number) {
  const auto bound = [&](const char* keyword) {
    const auto found = schema.find(keyword);
    return found == schema.end() ? std::optional<double>() : found->get<double>();
  };
  if (const auto least = bound("minimum"); least.has_value() && number < *least) return false;
  if (const auto most = bound("maximum"); most.has_value() && number > *most) return false;
  if (const auto least = bound("exclusiveMinimum"); least.has_value() && number <= *least) return false;
  if (const auto most = bound("exclusiveMaximum"); most.has_value() && number >= *most) return false;
  if (const auto step = bound("multipleOf"); step.has_value()) {
    const double quotient = number / *step;
    return std::abs(quotient - std::round(quotient)) <= 1e-9 * std::max(1.0, std::abs(quotient));
  }
  return true;
}

}  // namespace

struct JsonSchemaValidator::Checked {
  std::set<const Json*> schemas;
  std::vector<std::pair<std::string, const Json*>> references;  // place, what it points to
};

struct JsonSchemaValidator::Walk {
  int looks = 0;
};

Json ParseJson(std::string_view text) {
  bool is_too_deep = false;
  Json value = Json::parse(
      text,
      [&](int depth, Json::parse_event_t, Json&) {
        is_too_deep = is_too_deep || depth > kMaxParsedDepth;
        return !is_too_deep;
      },
      /*allow_exceptions=*/false);
  return is_too_deep ? Json(Json::value_t::discarded) : value;
}

absl::StatusOr<JsonSchemaValidator> JsonSchemaValidator::Create(Json schema) {
  JsonSchemaValidator validator;
  validator.schema_ = std::move(schema);
  Checked checked;
  TANDEM_RETURN_IF_ERROR(validator.Check(validator.schema_, "#", 0, &checked));
  for (const auto& [place, target] : checked.references) {
    if (!checked.schemas.contains(target)) return Fault(place, "must point to a schema, as #/$defs/name");
  }
  return validator;
}

absl::Status JsonSchemaValidator::Check(const Json& schema, const std::string& place, int depth, Checked* checked) {
  checked->schemas.insert(&schema);
  if (schema.is_boolean()) return absl::OkStatus();
  if (!schema.is_object())
    return Fault(place, absl::StrCat("is of type ", schema.type_name(), ", must be a schema: an object or a boolean"));
  if (depth > kMaxParsedDepth) return Fault(place, absl::StrCat("lies deeper than ", kMaxParsedDepth));
  for (const auto& [keyword, value] : schema.items()) {
    TANDEM_RETURN_IF_ERROR(CheckKeyword(keyword, value, absl::StrCat(place, "/", keyword), depth, checked));
  }
  return absl::OkStatus();
}

absl::Status JsonSchemaValidator::CheckKeyword(const std::string& keyword, const Json& value, const std::string& place, int depth,
                                               Checked* checked) {
  if (IsOneOf(keyword, kAnnotations) || keyword == "const") return absl::OkStatus();
  if (keyword == "type") {
    const Json types = value.is_array() ? value : Json::array({value});
    for (const Json& type : types) {
      if (!type.is_string() || !IsOneOf(type.get<std::string>(), kTypes)) {
        return Fault(
            place, absl::StrCat(type.dump().substr(0, 64), ", must be null, boolean, integer, number, string, array or object"));
      }
    }
    return absl::OkStatus();
  }
  if (keyword == "enum") return value.is_array() ? absl::OkStatus() : Fault(place, "must be an array");
  if (keyword == "uniqueItems") return value.is_boolean() ? absl::OkStatus() : Fault(place, "must be a boolean");
  if (IsOneOf(keyword, kCounts)) return value.is_number_unsigned() ? absl::OkStatus() : Fault(place, "must be a count");
  if (IsOneOf(keyword, kBounds)) {
    const bool is_good = value.is_number() && (keyword != "multipleOf" || value.get<double>() > 0);
    return is_good ? absl::OkStatus() : Fault(place, "must be a number, of multipleOf above 0");
  }
  if (keyword == "required") {
    const bool is_good = value.is_array() && std::ranges::all_of(value, [](const Json& name) { return name.is_string(); });
    return is_good ? absl::OkStatus() : Fault(place, "must be an array of names");
  }
  if (keyword == "pattern") {
    if (!value.is_string()) return Fault(place, "must be text");
    auto pattern = BoundedPattern::Compile(value.get<std::string>());
    if (!pattern.ok()) return Fault(place, std::string(pattern.status().message()));
    patterns_.insert_or_assign(value.get<std::string>(), *std::move(pattern));
    return absl::OkStatus();
  }
  if (keyword == "$ref") {
    const std::string reference = value.is_string() ? value.get<std::string>() : "";
    try {
      if (reference.starts_with('#') && schema_.contains(Json::json_pointer(reference.substr(1)))) {
        checked->references.emplace_back(place, &std::as_const(schema_).at(Json::json_pointer(reference.substr(1))));
        return absl::OkStatus();
      }
    } catch (const Json::exception&) {}
    return Fault(place, absl::StrCat(value.dump().substr(0, 80), ", must point into the same schema, as #/$defs/name"));
  }
  if (keyword == "properties" || keyword == "$defs" || keyword == "definitions") {
    if (!value.is_object()) return Fault(place, "must be an object of schemas");
    for (const auto& [name, schema] : value.items())
      TANDEM_RETURN_IF_ERROR(Check(schema, absl::StrCat(place, "/", name), depth + 1, checked));
    return absl::OkStatus();
  }
  if (keyword == "allOf" || keyword == "anyOf" || keyword == "oneOf" || keyword == "prefixItems") {
    if (!value.is_array() || value.empty()) return Fault(place, "must be an array of schemas");
    for (std::size_t i = 0; i < value.size(); ++i)
      TANDEM_RETURN_IF_ERROR(Check(value[i], absl::StrCat(place, "/", i), depth + 1, checked));
    return absl::OkStatus();
  }
  if (keyword == "not" || keyword == "items" || keyword == "additionalProperties") return Check(value, place, depth + 1, checked);
  return Fault(place, "is no keyword that this function knows");
}

bool JsonSchemaValidator::Holds(const Json& value) const {
  Walk walk;
  return Holds(schema_, value, 0, &walk);
}

bool JsonSchemaValidator::Holds(const Json& schema, const Json& value, int depth, Walk* walk) const {
  if (++walk->looks > kMaxLooks || depth > kMaxDepth) return false;
  if (schema.is_boolean()) return schema.get<bool>();
  const auto holds = [&](const Json& other) { return Holds(other, value, depth + 1, walk); };
  if (const auto type = schema.find("type"); type != schema.end()) {
    const Json types = type->is_array() ? *type : Json::array({*type});
    if (std::ranges::none_of(types, [&](const Json& name) { return IsOfType(value, name.get<std::string>()); })) return false;
  }
  if (const auto one = schema.find("const"); one != schema.end() && *one != value) return false;
  if (const auto some = schema.find("enum"); some != schema.end() && std::ranges::find(*some, value) == some->end()) return false;
  if (const auto reference = schema.find("$ref"); reference != schema.end()) {
    if (!holds(schema_.at(Json::json_pointer(reference->get<std::string>().substr(1))))) return false;
  }
  if (const auto all = schema.find("allOf"); all != schema.end() && !std::ranges::all_of(*all, holds)) return false;
  if (const auto any = schema.find("anyOf"); any != schema.end() && std::ranges::none_of(*any, holds)) return false;
  if (const auto one = schema.find("oneOf"); one != schema.end() && std::ranges::count_if(*one, holds) != 1) return false;
  // What could not be looked at does not hold, nor does its contrary.
  if (const auto other = schema.find("not"); other != schema.end() && (holds(*other) || walk->looks > kMaxLooks)) return false;
  if (value.is_object()) return HoldsOfObject(schema, value, depth, walk);
  if (value.is_array()) return HoldsOfArray(schema, value, depth, walk);
  if (value.is_string()) return HoldsOfText(schema, value.get_ref<const std::string&>());
  return !value.is_number() || HoldsOfNumber(schema, value.get<double>());
}

bool JsonSchemaValidator::HoldsOfObject(const Json& schema, const Json& value, int depth, Walk* walk) const {
  if (!IsWithin(schema, "Properties", value.size())) return false;
  if (const auto names = schema.find("required"); names != schema.end()) {
    if (!std::ranges::all_of(*names, [&](const Json& name) { return value.contains(name.get<std::string>()); })) return false;
  }
  const auto properties = schema.find("properties"), others = schema.find("additionalProperties");
  for (const auto& [name, member] : value.items()) {
    const bool is_known = properties != schema.end() && properties->contains(name);
    if (is_known && !Holds((*properties)[name], member, depth + 1, walk)) return false;
    if (!is_known && others != schema.end() && !Holds(*others, member, depth + 1, walk)) return false;
  }
  return true;
}

bool JsonSchemaValidator::HoldsOfArray(const Json& schema, const Json& value, int depth, Walk* walk) const {
  if (!IsWithin(schema, "Items", value.size())) return false;
  if (const auto unique = schema.find("uniqueItems"); unique != schema.end() && unique->get<bool>()) {
    std::vector<Json> sorted(value.begin(), value.end());
    std::ranges::sort(sorted);
    if (std::ranges::adjacent_find(sorted) != sorted.end()) return false;
  }
  const auto first = schema.find("prefixItems"), others = schema.find("items");
  const std::size_t num_first = first == schema.end() ? 0 : first->size();
  for (std::size_t i = 0; i < value.size(); ++i) {
    if (i < num_first && !Holds((*first)[i], value[i], depth + 1, walk)) return false;
    if (i >= num_first && others != schema.end() && !Holds(*others, value[i], depth + 1, walk)) return false;
  }
  return true;
}

bool JsonSchemaValidator::HoldsOfText(const Json& schema, const std::string& text) const {
  if (!IsWithin(schema, "Length", NumCharacters(text))) return false;
  const auto pattern = schema.find("pattern");
  return pattern == schema.end() || patterns_.at(pattern->get<std::string>()).Matches(text, /*is_full=*/false);
}

RewardFormula MakeJsonSchema(const v1::JsonSchema& config, const RewardIdentity& identity, RewardFaults* faults) {
  if (config.schema().empty() == config.schema_field().empty()) {
    faults->Add("schema", "must be given, or else schema_field, and not both");
    return nullptr;
  }
  if (config.tag().size() > 64) faults->Add("tag", absl::StrCat(config.tag().size(), " bytes, must be at most 64"));
  std::shared_ptr<const JsonSchemaValidator> of_job;
  if (!config.schema().empty()) {
    const Json schema = config.schema().size() <= kMaxSchemaBytes ? ParseJson(config.schema()) : Json(Json::value_t::discarded);
    auto made = schema.is_discarded() ? absl::InvalidArgumentError(absl::StrCat("is no JSON of at most ", kMaxSchemaBytes,
                                                                                " bytes and ", kMaxParsedDepth, " levels"))
                                      : JsonSchemaValidator::Create(schema);
    if (!made.ok()) {
      faults->Add("schema", std::string(made.status().message()));
      return nullptr;
    }
    of_job = std::make_shared<const JsonSchemaValidator>(*std::move(made));
  }
  return [of_job, field = config.schema_field(), tag = config.tag(),
          name = identity.name](const RewardInput& input) -> absl::StatusOr<std::optional<double>> {
    std::shared_ptr<const JsonSchemaValidator> schema = of_job;
    if (schema == nullptr) {
      TANDEM_ASSIGN_OR_RETURN(const Json* entry, RowField(input, field, name));
      if (entry == nullptr) return std::optional<double>();
      auto made = JsonSchemaValidator::Create(entry->is_string() ? ParseJson(entry->get_ref<const std::string&>()) : *entry);
      if (!made.ok()) return RowFieldError(field, name, absl::StrCat("is no schema: ", made.status().message()));
      schema = std::make_shared<const JsonSchemaValidator>(*std::move(made));
    }
    std::string text = input.completion;
    if (!tag.empty()) {
      const auto inside = TextInTag(input.completion, tag);
      if (!inside.has_value()) return 0.0;
      text = *inside;
    } else if (auto block = LastCodeBlock(input.completion,
                                          [](std::string_view language) { return language.empty() || language == "json"; })) {
      text = *std::move(block);
    }
    const Json value = ParseJson(text);
    return !value.is_discarded() && schema->Holds(value) ? 1.0 : 0.0;
  };
}

}  // namespace tandem

#include "common/model/bounded_json.h"

#include <optional>
#include <set>
#include <vector>

#include <nlohmann/json.hpp>

namespace tandem {

absl::StatusOr<nlohmann::json> ParseBoundedJson(std::string_view text, const std::string& file, const std::string& part,
                                                std::size_t max_values) {
  using Json = nlohmann::json;
  const auto fail = [&](const auto&... message) {
    return absl::InvalidArgumentError(absl::StrCat(file, ": ", part, " ", message...));
  };
  // nlohmann's parser keeps its own stack, but destroying and printing a value recurse: so depth is checked before a value is
  // made. Before each value but the first stands a comma or what opens an array or an object.
  int depth = 0;
  std::size_t num_values = 1;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      if (++depth > kMaxJsonDepth) return fail("is nested deeper than ", kMaxJsonDepth, " levels at byte ", i);
      ++num_values;
    } else if (c == ',') {
      ++num_values;
    } else if (c == '}' || c == ']') {
      --depth;
    }
    if (num_values > max_values) return fail("has more than ", max_values, " values at byte ", i);
  }

  std::vector<std::set<std::string>> keys;  // of the objects that are open, outermost first
  std::optional<std::string> repeated_key;
  const auto watch_keys = [&](int, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && !keys.back().insert(parsed.get_ref<const std::string&>()).second) {
      repeated_key = parsed.get_ref<const std::string&>();
    }
    return true;
  };
  Json value = Json::parse(text.begin(), text.end(), watch_keys, /*allow_exceptions=*/false);
  if (value.is_discarded()) return fail("is not JSON");
  if (repeated_key.has_value()) return fail("has the key '", *repeated_key, "' twice");
  return value;
}

}  // namespace tandem

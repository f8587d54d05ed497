#include "common/model/prompt_encoder.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <iterator>
#include <optional>
#include <utility>

#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "common/base/allocation_budget.h"
#include "common/base/mutex.h"
#include "common/base/units.h"
#include "common/model/bounded_json.h"
#include "common/model/utf8.h"
#include "jinja/parser.h"
#include "jinja/runtime.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;  // templates print objects in the order in which they were written

constexpr std::size_t kMaxTemplateBytes = 1 << 20;
constexpr std::size_t kMaxExpressionTokens = 512;   // in one {{ }} or {% %}: the engine recurses over them
constexpr std::size_t kMaxTemplateDepth = 64;       // brackets and blocks inside each other
constexpr std::size_t kMaxScopes = 100'000;         // loop turns and macro calls of one rendering
constexpr std::size_t kMaxStackBytes = 512 * 1024;  // of one rendering: macros can call themselves
constexpr std::size_t kMaxRenderedBytes = std::size_t{64} << 20;
constexpr std::size_t kMaxRenderMemory = std::size_t{512} << 20;  // at a time; a prompt of 16 MiB takes 64 MiB
constexpr std::size_t kMaxRenderWork = std::size_t{4} << 30;      // in all: what a few seconds write; 10,000 turns take 0.5 GiB
constexpr std::size_t kMaxArgumentBytes = 64 << 10;
constexpr std::size_t kMaxMessageValues = 1 << 18;  // of a conversation as JSON
// What strftime_now tells a template: the date that Llama 3's template falls back to. A prompt must not change at midnight.
constexpr std::time_t kTemplateTime = 1721995200;  // 2024-07-26 12:00 UTC

// Roles that templates may build control tokens from ('<|' + role + '|>'); any other text in a role is content.
constexpr auto kKnownRoles =
    std::to_array<std::string_view>({"system", "user", "assistant", "tool", "developer", "function", "ipython", "model"});

// Variables that are not a user's to set.
constexpr auto kOwnVariables = std::to_array<const char*>({"messages", "add_generation_prompt", "bos_token", "eos_token"});

absl::Status CheckTemplate(const jinja::lexer_result& lexed) {
  using Token = jinja::token;
  const auto fail = [](const auto&... message) {
    return absl::InvalidArgumentError(absl::StrCat("chat template: ", message...));
  };
  std::size_t num_brackets = 0;
  std::vector<std::size_t> blocks;  // open blocks; each holds 1 + its elif branches, which nest
  std::size_t num_blocks = 0;
  for (std::size_t i = 0; i < lexed.tokens.size(); ++i) {
    const Token& token = lexed.tokens[i];
    switch (token.t) {
      case Token::open_paren:
      case Token::open_square_bracket:
      case Token::open_curly_bracket:
        ++num_brackets;
        break;
      case Token::close_paren:
      case Token::close_square_bracket:
      case Token::close_curly_bracket:
        num_brackets -= num_brackets > 0 ? 1 : 0;
        break;
      case Token::open_expression:
      case Token::open_statement: {
        num_brackets = 0;
        std::size_t end = i + 1;
        bool assigns = false;
        while (end < lexed.tokens.size() && lexed.tokens[end].t != Token::close_expression &&
               lexed.tokens[end].t != Token::close_statement) {
          assigns = assigns || lexed.tokens[end].t == Token::equals;
          ++end;
        }
        if (end - i > kMaxExpressionTokens) {
          return fail("an expression of ", end - i, " tokens at byte ", token.pos, ", at most ", kMaxExpressionTokens);
        }
        if (token.t == Token::open_expression || end == i + 1) break;
        const std::string& word = lexed.tokens[i + 1].value;
        if (word == "if" || word == "for" || word == "macro" || word == "call" || word == "filter" ||
            (word == "set" && !assigns)) {
          blocks.push_back(1);
          ++num_blocks;
        } else if (word == "elif" && !blocks.empty()) {
          ++blocks.back();
          ++num_blocks;
        } else if (word.starts_with("end") && word != "endgeneration" && !blocks.empty()) {
          num_blocks -= blocks.back();
          blocks.pop_back();
        }
        break;
      }
      default:
        break;
    }
    if (num_brackets + num_blocks > kMaxTemplateDepth) {
      return fail("nested deeper than ", kMaxTemplateDepth, " levels at byte ", token.pos);
    }
  }
  return absl::OkStatus();
}

std::uintptr_t StackAddress() { return reinterpret_cast<std::uintptr_t>(__builtin_frame_address(0)); }

// The engine has no limits of its own. It copies every variable into each new scope (a loop's turn, a macro's call) and asks each
// variable's name whether it can be a key: a name that counts is told of every scope.
class RenderBudget final : public jinja::value_string_t {
 public:
  explicit RenderBudget(std::uintptr_t stack_begin)
      : jinja::value_string_t(std::string("tandem_budget")), stack_begin_(stack_begin) {}
  bool is_hashable() const override {
    const std::uintptr_t here = StackAddress();
    if (std::max(here, stack_begin_) - std::min(here, stack_begin_) > kMaxStackBytes)
      throw jinja::raised_exception("it calls itself too deeply");
    if (++num_scopes_ > kMaxScopes) throw jinja::raised_exception(absl::StrCat("it takes more than ", kMaxScopes, " steps"));
    return true;
  }

 private:
  const std::uintptr_t stack_begin_;
  mutable std::size_t num_scopes_ = 0;
};

// The engine wraps the words of raise_exception in a trace with an excerpt of the template.
std::string WordsOf(const std::exception& exception) {
  std::string words = exception.what();
  for (const std::string_view before : {"Error: Jinja Exception: ", "Error: "}) {
    const std::size_t at = words.rfind(before);
    if (at != std::string::npos) return words.substr(at + before.size());
  }
  return words;
}

// A rendering: text, and which bytes of it the template wrote.
struct MarkedText {
  std::string text;
  std::vector<TextRange> template_ranges;
};

// What a template is shown.
struct Chat {
  Json messages;   // objects with role, content and further fields
  Json arguments;  // an object
  bool add_generation_prompt = true;
};

absl::StatusOr<Json> ParseObject(std::string_view json, const std::string& what) {
  TANDEM_ASSIGN_OR_RETURN(const nlohmann::json checked, ParseBoundedJson(json, what, "text"));
  if (!checked.is_object()) return absl::InvalidArgumentError(absl::StrCat(what, ": not an object"));
  return Json::parse(json);
}

absl::StatusOr<Chat> ToChat(const std::vector<ChatMessage>& messages, const ChatOptions& options) {
  Chat chat{.messages = Json::array(), .arguments = Json::object(), .add_generation_prompt = options.add_generation_prompt};
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const std::string place = absl::StrCat("messages[", i, "]");
    if (messages[i].is_open) {
      return absl::InvalidArgumentError(absl::StrCat(place, ".content: missing: a turn that is yet to be written"));
    }
    Json entry = {{"role", messages[i].role}, {"content", messages[i].content}};
    if (!messages[i].further_fields.empty()) {
      TANDEM_ASSIGN_OR_RETURN(const Json further, ParseObject(messages[i].further_fields, place));
      for (const auto& [name, value] : further.items()) entry[name] = value;
    }
    chat.messages.push_back(std::move(entry));
  }
  if (!options.template_arguments.empty()) {
    TANDEM_RETURN_IF_ERROR(PromptEncoder::CheckTemplateArguments(options.template_arguments));
    TANDEM_ASSIGN_OR_RETURN(chat.arguments, ParseObject(options.template_arguments, "template_arguments"));
  }
  return chat;
}

// Calls `visit` with every text of `json`, keys among them.
template <typename Visit>
void VisitTexts(const Json& json, const Visit& visit) {
  if (json.is_string()) visit(json.get_ref<const std::string&>());
  if (!json.is_structured()) return;
  for (const auto& [key, value] : json.items()) {
    if (json.is_object()) visit(key);
    VisitTexts(value, visit);
  }
}

// `json` with every text, keys among them, as `change` has it.
template <typename Change>
Json ChangeTexts(const Json& json, const Change& change) {
  if (json.is_string()) return change(json.get_ref<const std::string&>());
  if (!json.is_structured()) return json;
  Json changed = json.is_object() ? Json::object() : Json::array();
  for (const auto& [key, value] : json.items()) {
    if (json.is_object()) {
      changed[change(key)] = ChangeTexts(value, change);
    } else {
      changed.push_back(ChangeTexts(value, change));
    }
  }
  return changed;
}

class TemplatePromptEncoder final : public PromptEncoder {
 public:
  explicit TemplatePromptEncoder(std::shared_ptr<const Tokenizer> tokenizer) : tokenizer_(std::move(tokenizer)) {}
  absl::Status ParseTemplate();
  void FindMarks();

  absl::StatusOr<std::string> Render(const std::vector<ChatMessage>& messages, const ChatOptions& options) const override {
    TANDEM_ASSIGN_OR_RETURN(const Chat chat, ToChat(messages, options));
    TANDEM_ASSIGN_OR_RETURN(MarkedText rendered, RenderMarked(chat, std::string()));
    return std::move(rendered.text);
  }
  absl::StatusOr<std::vector<TokenId>> EncodeChat(const std::vector<ChatMessage>& messages,
                                                  const ChatOptions& options) const override;
  absl::StatusOr<std::optional<std::vector<TokenId>>> EncodeBehind(const std::vector<ChatMessage>& messages,
                                                                   std::size_t answer_index,
                                                                   const ChatOptions& options) const override;
  std::vector<TokenId> EncodeText(std::string_view text) const override {
    std::vector<TokenId> ids = tokenizer_->spec().prefix_ids;
    const std::vector<TokenId> text_ids = tokenizer_->Encode(text, ControlTokens::kLiteral);
    ids.insert(ids.end(), text_ids.begin(), text_ids.end());
    return ids;
  }

 private:
  absl::StatusOr<MarkedText> RenderMarked(const Chat& chat, const std::string& guard) const;
  // With control tokens in content cut by a guard, and proof that content makes none.
  absl::StatusOr<MarkedText> RenderGuarded(const Chat& chat) const;
  std::string Guarded(std::string_view text, const std::string& guard) const;
  std::vector<TokenId> ControlTokensOf(const std::vector<TokenId>& ids) const;
  bool HasMarks(std::string_view text) const {
    return std::any_of(marks_.begin(), marks_.end(), [text](const std::string& mark) { return text.find(mark) != text.npos; });
  }
  jinja::value ToValue(const Json& json, const std::string& guard) const;
  std::string WithoutMarks(std::string_view text, const std::string& guard) const;

  const std::shared_ptr<const Tokenizer> tokenizer_;
  std::optional<jinja::program> program_;
  std::vector<bool> is_control_;  // by id
  std::vector<std::string_view> control_texts_;
  std::vector<std::string> marks_;  // the characters of control tokens that are no ASCII letter, digit or space
  std::optional<TokenId> start_token_;
  mutable Mutex render_mutex_;  // strftime_now uses localtime's static buffer
};

absl::Status TemplatePromptEncoder::ParseTemplate() {
  const std::string& source = tokenizer_->spec().chat_template;
  if (source.empty()) return absl::OkStatus();
  if (source.size() > kMaxTemplateBytes) {
    return absl::InvalidArgumentError(absl::StrCat("chat template: ", source.size(), " bytes, at most ", kMaxTemplateBytes));
  }
  try {
    const jinja::lexer_result lexed = jinja::lexer().tokenize(source);
    TANDEM_RETURN_IF_ERROR(CheckTemplate(lexed));
    program_.emplace(jinja::parse_from_tokens(lexed));
  } catch (const std::exception& exception) {
    return absl::InvalidArgumentError(absl::StrCat("chat template does not parse: ", exception.what()));
  }
  return absl::OkStatus();
}

void TemplatePromptEncoder::FindMarks() {
  const TokenizerSpec& spec = tokenizer_->spec();
  is_control_.resize(spec.tokens.size(), false);
  for (const AddedToken& added : spec.added_tokens) {
    if (added.text == spec.bos_text) start_token_ = added.id;
    if (!added.is_special) continue;
    is_control_[added.id] = true;
    control_texts_.push_back(added.text);
    for (std::string_view rest = added.text; !rest.empty();) {
      const std::string character(rest.substr(0, FirstUtf8Piece(rest).size));
      rest.remove_prefix(character.size());
      const bool is_word = absl::ascii_isalnum(static_cast<unsigned char>(character[0])) || character == " ";
      if (!is_word && std::find(marks_.begin(), marks_.end(), character) == marks_.end()) marks_.push_back(character);
    }
  }
}

// Note [Content never becomes control tokens]
//
// The engine tells for each part of its output whether it came from the messages, and EncodeMarked takes control tokens only
// from the rest. But some of its functions forget the origin (split, join, tojson, an index), and templates use them:
// content.split('</think>')[0]. So, where a message holds characters that control tokens are made of (letters, digits and spaces
// apart),
//  1. a guard, a noncharacter that no message has, is put inside each control token's text in the messages; whatever part such a
//     text ends up in, its two halves lie in two ranges; the guard is taken out again with the ranges already cut;
//  2. the same messages are rendered with guards instead of those characters: the control tokens must be the same ones. If they
//     are not, the template has built one out of content, and the messages are refused.
std::string TemplatePromptEncoder::Guarded(std::string_view text, const std::string& guard) const {
  if (guard.empty()) return std::string(text);
  std::string guarded;
  while (!text.empty()) {
    const bool is_control = std::any_of(control_texts_.begin(), control_texts_.end(),
                                        [text](std::string_view control) { return text.starts_with(control); });
    const std::string_view character = text.substr(0, FirstUtf8Piece(text).size);
    guarded.append(character).append(is_control ? guard : std::string());
    text.remove_prefix(character.size());
  }
  return guarded;
}

std::string TemplatePromptEncoder::WithoutMarks(std::string_view text, const std::string& guard) const {
  std::string replaced;
  while (!text.empty()) {
    const std::string_view character = text.substr(0, FirstUtf8Piece(text).size);
    const bool is_mark = std::find(marks_.begin(), marks_.end(), character) != marks_.end();
    replaced.append(is_mark ? std::string_view(guard) : character);
    text.remove_prefix(character.size());
  }
  return replaced;
}

// Texts are content; a known role is not.
jinja::value TemplatePromptEncoder::ToValue(const Json& json, const std::string& guard) const {
  if (json.is_null()) return jinja::mk_val<jinja::value_none>();
  if (json.is_boolean()) return jinja::mk_val<jinja::value_bool>(json.get<bool>());
  if (json.is_number_integer()) return jinja::mk_val<jinja::value_int>(json.get<std::int64_t>());
  if (json.is_number()) return jinja::mk_val<jinja::value_float>(json.get<double>());
  const auto to_text = [&](const std::string& text) {
    auto value = jinja::mk_val<jinja::value_string>(Guarded(text, guard));
    value->mark_input();
    return value;
  };
  if (json.is_string()) return to_text(json.get_ref<const std::string&>());
  if (json.is_array()) {
    auto list = jinja::mk_val<jinja::value_array>();
    for (const Json& item : json) list->push_back(ToValue(item, guard));
    return list;
  }
  auto object = jinja::mk_val<jinja::value_object>();
  for (const auto& [key, value] : json.items()) {
    const bool is_known_role = key == "role" && value.is_string() &&
                               std::find(kKnownRoles.begin(), kKnownRoles.end(), value.get<std::string>()) != kKnownRoles.end();
    object->insert(to_text(key),
                   is_known_role ? jinja::mk_val<jinja::value_string>(value.get<std::string>()) : ToValue(value, guard));
  }
  return object;
}

absl::StatusOr<MarkedText> TemplatePromptEncoder::RenderMarked(const Chat& chat, const std::string& guard) const {
  if (!program_.has_value()) return absl::FailedPreconditionError("the model has no chat template: give the prompt as text");
  const TokenizerSpec& spec = tokenizer_->spec();
  jinja::value_string output;
  std::optional<AllocationBudget> budget;
  try {
    MutexLock lock(&render_mutex_);
    budget.emplace(kMaxRenderMemory, kMaxRenderWork);
    jinja::context context(spec.chat_template);
    context.current_time = kTemplateTime;
    for (const auto& [name, value] : chat.arguments.items()) context.set_val(name, ToValue(value, guard));
    context.set_val("messages", ToValue(chat.messages, guard));
    context.set_val("add_generation_prompt", jinja::mk_val<jinja::value_bool>(chat.add_generation_prompt));
    context.set_val("bos_token", jinja::mk_val<jinja::value_string>(spec.bos_text));
    context.set_val("eos_token", jinja::mk_val<jinja::value_string>(spec.eos_text));
    context.set_val(std::make_shared<RenderBudget>(StackAddress()), jinja::mk_val<jinja::value_none>());
    jinja::runtime runtime(context);
    output = jinja::runtime::gather_string_parts(runtime.execute(*program_));
    budget.reset();
  } catch (const std::exception& exception) {
    const bool is_exceeded = budget.has_value() && budget->is_exceeded();
    budget.reset();
    if (is_exceeded) {
      return absl::InvalidArgumentError(absl::StrCat("the chat template takes more than ", FormatBytes(kMaxRenderMemory),
                                                     " of memory at a time, or ", FormatBytes(kMaxRenderWork), " in all"));
    }
    return absl::InvalidArgumentError(absl::StrCat("the chat template refuses the messages: ", WordsOf(exception)));
  }

  MarkedText marked;
  for (const jinja::string_part& part : output->val_str.parts) {
    if (marked.text.size() + part.val.size() > kMaxRenderedBytes) {
      return absl::InvalidArgumentError(absl::StrCat("the chat template makes more than ", kMaxRenderedBytes, " bytes"));
    }
    std::string_view rest = part.val;
    while (!rest.empty()) {
      const std::size_t size = guard.empty() ? rest.size() : std::min(rest.find(guard), rest.size());
      if (size > 0 && !part.is_input) marked.template_ranges.push_back({marked.text.size(), marked.text.size() + size});
      marked.text.append(rest.substr(0, size));
      rest.remove_prefix(std::min(size + guard.size(), rest.size()));
    }
  }
  return marked;
}

std::vector<TokenId> TemplatePromptEncoder::ControlTokensOf(const std::vector<TokenId>& ids) const {
  std::vector<TokenId> control;
  std::copy_if(ids.begin(), ids.end(), std::back_inserter(control), [this](TokenId id) { return is_control_[id]; });
  return control;
}

absl::StatusOr<MarkedText> TemplatePromptEncoder::RenderGuarded(const Chat& chat) const {
  const auto visit = [&chat](const auto& see) {
    VisitTexts(chat.messages, see);
    VisitTexts(chat.arguments, see);
  };
  bool needs_guard = false;
  visit([&](const std::string& text) { needs_guard = needs_guard || HasMarks(text); });
  if (!needs_guard) return RenderMarked(chat, std::string());

  std::string guard;
  for (char32_t noncharacter = 0xfdd0; noncharacter <= 0xfdef && guard.empty(); ++noncharacter) {
    std::string candidate;
    AppendUtf8(noncharacter, &candidate);
    bool is_free = true;
    visit([&](const std::string& text) { is_free = is_free && text.find(candidate) == std::string::npos; });
    if (is_free) guard = std::move(candidate);
  }
  if (guard.empty()) return absl::InvalidArgumentError("the messages hold all 32 noncharacters U+FDD0 to U+FDEF");
  TANDEM_ASSIGN_OR_RETURN(MarkedText rendered, RenderMarked(chat, guard));

  const auto without_marks = [&](const std::string& text) { return WithoutMarks(text, guard); };
  Chat neutral = chat;
  neutral.arguments = ChangeTexts(chat.arguments, without_marks);
  neutral.messages = ChangeTexts(chat.messages, without_marks);
  // No guard is given: the ones inside the neutral text must stay.
  TANDEM_ASSIGN_OR_RETURN(const MarkedText harmless, RenderMarked(neutral, std::string()));
  if (ControlTokensOf(tokenizer_->EncodeMarked(harmless.text, harmless.template_ranges)) !=
      ControlTokensOf(tokenizer_->EncodeMarked(rendered.text, rendered.template_ranges))) {
    return absl::InvalidArgumentError("the chat template makes control tokens out of the messages' own text");
  }
  return rendered;
}

absl::StatusOr<std::vector<TokenId>> TemplatePromptEncoder::EncodeChat(const std::vector<ChatMessage>& messages,
                                                                       const ChatOptions& options) const {
  TANDEM_ASSIGN_OR_RETURN(const Chat chat, ToChat(messages, options));
  TANDEM_ASSIGN_OR_RETURN(const MarkedText rendered, RenderGuarded(chat));
  std::vector<TokenId> ids = tokenizer_->EncodeMarked(rendered.text, rendered.template_ranges);

  // One start token: the template's, or else the tokenizer's, or else the one that the model names.
  std::vector<TokenId> prefix = tokenizer_->spec().prefix_ids;
  if (prefix.empty() && start_token_.has_value()) prefix = {*start_token_};
  if (!prefix.empty() && (ids.empty() || ids.front() != prefix.front())) ids.insert(ids.begin(), prefix.begin(), prefix.end());
  return ids;
}

absl::StatusOr<std::optional<std::vector<TokenId>>> TemplatePromptEncoder::EncodeBehind(const std::vector<ChatMessage>& messages,
                                                                                        std::size_t answer_index,
                                                                                        const ChatOptions& options) const {
  const std::vector<ChatMessage> asked(messages.begin(), messages.begin() + static_cast<std::ptrdiff_t>(answer_index));
  TANDEM_ASSIGN_OR_RETURN(const Chat chat, ToChat(messages, options));
  TANDEM_ASSIGN_OR_RETURN(const MarkedText whole, RenderGuarded(chat));
  TANDEM_ASSIGN_OR_RETURN(const std::string before,
                          Render(asked, {.add_generation_prompt = true, .template_arguments = options.template_arguments}));
  const std::string_view text = whole.text;
  if (!text.starts_with(before)) return std::optional<std::vector<TokenId>>();
  // Many templates strip an answer's white space; its ids keep it.
  std::string answer = messages[answer_index].content;
  if (!text.substr(before.size()).starts_with(answer)) absl::StripAsciiWhitespace(&answer);
  if (!text.substr(before.size()).starts_with(answer)) return std::optional<std::vector<TokenId>>();
  const std::size_t begin = before.size() + answer.size();
  std::vector<TextRange> ranges;
  for (const TextRange& range : whole.template_ranges) {
    if (range.end > begin) ranges.push_back({std::max(range.begin, begin) - begin, range.end - begin});
  }
  return std::optional(tokenizer_->EncodeMarked(text.substr(begin), ranges));
}

}  // namespace

absl::StatusOr<std::shared_ptr<const PromptEncoder>> PromptEncoder::Create(std::shared_ptr<const Tokenizer> tokenizer) {
  auto encoder = std::make_shared<TemplatePromptEncoder>(std::move(tokenizer));
  TANDEM_RETURN_IF_ERROR(encoder->ParseTemplate());
  encoder->FindMarks();
  return encoder;
}

absl::StatusOr<std::vector<ChatMessage>> PromptEncoder::ParseMessages(std::string_view json) {
  TANDEM_RETURN_IF_ERROR(ParseBoundedJson(json, "messages", "text", kMaxMessageValues).status());
  const Json list = Json::parse(json);
  if (!list.is_array() || list.empty()) return absl::InvalidArgumentError("messages: not a list of at least one message");
  std::vector<ChatMessage> messages;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const auto fail = [i](const auto&... what) { return absl::InvalidArgumentError(absl::StrCat("messages[", i, "]", what...)); };
    if (!list[i].is_object()) return fail(": not an object");
    ChatMessage message;
    Json further = Json::object();
    for (const auto& [key, value] : list[i].items()) {
      if (key == "content") {
        if (value.is_string()) message.content = value.get<std::string>();
        if (value.is_string() || value.is_null()) continue;
        if (!value.is_array()) return fail(".content: neither text nor an array of texts");
        for (const Json& part : value) {
          if (!part.is_object() || part.value("type", Json()) != "text" || !part.contains("text") || !part["text"].is_string()) {
            return fail(".content: ", part.dump().substr(0, 80), R"( is not {"type": "text", "text": ...})");
          }
          message.content += part["text"].get<std::string>();
        }
      } else if (key == "role") {
        if (!value.is_string()) return fail(".role: not a text");
        message.role = value.get<std::string>();
      } else if (!value.is_null()) {
        further[key] = value;
      }
    }
    if (message.role.empty()) return fail(".role: missing or empty");
    if (!list[i].contains("content") || list[i]["content"].is_null()) {
      if (message.role != "assistant") return fail(".content: missing");
      message.is_open = !further.contains("tool_calls");
    }
    if (!further.empty()) message.further_fields = further.dump();
    messages.push_back(std::move(message));
  }
  return messages;
}

absl::Status PromptEncoder::CheckTemplateArguments(std::string_view json) {
  if (json.size() > kMaxArgumentBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("template_arguments: ", json.size(), " bytes; must be at most ", kMaxArgumentBytes));
  }
  TANDEM_ASSIGN_OR_RETURN(const Json arguments, ParseObject(json, "template_arguments"));
  for (const char* const name : kOwnVariables) {
    if (!arguments.contains(name)) continue;
    return absl::InvalidArgumentError(absl::StrCat("template_arguments: sets '", name, "', which is set already"));
  }
  return absl::OkStatus();
}

}  // namespace tandem

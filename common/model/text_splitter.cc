#include "common/model/text_splitter.h"

#include <unicode/bytestream.h>
#include <unicode/normalizer2.h>
#include <unicode/uchar.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "common/base/check.h"
#include "common/model/utf8.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

namespace tandem {
namespace {

constexpr std::size_t kMaxPatterns = 16;             // bounds the recursion of Split
constexpr std::size_t kMaxPatternBytes = 16 * 1024;  // real ones have less than 1 KiB
constexpr std::uint32_t kMatchLimit = 1'000'000;     // steps of one match; real patterns take a few a byte

struct FreeCompileContext {
  void operator()(pcre2_compile_context* context) const { pcre2_compile_context_free(context); }
};
struct FreeMatchData {
  void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
};
struct FreeMatchContext {
  void operator()(pcre2_match_context* context) const { pcre2_match_context_free(context); }
};

PCRE2_SPTR ToPcre(std::string_view text) { return reinterpret_cast<PCRE2_SPTR>(text.data()); }

// PCRE2's \s also takes U+180E, which lost White_Space in Unicode 6.3.
std::string WithExactWhiteSpace(std::string_view pattern) {
  std::string exact;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] != '\\' || i + 1 == pattern.size()) {
      exact.push_back(pattern[i]);
      continue;
    }
    const char escaped = pattern[++i];
    if (escaped == 's') {
      exact += "\\p{wspace}";
    } else if (escaped == 'S') {
      exact += "\\P{wspace}";
    } else {
      exact += {'\\', escaped};
    }
  }
  return exact;
}

}  // namespace

struct TextSplitter::Pattern {
  struct FreeCode {
    void operator()(pcre2_code* code) const { pcre2_code_free(code); }
  };
  std::unique_ptr<pcre2_code, FreeCode> code;
};

TextSplitter::TextSplitter() = default;
TextSplitter::TextSplitter(TextSplitter&&) noexcept = default;
TextSplitter& TextSplitter::operator=(TextSplitter&&) noexcept = default;
TextSplitter::~TextSplitter() = default;

absl::StatusOr<TextSplitter> TextSplitter::Create(const std::vector<std::string>& patterns) {
  if (patterns.size() > kMaxPatterns) {
    return absl::InvalidArgumentError(absl::StrCat("tokenizer: ", patterns.size(), " split patterns, at most ", kMaxPatterns));
  }
  // ^ and $ stand for lines, which end at \n, as in Oniguruma.
  constexpr std::uint32_t kOptions = PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C;
  const std::unique_ptr<pcre2_compile_context, FreeCompileContext> context(pcre2_compile_context_create(nullptr));
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  TextSplitter splitter;
  for (const std::string& text : patterns) {
    if (text.size() > kMaxPatternBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("tokenizer: a split pattern of ", text.size(), " bytes, at most ", kMaxPatternBytes));
    }
    const std::string exact = WithExactWhiteSpace(text);
    int error = 0;
    PCRE2_SIZE error_at = 0;
    auto pattern = std::make_unique<Pattern>();
    pattern->code.reset(pcre2_compile(ToPcre(exact), exact.size(), kOptions, &error, &error_at, context.get()));
    if (pattern->code == nullptr) {
      PCRE2_UCHAR message[256] = {};
      pcre2_get_error_message(error, message, sizeof(message));
      return absl::InvalidArgumentError(absl::StrCat("tokenizer: split pattern '", text, "' fails near byte ", error_at, ": ",
                                                     reinterpret_cast<const char*>(message)));
    }
    // Where there is no JIT, pcre2_match interprets: the same matches, slower.
    pcre2_jit_compile(pattern->code.get(), PCRE2_JIT_COMPLETE);
    splitter.patterns_.push_back(std::move(pattern));
  }
  return splitter;
}

// One call of Split: what PCRE2 writes to while it matches.
class TextSplitter::Pass {
 public:
  Pass(const TextSplitter& splitter, const PieceFunction& on_piece)
      : splitter_(splitter), on_piece_(on_piece), context_(pcre2_match_context_create(nullptr)) {
    pcre2_set_match_limit(context_.get(), kMatchLimit);
    // A match's data holds the state of one pattern: the next one runs between two matches of this one.
    for (std::size_t i = 0; i < splitter.patterns_.size(); ++i) match_data_.emplace_back(pcre2_match_data_create(1, nullptr));
  }

  // Requires: `text` is well-formed UTF-8.
  void Split(std::string_view text, std::size_t pattern_index) {
    if (text.empty()) return;
    if (pattern_index == splitter_.patterns_.size()) {
      on_piece_(text);
      return;
    }
    const pcre2_code* code = splitter_.patterns_[pattern_index]->code.get();
    pcre2_match_data* data = match_data_[pattern_index].get();
    std::size_t done = 0;    // before it everything is split
    std::size_t search = 0;  // where the next match may begin
    while (search < text.size()) {
      const int matched = pcre2_match(code, ToPcre(text), text.size(), search, PCRE2_NO_UTF_CHECK, data, context_.get());
      if (matched < 0) break;
      const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(data);
      const std::size_t begin = bounds[0];
      const std::size_t end = bounds[1];
      if (end <= begin || begin < search) {  // an empty match (or one that \K turned around) splits nothing
        search += FirstUtf8Piece(text.substr(search)).size;
        continue;
      }
      Split(text.substr(done, begin - done), pattern_index + 1);
      Split(text.substr(begin, end - begin), pattern_index + 1);
      done = search = end;
    }
    Split(text.substr(done), pattern_index + 1);
  }

 private:
  const TextSplitter& splitter_;
  const PieceFunction& on_piece_;
  std::unique_ptr<pcre2_match_context, FreeMatchContext> context_;
  std::vector<std::unique_ptr<pcre2_match_data, FreeMatchData>> match_data_;
};

void TextSplitter::Split(std::string_view text, const PieceFunction& on_piece) const {
  Pass pass(*this, on_piece);
  while (!text.empty()) {
    const std::size_t good = WellFormedPrefix(text);
    pass.Split(text.substr(0, good), 0);
    text.remove_prefix(good);
    if (text.empty()) break;
    const std::size_t bad = FirstUtf8Piece(text).size;
    on_piece(text.substr(0, bad));
    text.remove_prefix(bad);
  }
}

std::string NormalizeNfc(std::string_view text) {
  if (std::all_of(text.begin(), text.end(), [](char c) { return static_cast<std::uint8_t>(c) < 0x80; })) return std::string(text);
  UErrorCode error = U_ZERO_ERROR;
  const icu::Normalizer2* nfc = icu::Normalizer2::getNFCInstance(error);
  TANDEM_CHECK(U_SUCCESS(error), "ICU has no NFC data: ", u_errorName(error));
  std::string normal;
  icu::StringByteSink<std::string> sink(&normal);
  while (!text.empty()) {
    const std::size_t good = WellFormedPrefix(text);
    nfc->normalizeUTF8(0, icu::StringPiece(text.data(), static_cast<std::int32_t>(good)), sink, nullptr, error);
    TANDEM_CHECK(U_SUCCESS(error), "NFC of ", good, " bytes: ", u_errorName(error));
    text.remove_prefix(good);
    if (text.empty()) break;
    const std::size_t bad = FirstUtf8Piece(text).size;
    normal.append(text.substr(0, bad));
    text.remove_prefix(bad);
  }
  return normal;
}

bool IsWhiteSpace(char32_t code_point) { return u_isUWhiteSpace(static_cast<UChar32>(code_point)) != 0; }

}  // namespace tandem

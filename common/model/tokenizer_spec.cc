// TokenizerSpec as bytes. Little-endian; a string is its size (u32) and its bytes, a list its count (u32) and its items.
#include <utility>

#include "common/model/tokenizer.h"

namespace tandem {
namespace {

constexpr std::string_view kMagic = "TDTOKEN1";

class Writer {
 public:
  void U8(bool value) { bytes_.push_back(value ? 1 : 0); }
  void U32(std::size_t value) {
    for (int shift = 0; shift < 32; shift += 8) bytes_.push_back(static_cast<char>((value >> shift) & 0xff));
  }
  void Text(std::string_view text) {
    U32(text.size());
    bytes_.append(text);
  }
  void Raw(std::string_view text) { bytes_.append(text); }
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// After the first fault everything reads as empty; ok() tells.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes), size_(bytes.size()) {}
  bool ok() const { return ok_; }
  bool is_done() const { return bytes_.empty(); }
  std::size_t at() const { return size_ - bytes_.size(); }

  std::string_view Raw(std::size_t size) {
    if (!ok_ || size > bytes_.size()) {
      ok_ = false;
      return {};
    }
    const std::string_view raw = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return raw;
  }
  bool Flag() {
    const std::string_view raw = Raw(1);
    if (ok_ && static_cast<unsigned char>(raw[0]) > 1) ok_ = false;
    return ok_ && raw[0] == 1;
  }
  std::uint32_t U32() {
    const std::string_view raw = Raw(4);
    std::uint32_t value = 0;
    for (std::size_t i = raw.size(); i-- > 0;) value = (value << 8) | static_cast<unsigned char>(raw[i]);
    return value;
  }
  std::string Text() { return std::string(Raw(U32())); }
  // A count of items of at least `item_bytes` each: never more than the bytes that are left can hold.
  std::size_t Count(std::size_t item_bytes) {
    const std::uint32_t count = U32();
    if (count > bytes_.size() / item_bytes) ok_ = false;
    return ok_ ? count : 0;
  }

 private:
  std::string_view bytes_;
  const std::size_t size_;
  bool ok_ = true;
};

}  // namespace

std::string SerializeTokenizerSpec(const TokenizerSpec& spec) {
  Writer writer;
  writer.Raw(kMagic);
  writer.U32(spec.tokens.size());
  for (const std::string& token : spec.tokens) writer.Text(token);
  writer.U32(spec.merges.size());
  for (const auto& [left, right] : spec.merges) {
    writer.Text(left);
    writer.Text(right);
  }
  writer.U32(spec.added_tokens.size());
  for (const AddedToken& added : spec.added_tokens) {
    writer.U32(added.id);
    writer.Text(added.text);
    for (const bool flag : {added.is_special, added.strips_left, added.strips_right, added.is_normalized}) writer.U8(flag);
  }
  writer.U32(spec.split_patterns.size());
  for (const std::string& pattern : spec.split_patterns) writer.Text(pattern);
  for (const bool flag : {spec.split_digits, spec.normalize_nfc, spec.ignore_merges, spec.add_prefix_space}) writer.U8(flag);
  writer.U32(spec.prefix_ids.size());
  for (const TokenId id : spec.prefix_ids) writer.U32(id);
  for (const std::string* text : {&spec.bos_text, &spec.eos_text, &spec.chat_template}) writer.Text(*text);
  return writer.Take();
}

absl::StatusOr<TokenizerSpec> ParseTokenizerSpec(std::string_view bytes) {
  Reader reader(bytes);
  if (reader.Raw(kMagic.size()) != kMagic) return absl::InvalidArgumentError("tokenizer bytes do not begin with 'TDTOKEN1'");
  TokenizerSpec spec;
  spec.tokens.resize(reader.Count(4));
  for (std::string& token : spec.tokens) token = reader.Text();
  spec.merges.resize(reader.Count(8));
  for (auto& [left, right] : spec.merges) {
    left = reader.Text();
    right = reader.Text();
  }
  spec.added_tokens.resize(reader.Count(12));
  for (AddedToken& added : spec.added_tokens) {
    added.id = reader.U32();
    added.text = reader.Text();
    for (bool* flag : {&added.is_special, &added.strips_left, &added.strips_right, &added.is_normalized}) *flag = reader.Flag();
  }
  spec.split_patterns.resize(reader.Count(4));
  for (std::string& pattern : spec.split_patterns) pattern = reader.Text();
  for (bool* flag : {&spec.split_digits, &spec.normalize_nfc, &spec.ignore_merges, &spec.add_prefix_space}) *flag = reader.Flag();
  spec.prefix_ids.resize(reader.Count(4));
  for (TokenId& id : spec.prefix_ids) id = reader.U32();
  for (std::string* text : {&spec.bos_text, &spec.eos_text, &spec.chat_template}) *text = reader.Text();
  if (!reader.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("tokenizer bytes: a count, size or flag near byte ", reader.at(), " of ",
                                                   bytes.size(), " is more than there is"));
  }
  if (!reader.is_done()) {
    return absl::InvalidArgumentError(absl::StrCat("tokenizer bytes: ", bytes.size() - reader.at(), " bytes after the end"));
  }
  return spec;
}

}  // namespace tandem

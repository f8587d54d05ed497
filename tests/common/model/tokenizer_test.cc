#include "common/model/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "common/base/hash.h"
#include "common/base/random.h"
#include "common/model/hugging_face_files.h"
#include "tests/common/model/tokenizer_fixture.h"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string BytesOf(const Tokenizer& tokenizer, const std::vector<TokenId>& ids) {
  std::string bytes;
  for (const TokenId id : ids) bytes.append(tokenizer.TokenBytes(id, /*skip_special=*/false));
  return bytes;
}

// Seeded texts of characters and byte runs that stress the splitter: letters, digits, white space, long runs, pieces of tokens.
std::string RandomText(std::uint64_t seed, bool with_ill_formed) {
  static const std::vector<std::string> kParts = {
      "a", "word", "Word", " ",      "  ",         "\n",     "\r\n",   "\t",     "7",       "42",      "'s",   "'LL",
      ".", "...",  "é",    "\u4f60", "\U0001f600", "\u0663", "\u00a0", "\u200d", "<|end|>", "<think>", "<|en", "e\u0301"};
  static const std::vector<std::string> kBroken = {"\x80",    "\xff", "\xf0\x9f", "\xed\xa0\x80", "\xc0\xaf", "\xf4\x90\x80\x80",
                                                   "\xe4\xbd"};
  std::string text;
  const std::uint64_t num_parts = RandomBelow(seed, 0, 30);
  for (std::uint64_t i = 1; i <= num_parts; ++i) {
    const bool is_broken = with_ill_formed && RandomBelow(seed, 1000 + i, 4) == 0;
    const std::vector<std::string>& parts = is_broken ? kBroken : kParts;
    text += parts[RandomBelow(seed, i, parts.size())];
  }
  return text;
}

TEST(SmolLm2TokenizerTest, ReadsVocabularyAndMerges) {
  TANDEM_NEEDS_SMOLLM2();
  const Json golden = Golden("smollm2/tokenizer.json");
  const TokenizerSpec& spec = SmolLm2Tokenizer()->spec();
  std::string vocabulary, merges;
  for (const std::string& token : spec.tokens) vocabulary += (vocabulary.empty() ? "" : "\n") + token;
  for (const auto& [left, right] : spec.merges) merges += (merges.empty() ? "" : "\n") + left + " " + right;
  EXPECT_EQ(SmolLm2Tokenizer()->vocab_size(), golden["vocab_size"]);
  EXPECT_EQ(spec.merges.size(), golden["merges"]);
  EXPECT_EQ(Sha256Hex(vocabulary), golden["vocab_sha256_newline_joined"]);
  EXPECT_EQ(Sha256Hex(merges), golden["merges_sha256_newline_joined"]);
  ASSERT_EQ(spec.added_tokens.size(), golden["special_ids"].size());
  for (const AddedToken& added : spec.added_tokens) {
    EXPECT_TRUE(added.is_special);
    EXPECT_EQ(added.id, golden["special_ids"].at(added.text));
  }
  EXPECT_THAT(spec.prefix_ids, IsEmpty());
  EXPECT_EQ(spec.bos_text, "<|im_start|>");
  EXPECT_EQ(spec.eos_text, "<|im_end|>");
}

TEST(SmolLm2TokenizerTest, EncodesAndDecodesAsTheReference) {
  TANDEM_NEEDS_SMOLLM2();
  const Json golden = Golden("smollm2/tokenizer.json");
  ASSERT_EQ(golden["cases"].size(), 91u);
  for (const Json& one : golden["cases"]) {
    const std::string text = one["text"];
    SCOPED_TRACE(one["text"].dump());
    const std::vector<TokenId> ids = one["ids"];
    EXPECT_EQ(SmolLm2Tokenizer()->Encode(text, ControlTokens::kParse), ids);
    EXPECT_EQ(SmolLm2Tokenizer()->Encode(text, ControlTokens::kLiteral), one.value("ids_specials_as_text", ids));
    EXPECT_EQ(SmolLm2Tokenizer()->Decode(ids, /*skip_special=*/false), one["decoded"]);
    EXPECT_EQ(SmolLm2Tokenizer()->Decode(ids, /*skip_special=*/true), one["decoded_skip_special"]);
  }
  for (const Json& one : golden["partial_decodes"]) {
    EXPECT_EQ(SmolLm2Tokenizer()->Decode(one["ids"].get<std::vector<TokenId>>(), /*skip_special=*/true), one["decoded"]) << one;
  }
}

TEST(SmolLm2TokenizerTest, BytesWithoutATokenVanish) {
  TANDEM_NEEDS_SMOLLM2();
  const std::vector<int> lost = Golden("smollm2/tokenizer.json")["bytes_without_token"];
  for (int byte = 0; byte < 256; ++byte) {
    const std::string text(1, static_cast<char>(byte));
    const bool is_lost = std::find(lost.begin(), lost.end(), byte) != lost.end();
    EXPECT_EQ(BytesOf(*SmolLm2Tokenizer(), SmolLm2Tokenizer()->Encode(text, ControlTokens::kParse)), is_lost ? "" : text) << byte;
  }
}

// What an export of a GGUF model writes.
TEST(TokenizerTest, FilesMadeOfASpecGiveItAgain) {
  std::vector<TokenizerSpec> specs;
  for (const char* name : {"gpt2", "gpt2_prefix_space", "smollm", "digit_runs", "llama3", "qwen2", "three_splits"})
    specs.push_back(VariantSpec(name));
  if (SmolLm2Tokenizer() != nullptr) specs.push_back(SmolLm2Tokenizer()->spec());
  for (TokenizerSpec& spec : specs) {
    const auto files = HuggingFaceTokenizerFiles(spec);
    const auto again = TokenizerSpecFromJson(files.at("tokenizer.json"), files.at("tokenizer_config.json"), "");
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(SerializeTokenizerSpec(*again), SerializeTokenizerSpec(spec));
  }
}

TEST(TokenizerTest, EveryPreTokenizerSplitsAsTheReference) {
  const Json golden = Golden("tokenizers/variants.json");
  ASSERT_EQ(golden["variants"].size(), 7u);
  for (const Json& variant : golden["variants"]) {
    const std::string name = variant["name"];
    const auto tokenizer = MakeTokenizer(VariantSpec(name));
    ASSERT_NE(tokenizer, nullptr);
    for (std::size_t i = 0; i < golden["texts"].size(); ++i) {
      EXPECT_EQ(tokenizer->Encode(golden["texts"][i].get<std::string>(), ControlTokens::kParse),
                variant["ids"][i].get<std::vector<TokenId>>())
          << name << " " << golden["texts"][i].dump();
    }
  }
}

// The same vocabulary through a GGUF file's values, where only the name of the pre-tokenizer is given.
TEST(TokenizerTest, GgufNamesMeanTheSameSplits) {
  const Json golden = Golden("tokenizers/variants.json");
  for (const auto& [pre, variant] : {std::pair{"gpt-2", "gpt2"}, std::pair{"smollm", "smollm"}, std::pair{"llama-bpe", "llama3"},
                                     std::pair{"qwen2", "qwen2"}}) {
    const TokenizerSpec expected = VariantSpec(variant);
    GgufTokenizerValues values;
    values.model = "gpt2";
    values.pre = pre;
    values.tokens = expected.tokens;
    for (const auto& [left, right] : expected.merges) values.merges.push_back(left + " " + right);
    values.token_types.assign(values.tokens.size(), 1);
    for (const AddedToken& added : expected.added_tokens) values.token_types[added.id] = added.is_special ? 3 : 4;
    values.bos_token_id = expected.added_tokens[0].id;
    const absl::StatusOr<TokenizerSpec> spec = TokenizerSpecFromGguf(values);
    ASSERT_TRUE(spec.ok()) << spec.status();
    EXPECT_EQ(spec->prefix_ids.size(), std::string_view(pre) == "llama-bpe" ? 1u : 0u) << pre;
    const auto from_json = MakeTokenizer(expected);
    const auto from_gguf = MakeTokenizer(*spec);
    for (const Json& text : golden["texts"]) {
      if (text.get<std::string>().find("<|strip|>") != std::string::npos) continue;  // GGUF has no lstrip and rstrip
      EXPECT_EQ(from_gguf->Encode(text.get<std::string>(), ControlTokens::kParse),
                from_json->Encode(text.get<std::string>(), ControlTokens::kParse))
          << pre << " " << text.dump();
    }
  }
}

TEST(TokenizerTest, GgufFaultsAreNamed) {
  GgufTokenizerValues good;
  good.model = "gpt2";
  good.pre = "gpt-2";
  good.tokens = {"a", "b", "ab"};
  good.merges = {"a b"};
  ASSERT_TRUE(TokenizerSpecFromGguf(good).ok());
  const auto expect = [&good](const std::function<void(GgufTokenizerValues*)>& change, absl::StatusCode code, const char* words) {
    GgufTokenizerValues values = good;
    change(&values);
    const absl::Status status = TokenizerSpecFromGguf(values).status();
    EXPECT_EQ(status.code(), code) << words;
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
  };
  expect([](auto* v) { v->model = "llama"; }, absl::StatusCode::kUnimplemented, "tokenizer.ggml.model is 'llama'");
  expect([](auto* v) { v->pre = "mystery"; }, absl::StatusCode::kUnimplemented, "'mystery', known are smollm, gpt-2");
  expect([](auto* v) { v->token_types = {1, 1}; }, absl::StatusCode::kInvalidArgument, "2 entries for 3 tokens");
  expect([](auto* v) { v->bos_token_id = 3; }, absl::StatusCode::kInvalidArgument, "bos_token_id is 3, but there are 3 tokens");
  expect([](auto* v) { v->eos_token_id = -2; }, absl::StatusCode::kInvalidArgument, "eos_token_id is -2");
  expect([](auto* v) { v->merges = {"ab"}; }, absl::StatusCode::kInvalidArgument, "merge 0 ('ab')");
  expect([](auto* v) { v->merges = {"a "}; }, absl::StatusCode::kInvalidArgument, "merge 0 ('a ')");
  expect([](auto* v) { v->merges = {""}; }, absl::StatusCode::kInvalidArgument, "merge 0 ('')");
  expect([](auto* v) { v->add_bos_token = true; }, absl::StatusCode::kInvalidArgument, "add_bos_token without");
}

TEST(TokenizerTest, JsonFaultsAreNamed) {
  const Json golden = Golden("tokenizers/variants.json");
  const Json good = VariantJson(golden, "smollm");
  const auto expect = [&good](const std::function<void(Json*)>& change, absl::StatusCode code, const char* words) {
    Json root = good;
    change(&root);
    const absl::Status status = TokenizerSpecFromJson(root.dump(), "", "").status();
    EXPECT_EQ(status.code(), code) << words << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr auto kUnknown = absl::StatusCode::kUnimplemented;
  expect([](Json* j) { (*j)["model"]["type"] = "Unigram"; }, kUnknown, "model.type is 'Unigram'");
  expect([](Json* j) { (*j)["model"]["byte_fallback"] = true; }, kUnknown, "byte_fallback");
  expect([](Json* j) { (*j)["model"]["dropout"] = 0.1; }, kUnknown, "dropout");
  expect([](Json* j) { (*j)["model"]["end_of_word_suffix"] = "</w>"; }, kUnknown, "end_of_word_suffix is '</w>'");
  expect([](Json* j) { (*j)["model"]["vocab"] = Json::array(); }, kInvalid, "model.vocab is no object");
  expect([](Json* j) { (*j)["model"]["vocab"]["far"] = 4000000000u; }, kInvalid, "model.vocab['far']");
  expect([](Json* j) { (*j)["model"]["vocab"]["minus"] = -1; }, kInvalid, "model.vocab['minus']");
  expect([](Json* j) { (*j)["model"]["vocab"]["twin"] = 5; }, kInvalid, "gives id 5");
  expect([](Json* j) { (*j)["model"]["merges"][0] = "one two three"; }, kInvalid, "model.merges[0]");
  expect([](Json* j) { (*j)["model"]["merges"][0] = 7; }, kInvalid, "model.merges[0]");
  expect([](Json* j) { (*j)["model"].erase("merges"); }, kInvalid, "model.merges is no list");
  expect([](Json* j) { (*j)["added_tokens"][0]["single_word"] = true; }, kUnknown, "added_tokens[0]");
  expect([](Json* j) { (*j)["added_tokens"][1]["content"] = ""; }, kInvalid, "added_tokens[1]");
  expect([](Json* j) { (*j)["added_tokens"][1]["id"] = 3; }, kInvalid, "added_tokens[1] gives id 3");
  expect([](Json* j) { (*j)["normalizer"] = {{"type", "NFKC"}}; }, kUnknown, "normalizer 'NFKC'");
  expect([](Json* j) { (*j)["decoder"] = {{"type", "Metaspace"}}; }, kUnknown, "decoder 'Metaspace'");
  expect([](Json* j) { (*j)["pre_tokenizer"] = nullptr; }, kUnknown, "no ByteLevel");
  expect([](Json* j) { (*j)["pre_tokenizer"]["pretokenizers"][0] = {{"type", "Whitespace"}}; }, kUnknown, "'Whitespace'");
  expect([](Json* j) { (*j)["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = true; }, kUnknown, "add_prefix_space");
  expect(
      [](Json* j) {
        (*j)["pre_tokenizer"]["pretokenizers"].push_back({{"type", "Digits"}});
      },
      kUnknown, "'Digits' after ByteLevel");
  expect(
      [](Json* j) {
        (*j)["pre_tokenizer"]["pretokenizers"][0] = {{"type", "Split"}, {"pattern", {{"Regex", "x"}}}, {"behavior", "Removed"}};
      },
      kUnknown, "'Removed'");
  expect([](Json* j) { (*j)["post_processor"] = {{"type", "BertProcessing"}}; }, kUnknown, "'BertProcessing'");
  EXPECT_EQ(TokenizerSpecFromJson(std::string(100000, '['), "", "").status().code(), kInvalid);
  EXPECT_EQ(TokenizerSpecFromJson("{}", "", "").status().code(), kInvalid);
  EXPECT_EQ(TokenizerSpecFromJson("[1]", "", "").status().code(), kInvalid);
  EXPECT_EQ(TokenizerSpecFromJson(good.dump(), "{", "").status().code(), kInvalid);
}

TEST(TokenizerTest, StartTokenComesFromTheTemplateOrTheClass) {
  Json root = VariantJson(Golden("tokenizers/variants.json"), "gpt2");
  const TokenId start = root["added_tokens"][0]["id"];
  const Json processing = {
      {"type", "TemplateProcessing"},
      {"single", {{{"SpecialToken", {{"id", "<|start|>"}, {"type_id", 0}}}}, {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}}},
      {"special_tokens", {{"<|start|>", {{"id", "<|start|>"}, {"ids", {start}}, {"tokens", {"<|start|>"}}}}}}};
  const auto prefix = [&root](const Json& config) {
    const absl::StatusOr<TokenizerSpec> spec = TokenizerSpecFromJson(root.dump(), config.dump(), "");
    EXPECT_TRUE(spec.ok()) << spec.status();
    return spec.ok() ? spec->prefix_ids : std::vector<TokenId>{999};
  };
  const Json plain = {{"bos_token", {{"content", "<|start|>"}}}, {"add_bos_token", true}};
  const Json llama = {{"bos_token", "<|start|>"}, {"add_bos_token", true}, {"tokenizer_class", "LlamaTokenizerFast"}};
  const Json llama_without = {{"bos_token", "<|start|>"}, {"add_bos_token", false}, {"tokenizer_class", "LlamaTokenizerFast"}};
  EXPECT_THAT(prefix(plain), IsEmpty());
  EXPECT_THAT(prefix(llama), ElementsAre(start));
  root["post_processor"] = {{"type", "Sequence"}, {"processors", {{{"type", "ByteLevel"}}, processing}}};
  EXPECT_THAT(prefix(plain), ElementsAre(start));
  EXPECT_THAT(prefix(llama), ElementsAre(start));
  EXPECT_THAT(prefix(llama_without), IsEmpty());

  std::swap(root["post_processor"]["processors"][1]["single"][0], root["post_processor"]["processors"][1]["single"][1]);
  EXPECT_EQ(TokenizerSpecFromJson(root.dump(), "", "").status().code(), absl::StatusCode::kUnimplemented);
}

TEST(TokenizerTest, ChatTemplateOfItsOwnFileComesFirst) {
  const std::string root = VariantJson(Golden("tokenizers/variants.json"), "gpt2").dump();
  const Json one = {{"chat_template", "in config"}, {"eos_token", "<|end|>"}};
  const Json many = {
      {"chat_template", {{{"name", "tool_use"}, {"template", "tools"}}, {{"name", "default"}, {"template", "plain"}}}}};
  EXPECT_EQ(TokenizerSpecFromJson(root, one.dump(), "")->chat_template, "in config");
  EXPECT_EQ(TokenizerSpecFromJson(root, one.dump(), "")->eos_text, "<|end|>");
  EXPECT_EQ(TokenizerSpecFromJson(root, many.dump(), "")->chat_template, "plain");
  EXPECT_EQ(TokenizerSpecFromJson(root, many.dump(), "own file")->chat_template, "own file");
}

TEST(TokenizerTest, MergesAsTextAndAsPairsAreTheSame) {
  Json root = VariantJson(Golden("tokenizers/variants.json"), "gpt2");
  const auto pairs = TokenizerSpecFromJson(root.dump(), "", "");
  for (Json& merge : root["model"]["merges"]) merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
  const auto texts = TokenizerSpecFromJson(root.dump(), "", "");
  ASSERT_TRUE(pairs.ok() && texts.ok()) << pairs.status() << texts.status();
  EXPECT_EQ(pairs->merges, texts->merges);
}

TEST(TokenizerTest, IdsStandForTheBytesTheyCameFrom) {
  for (const char* name : {"gpt2", "smollm", "llama3", "three_splits"}) {
    TokenizerSpec spec = VariantSpec(name);
    std::erase_if(spec.added_tokens, [](const AddedToken& added) { return added.strips_left; });
    const auto tokenizer = MakeTokenizer(spec);
    for (std::uint64_t seed = 0; seed < 300; ++seed) {
      for (const bool with_ill_formed : {false, true}) {
        const std::string text = RandomText(seed, with_ill_formed);
        for (const ControlTokens control : {ControlTokens::kParse, ControlTokens::kLiteral}) {
          const std::vector<TokenId> ids = tokenizer->Encode(text, control);
          ASSERT_EQ(BytesOf(*tokenizer, ids), text) << name << " seed " << seed;
          if (!with_ill_formed) { ASSERT_EQ(tokenizer->Decode(ids, /*skip_special=*/false), text) << name << " seed " << seed; }
        }
      }
    }
  }
}

// CASES C04
TEST(IncrementalDetokenizerTest, HoldsBackHalfACharacter) {
  const auto tokenizer = MakeTokenizer(VariantSpec("gpt2"));
  std::vector<TokenId> bytes;
  for (const char byte : std::string("\xf0\x9f\x98\x80")) {
    const std::vector<TokenId> ids = tokenizer->Encode(std::string(1, byte), ControlTokens::kLiteral);
    ASSERT_EQ(ids.size(), 1u);
    bytes.push_back(ids[0]);
  }
  IncrementalDetokenizer cut_off(tokenizer);
  EXPECT_EQ(cut_off.Push(bytes[0]), "");
  EXPECT_EQ(cut_off.Push(bytes[1]), "");
  EXPECT_EQ(cut_off.Finish(), "\ufffd");
  EXPECT_EQ(cut_off.Finish(), "");

  IncrementalDetokenizer whole(tokenizer);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(whole.Push(bytes[static_cast<std::size_t>(i)]), "");
  EXPECT_EQ(whole.Push(bytes[3]), "\U0001f600");
  EXPECT_EQ(whole.Finish(), "");

  // A letter after half a character: the half is certain to stay one.
  IncrementalDetokenizer broken(tokenizer);
  EXPECT_EQ(broken.Push(bytes[0]), "");
  EXPECT_EQ(broken.Push(tokenizer->Encode("x", ControlTokens::kLiteral)[0]), "\ufffdx");
}

// CASES C04
TEST(IncrementalDetokenizerTest, PiecesJoinedAreTheWhole) {
  const auto tokenizer = MakeTokenizer(VariantSpec("gpt2"));
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    std::vector<TokenId> ids = tokenizer->Encode(RandomText(seed, /*with_ill_formed=*/true), ControlTokens::kParse);
    for (std::uint64_t i = 0; i < 20; ++i)
      ids.push_back(static_cast<TokenId>(RandomBelow(seed, 5000 + i, tokenizer->vocab_size() + 3)));
    IncrementalDetokenizer detokenizer(tokenizer);
    std::string text;
    for (const TokenId id : ids) {
      const std::string piece = detokenizer.Push(id);
      EXPECT_EQ(Json(piece).dump(-1, ' ', false, Json::error_handler_t::replace), Json(piece).dump()) << "not whole characters";
      text += piece;
    }
    text += detokenizer.Finish();
    EXPECT_EQ(text, tokenizer->Decode(ids, /*skip_special=*/true)) << "seed " << seed;
  }
}

TEST(TokenizerTest, IllFormedTextBecomesOneReplacementAMaximalPiece) {
  const auto tokenizer = MakeTokenizer(VariantSpec("gpt2"));
  // What Python's decode(errors="replace") gives.
  for (const auto& [bytes, text] : {std::pair<std::string, std::string>{"a\x80z", "a\ufffdz"},
                                    {"\xf0\x9f\x98", "\ufffd"},
                                    {"\xf0\x9f\x98z", "\ufffdz"},
                                    {"\xed\xa0\x80", "\ufffd\ufffd\ufffd"},
                                    {"\xe0\x80\x80", "\ufffd\ufffd\ufffd"},
                                    {"\xc0\xaf", "\ufffd\ufffd"},
                                    {"\xf4\x90\x80\x80", "\ufffd\ufffd\ufffd\ufffd"},
                                    {"\xe4\xbd\xe4\xbd\xa0", "\ufffd\u4f60"}}) {
    EXPECT_EQ(tokenizer->Decode(tokenizer->Encode(bytes, ControlTokens::kLiteral), false), text);
  }
}

TEST(TokenizerTest, ControlTokensLieWhollyInsideOneRange) {
  const auto tokenizer = MakeTokenizer(VariantSpec("gpt2"));
  const TokenId end = IdOf(*tokenizer, "<|end|>");
  const std::string text = "ab<|end|>c";
  const auto count = [&](std::vector<TextRange> ranges) {
    const std::vector<TokenId> ids = tokenizer->EncodeMarked(text, ranges);
    EXPECT_EQ(BytesOf(*tokenizer, ids), text);
    return std::count(ids.begin(), ids.end(), end);
  };
  EXPECT_EQ(count({{0, 10}}), 1);
  EXPECT_EQ(count({{2, 9}}), 1);
  EXPECT_EQ(count({{0, 1}, {2, 9}, {9, 10}}), 1);
  EXPECT_EQ(count({}), 0);
  EXPECT_EQ(count({{2, 8}, {8, 10}}), 0);
  EXPECT_EQ(count({{3, 10}}), 0);
  EXPECT_EQ(count({{0, 8}}), 0);
  // Borders of ranges do not cut the text.
  const std::vector<TextRange> inside_a_word = {{0, 3}};
  EXPECT_EQ(tokenizer->EncodeMarked("the cat sat", inside_a_word), tokenizer->Encode("the cat sat", ControlTokens::kParse));
}

TEST(TokenizerTest, OrdinaryTextNeverBecomesASpecialToken) {
  TokenizerSpec spec;
  spec.tokens = {"<", ">", "<>"};
  spec.added_tokens = {{.id = 2, .text = "<>", .is_special = true}};
  EXPECT_THAT(MakeTokenizer(spec)->Encode("<>", ControlTokens::kLiteral), ElementsAre(0, 1));
  EXPECT_THAT(MakeTokenizer(spec)->Encode("<>", ControlTokens::kParse), ElementsAre(2));
  spec.ignore_merges = true;
  EXPECT_THAT(MakeTokenizer(spec)->Encode("<>", ControlTokens::kLiteral), ElementsAre(0, 1));
  spec.merges = {{"<", ">"}};
  const absl::Status status = Tokenizer::Create(spec).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("merge 0 ('<' with '>') needs '<>'"));
}

TEST(TokenizerTest, SpecFaultsAreNamed) {
  TokenizerSpec good;
  good.tokens = {"a", "b"};
  ASSERT_TRUE(Tokenizer::Create(good).ok());
  const auto expect = [&good](const std::function<void(TokenizerSpec*)>& change, const char* words) {
    TokenizerSpec spec = good;
    change(&spec);
    const absl::Status status = Tokenizer::Create(spec).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << words;
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
  };
  expect([](auto* s) { s->tokens.clear(); }, "0 tokens");
  expect([](auto* s) { s->tokens[1] = "\xff"; }, "token 1 is not UTF-8");
  expect([](auto* s) { s->merges = {{"a", "x"}}; }, "needs 'x'");
  expect([](auto* s) { s->merges = {{"a", "b"}}; }, "needs 'ab'");
  expect([](auto* s) { s->added_tokens = {{.id = 2, .text = "x"}}; }, "added token 2, but there are 2 tokens");
  expect([](auto* s) { s->added_tokens = {{.id = 1, .text = ""}}; }, "added token 1 has an empty text");
  expect([](auto* s) { s->prefix_ids = {9}; }, "start token 9");
  expect([](auto* s) { s->split_patterns = {"a", "(b"}; }, "split pattern '(b' fails near byte 2");
  expect([](auto* s) { s->split_patterns = {std::string(20000, 'a')}; }, "20000 bytes");
  expect([](auto* s) { s->split_patterns.assign(17, "a"); }, "17 split patterns");
}

TEST(TokenizerTest, SpecSurvivesThePool) {
  const Json golden = Golden("tokenizers/variants.json");
  for (const Json& variant : golden["variants"]) {
    TokenizerSpec spec = VariantSpec(variant["name"].get<std::string>());
    spec.prefix_ids = {3, 1};
    spec.bos_text = "<|start|>";
    spec.chat_template = std::string("a\0b", 3);
    const std::string bytes = SerializeTokenizerSpec(spec);
    const absl::StatusOr<TokenizerSpec> back = ParseTokenizerSpec(bytes);
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_EQ(SerializeTokenizerSpec(*back), bytes);
    EXPECT_EQ(back->tokens, spec.tokens);
    EXPECT_EQ(back->merges, spec.merges);
    EXPECT_EQ(back->split_patterns, spec.split_patterns);
    EXPECT_EQ(back->prefix_ids, spec.prefix_ids);
    EXPECT_EQ(back->chat_template, spec.chat_template);
    ASSERT_EQ(back->added_tokens.size(), spec.added_tokens.size());
    EXPECT_TRUE(back->added_tokens[3].strips_left && back->added_tokens[3].strips_right && back->added_tokens[3].is_special);
  }
}

TEST(TokenizerTest, DamagedBytesOfASpecAreRefused) {
  TokenizerSpec spec = VariantSpec("smollm");
  const std::string bytes = SerializeTokenizerSpec(spec);
  for (std::size_t size = 0; size < bytes.size(); size += size < 64 || size + 64 > bytes.size() ? 1 : 37) {
    EXPECT_EQ(ParseTokenizerSpec(std::string_view(bytes).substr(0, size)).status().code(), absl::StatusCode::kInvalidArgument)
        << size;
  }
  EXPECT_EQ(ParseTokenizerSpec(bytes + "x").status().code(), absl::StatusCode::kInvalidArgument);
  // A flipped byte may leave a spec that is whole; it must never break the reader or the tokenizer made of it.
  int num_refused = 0;
  for (std::uint64_t i = 0; i < 400; ++i) {
    std::string damaged = bytes;
    const std::uint64_t at = i < 100 ? i : RandomBelow(1, i, bytes.size());
    damaged[at] = static_cast<char>(RandomBelow(2, i, 256));
    const absl::StatusOr<TokenizerSpec> parsed = ParseTokenizerSpec(damaged);
    if (!parsed.ok()) {
      ++num_refused;
      continue;
    }
    const auto tokenizer = Tokenizer::Create(*parsed);
    if (tokenizer.ok()) (*tokenizer)->Decode((*tokenizer)->Encode("the cat<|end|> 12", ControlTokens::kParse), false);
  }
  EXPECT_GT(num_refused, 50);
}

// Quadratic work would take hours here.
TEST(TokenizerTest, LongPiecesTakeNoQuadraticTime) {
  const auto tokenizer = MakeTokenizer(VariantSpec("llama3"));
  for (const std::string& unit :
       {std::string("the"), std::string(" "), std::string("<|en"), std::string("\n"), std::string("!?"), std::string("\xff")}) {
    std::string text;
    while (text.size() < 300'000) text += unit;
    EXPECT_EQ(BytesOf(*tokenizer, tokenizer->Encode(text, ControlTokens::kParse)), text);
  }
}

TEST(TokenizerTest, APatternWithoutEndLosesNoText) {
  TokenizerSpec spec = VariantSpec("gpt2");
  for (const char* pattern : {"(a+)+$", "(?:a|aa)+b", "x*", "(?=a)", "a\\K", ""}) {
    spec.split_patterns = {pattern, "a"};
    const auto tokenizer = MakeTokenizer(spec);
    const std::string text = std::string(5000, 'a') + "!xx";
    EXPECT_EQ(BytesOf(*tokenizer, tokenizer->Encode(text, ControlTokens::kParse)), text) << pattern;
  }
}

}  // namespace
}  // namespace tandem

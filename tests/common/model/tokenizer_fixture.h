// What the tokenizer's and the prompt encoder's tests share: golden files, the small tokenizers of tokenizers/variants.json, and
// the tokenizer of the real model where it lies in TANDEM_DEPS.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include <nlohmann/json.hpp>

#include "common/model/model_source.h"
#include "common/model/tokenizer.h"

namespace tandem {

using Json = nlohmann::json;

inline std::string ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

inline Json Golden(const std::string& name) { return Json::parse(ReadText(TANDEM_GOLDEN_DIR "/" + name)); }

// tokenizer.json of a row of tokenizers/variants.json.
inline Json VariantJson(const Json& golden, std::string_view name) {
  Json whole = golden["base"];
  for (const Json& variant : golden["variants"]) {
    if (variant["name"] != std::string(name)) continue;
    for (const char* key : {"pre_tokenizer", "normalizer"}) {
      if (variant["changes"].contains(key)) whole[key] = variant["changes"][key];
    }
    whole["model"]["ignore_merges"] = variant["changes"].value("ignore_merges", false);
    return whole;
  }
  ADD_FAILURE() << "no variant " << name;
  return whole;
}

inline TokenizerSpec VariantSpec(std::string_view name) {
  static const Json golden = Golden("tokenizers/variants.json");
  absl::StatusOr<TokenizerSpec> spec = TokenizerSpecFromJson(VariantJson(golden, name).dump(), "", "");
  EXPECT_TRUE(spec.ok()) << spec.status();
  return spec.ok() ? *std::move(spec) : TokenizerSpec();
}

inline std::shared_ptr<const Tokenizer> MakeTokenizer(TokenizerSpec spec) {
  absl::StatusOr<std::shared_ptr<const Tokenizer>> tokenizer = Tokenizer::Create(std::move(spec));
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return tokenizer.ok() ? *std::move(tokenizer) : nullptr;
}

inline TokenId IdOf(const Tokenizer& tokenizer, std::string_view text) {
  for (const AddedToken& added : tokenizer.spec().added_tokens) {
    if (added.text == text) return added.id;
  }
  ADD_FAILURE() << "no added token " << text;
  return 0;
}

// The real model's tokenizer; null where the file is not there.
inline std::shared_ptr<const Tokenizer> SmolLm2Tokenizer() {
  static const std::shared_ptr<const Tokenizer> tokenizer = []() -> std::shared_ptr<const Tokenizer> {
    const std::string path = TANDEM_DEPS "/models/SmolLM2-135M-Instruct.Q4_1.gguf";
    if (!std::filesystem::exists(path)) return nullptr;
    const absl::StatusOr<std::unique_ptr<ModelSource>> source = ModelSource::Open(path);
    EXPECT_TRUE(source.ok()) << source.status();
    return source.ok() ? MakeTokenizer((*source)->description().tokenizer) : nullptr;
  }();
  return tokenizer;
}

}  // namespace tandem

#define TANDEM_NEEDS_SMOLLM2() \
  if (SmolLm2Tokenizer() == nullptr) GTEST_SKIP() << "no SmolLM2-135M-Instruct.Q4_1.gguf in " TANDEM_DEPS "/models"

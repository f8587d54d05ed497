// A golden model of a family, loaded as a daemon loads it, and what transformers computes with it (tools/make_family_golden.py).
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "common/model/model_source.h"
#include "tests/support/naive_transformer.h"

namespace tandem::testing {

inline constexpr std::array<const char*, 3> kGoldenFamilies = {"llama3", "qwen2", "qwen3"};

struct FamilyGolden {
  ModelConfig config;
  WeightLayout layout;
  std::unique_ptr<AlignedBytes> weights;  // host memory, as `layout` says
  std::vector<std::uint32_t> token_ids;
  std::vector<std::vector<float>> prefill_logits;  // [token_ids.size() - 1][vocab_size]
  std::vector<double> prefill_logprobs;            // [token_ids.size() - 1]: of token i + 1 after tokens 0..i
  std::vector<float> decode_logits;                // [vocab_size], after the last token
};

inline FamilyGolden LoadFamilyGolden(const std::string& name, StorageFormat format = StorageFormat::kFp32) {
  const std::string directory = std::string(TANDEM_GOLDEN_DIR "/families/") + name;
  const auto source = ModelSource::Open(directory);
  EXPECT_TRUE(source.ok()) << source.status();
  FamilyGolden golden;
  golden.config = (*source)->description().config;
  golden.layout = WeightLayout::Create(golden.config, format);
  golden.weights = std::make_unique<AlignedBytes>(golden.layout.total_bytes);
  const absl::Status status = (*source)->LoadWeights(golden.layout, Device::kCpu, golden.weights->span(), [](std::uint64_t) {});
  EXPECT_TRUE(status.ok()) << status;
  std::ifstream file(directory + "/expected.json");
  const nlohmann::json expected = nlohmann::json::parse(file);
  expected.at("token_ids").get_to(golden.token_ids);
  expected.at("prefill_logits").get_to(golden.prefill_logits);
  expected.at("prefill_logprobs").get_to(golden.prefill_logprobs);
  expected.at("decode_logits").get_to(golden.decode_logits);
  EXPECT_EQ(golden.prefill_logits.size() + 1, golden.token_ids.size());
  return golden;
}

}  // namespace tandem::testing

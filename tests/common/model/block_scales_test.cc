// Checkpoints in E4M3 with a factor for each block of 128 x 128 weights.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "common/model/model_source.h"
#include "tests/common/model/loaded_model.h"
#include "tests/support/block_scaled_model.h"
#include "tests/support/temporary_directory.h"

namespace tandem {
namespace {

using testing::BlockScaledModel;
using testing::SavedTensor;
using testing::SavedTensors;
using testing::TemporaryDirectory;

// 1088 = 8.5 blocks; kv has 4.25, the MLP 9.5. q is read in two stripes, of which the second begins within a block.
constexpr TinyModelOptions OddModel() {
  return {.num_layers = 1, .hidden_size = 1088, .intermediate_size = 1216, .num_heads = 68, .num_kv_heads = 34};
}

// Each fused layer and the tensors of the file that it is made of.
void ForEachLinear(const WeightLayout& layout,
                   const std::function<void(const LinearPlace&, const std::vector<std::string>&)>& visit) {
  for (std::size_t i = 0; i < layout.layers.size(); ++i) {
    const LayerPlaces& places = layout.layers[i];
    const auto names = [i](std::initializer_list<const char*> parts) {
      std::vector<std::string> full;
      for (const char* const part : parts) full.push_back(absl::StrCat("model.layers.", i, ".", part, "_proj.weight"));
      return full;
    };
    visit(places.qkv, names({"self_attn.q", "self_attn.k", "self_attn.v"}));
    visit(places.o, names({"self_attn.o"}));
    visit(places.gate_up, names({"mlp.gate", "mlp.up"}));
    visit(places.down, names({"mlp.down"}));
  }
}

TEST(BlockScalesTest, EachWeightIsItsCodeTimesTheFactorOfItsBlock) {
  const TemporaryDirectory directory;
  const BlockScaledModel saved(directory.path(), OddModel());
  const LoadedModel model = Load(directory.path());
  ForEachLinear(model.layout, [&](const LinearPlace& place, const std::vector<std::string>& names) {
    const float* weight = model.Values(place);
    for (const std::string& name : names) {
      for (const float value : saved.values.at(name)) ASSERT_EQ(*weight++, value) << name;
    }
  });
}

TEST(BlockScalesTest, CodesAndFactorsLieInTheRegionAsInTheFile) {
  const TemporaryDirectory directory;
  const BlockScaledModel saved(directory.path(), OddModel());
  const LoadedModel model = Load(directory.path(), StorageFormat::kFp8Block);
  ForEachLinear(model.layout, [&](const LinearPlace& place, const std::vector<std::string>& names) {
    ASSERT_EQ(place.parts.size(), names.size());
    EXPECT_EQ(place.begin_bytes % 256, 0u) << place.name;
    const float* scale = model.Values(*place.scales);
    for (std::size_t p = 0; p < names.size(); ++p) {
      const SavedTensor& codes = saved.tensors.at(names[p]);
      const std::byte* const part = model.region.data() + place.begin_bytes + place.parts[p].row_begin * place.shape[1];
      ASSERT_EQ(std::memcmp(part, codes.bytes.data(), codes.bytes.size()), 0) << names[p];
      EXPECT_EQ(scale, model.Values(*place.scales) + place.parts[p].scale_row_begin * place.scales->shape[1]) << names[p];
      for (const float value : ValuesInFiles(directory.path(), names[p] + "_scale_inv")) ASSERT_EQ(*scale++, value) << names[p];
    }
    EXPECT_EQ(scale, model.Values(*place.scales) + place.scales->size_bytes / sizeof(float)) << place.name;
  });
  const LinearPlace& qkv = model.layout.layers[0].qkv;  // 9 + 5 + 5 rows of factors, which do not run on from q to k
  EXPECT_EQ(qkv.scales->shape, (std::vector<std::int64_t>{19, 9}));
  EXPECT_NE(model.layout.digest, WeightLayout::Create(model.description.config, StorageFormat::kFp8Row).digest);
  const std::vector<float>& embedding = saved.values.at("model.embed_tokens.weight");
  const auto* rounded = reinterpret_cast<const std::uint16_t*>(model.region.data() + model.layout.embedding.begin_bytes);
  for (std::size_t i = 0; i < embedding.size(); ++i) ASSERT_EQ(rounded[i], FloatToBf16(embedding[i])) << i;
}

TEST(BlockScalesTest, AGpuKeepsTheCheckpointsBlocksUnlessAnotherFormatIsAskedFor) {
  const TemporaryDirectory directory;
  const std::string plain = directory.File("plain"), mixed = directory.File("mixed");
  BlockScaledModel saved(directory.path(), {});
  ASSERT_TRUE(WriteTinyModel(plain, {}).ok());
  // One linear layer as it was.
  ASSERT_TRUE(WriteTinyModel(mixed, {}).ok());
  const std::string down = "model.layers.1.mlp.down_proj.weight";
  saved.tensors[down] = testing::ReadTensors(plain).at(down);
  saved.tensors.erase(down + "_scale_inv");
  testing::WriteTensors(mixed, saved.tensors);

  const auto choose = [](const std::string& path, std::optional<StorageFormat> wanted, Device device = Device::kCuda) {
    const auto source = ModelSource::Open(path);
    EXPECT_TRUE(source.ok()) << source.status();
    return ChooseStorageFormat(wanted, device, **source);
  };
  const auto expect = [](const absl::StatusOr<StorageFormat>& format, StorageFormat expected) {
    ASSERT_TRUE(format.ok()) << format.status();
    EXPECT_STREQ(StorageFormatName(*format), StorageFormatName(expected));
  };
  expect(choose(directory.path(), std::nullopt), StorageFormat::kFp8Block);
  expect(choose(directory.path(), StorageFormat::kFp8Row), StorageFormat::kFp8Block);
  expect(choose(directory.path(), StorageFormat::kFp8Block), StorageFormat::kFp8Block);
  expect(choose(directory.path(), StorageFormat::kBf16), StorageFormat::kBf16);
  expect(choose(directory.path(), StorageFormat::kNf4), StorageFormat::kNf4);
  expect(choose(directory.path(), std::nullopt, Device::kCpu), StorageFormat::kFp32);
  for (const std::string& path : {plain, mixed}) {
    expect(choose(path, std::nullopt), StorageFormat::kBf16);
    expect(choose(path, StorageFormat::kFp8Row), StorageFormat::kFp8Row);
    EXPECT_EQ(choose(path, StorageFormat::kFp8Block).status().message(),
              "weights in fp8_block: the model's files do not hold every linear layer in E4M3 with block scales; fp8 makes codes "
              "of any");
  }
  EXPECT_EQ(choose(directory.path(), StorageFormat::kFp8Block, Device::kCpu).status().message(),
            "weights in fp8_block: the CPU computes with fp32");
  EXPECT_EQ(choose("random:smollm2-135m", StorageFormat::kFp8Block).status().code(), absl::StatusCode::kInvalidArgument);

  const std::string narrow = directory.File("narrow");  // rows of 24 codes
  const BlockScaledModel odd(narrow, {.intermediate_size = 24});
  EXPECT_EQ(choose(narrow, std::nullopt).status().message(),
            "weights in fp8_block: down_proj of narrow has 24 inputs, no multiple of 16");
  expect(choose(narrow, StorageFormat::kBf16), StorageFormat::kBf16);
}

TEST(BlockScalesTest, WhatABlockCannotHoldIsRefusedByName) {
  const std::string weight = "model.layers.1.self_attn.o_proj.weight", scales = weight + "_scale_inv";
  const auto load = [&](const std::function<void(SavedTensors*)>& change) {
    const TemporaryDirectory directory;
    BlockScaledModel saved(directory.path(), {});
    change(&saved.tensors);
    testing::WriteTensors(directory.path(), saved.tensors);
    const auto source = ModelSource::Open(directory.path());
    EXPECT_TRUE(source.ok()) << source.status();
    const WeightLayout layout = WeightLayout::Create((*source)->description().config, StorageFormat::kFp8Block);
    std::vector<std::byte> region(layout.total_bytes);
    return (*source)->LoadWeights(layout, Device::kCpu, region, nullptr);
  };
  const auto expect_refused = [&](const absl::Status& status, const std::string& part) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_NE(status.message().find(absl::StrCat("tensor '", weight, "'")), absl::string_view::npos) << status;
    EXPECT_NE(status.message().find(part), absl::string_view::npos) << status;
  };
  EXPECT_EQ(load([](SavedTensors*) {}), absl::OkStatus());
  for (const std::byte nan : {std::byte{0x7f}, std::byte{0xff}}) {
    expect_refused(load([&](SavedTensors* t) { (*t)[weight].bytes[70] = nan; }), "a code is NaN, byte 70 of 4096");
  }
  for (const float scale : {INFINITY, NAN, 1e38F}) {
    expect_refused(load([&](SavedTensors* t) { std::memcpy((*t)[scales].bytes.data(), &scale, sizeof(scale)); }),
                   "a block's scale is ");
  }
  expect_refused(load([&](SavedTensors* t) {
                   (*t)[weight] = {"BF16", {64, 64}, std::vector<std::byte>(64 * 64 * 2)};
                   t->erase(scales);
                 }),
                 "is in BF16; fp8_block takes E4M3 with block scales as the files have it");
}

TEST(BlockScalesTest, WhatDoesNotFitIsRefusedByName) {
  const std::string weight = "model.layers.1.self_attn.o_proj.weight", scales = weight + "_scale_inv";
  const auto open = [&](const std::function<void(SavedTensors*)>& change, const nlohmann::json& quantization) {
    const TemporaryDirectory directory;
    BlockScaledModel saved(directory.path(), {});
    change(&saved.tensors);
    testing::WriteTensors(directory.path(), saved.tensors);
    testing::WriteQuantization(directory.path(), quantization);
    return ModelSource::Open(directory.path()).status();
  };
  const nlohmann::json good = testing::BlockQuantization();
  const auto keep = [](SavedTensors*) {};
  EXPECT_TRUE(open(keep, good).ok());
  EXPECT_TRUE(open(keep, nullptr).ok());  // each tensor says itself what it is
  const auto expect_refused = [&](const absl::Status& status, absl::StatusCode code, const std::string& part) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_NE(status.message().find(part), absl::string_view::npos) << status;
  };
  expect_refused(open([&](SavedTensors* t) { t->erase(scales); }, good), absl::StatusCode::kInvalidArgument, scales);
  expect_refused(open(
                     [&](SavedTensors* t) {
                       (*t)[scales] = {"F32", {2, 1}, std::vector<std::byte>(8)};
                     },
                     good),
                 absl::StatusCode::kInvalidArgument, "[1, 1]");
  expect_refused(open([&](SavedTensors* t) { (*t)[scales].dtype = "I32"; }, good), absl::StatusCode::kUnimplemented, "I32");
  expect_refused(open([&](SavedTensors* t) { (*t)["model.norm.weight_scale_inv"] = (*t)[scales]; }, good),
                 absl::StatusCode::kUnimplemented, "model.norm.weight_scale_inv");
  nlohmann::json other = good;
  other["weight_block_size"] = {64, 128};
  expect_refused(open(keep, other), absl::StatusCode::kUnimplemented, "weight_block_size [128,128]");
  other = good;
  other["quant_method"] = "gptq";
  expect_refused(open(keep, other), absl::StatusCode::kUnimplemented, "quant_method \"fp8\"");
}

}  // namespace
}  // namespace tandem

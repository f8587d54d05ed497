// Checkpoints in E4M3 with a factor for each block of 128 x 128 weights.
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "common/model/model_source.h"
#include "common/model/safetensors.h"
#include "common/model/weight_codecs.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/tiny_model.h"

namespace tandem {
namespace {

using testing::TemporaryDirectory;

struct Tensor {
  std::string dtype;
  std::vector<std::uint64_t> shape;
  std::vector<std::byte> bytes;
};
using Tensors = std::map<std::string, Tensor>;

Tensors ReadTensors(const std::string& path) {
  const auto file = SafetensorsFile::Open(path);
  EXPECT_TRUE(file.ok()) << file.status();
  Tensors tensors;
  for (const SafetensorsTensor& tensor : file->tensors()) {
    Tensor& read = tensors[tensor.name];
    read = {tensor.dtype, tensor.shape, std::vector<std::byte>(tensor.size_bytes)};
    EXPECT_TRUE(file->file().ReadAt(tensor.begin_bytes, read.bytes).ok());
  }
  return tensors;
}

void WriteTensors(const std::string& path, const Tensors& tensors) {
  std::vector<SafetensorsOutput> outputs;
  for (const auto& [name, tensor] : tensors) outputs.push_back({name, tensor.dtype, tensor.shape, {tensor.bytes}});
  const absl::Status status = WriteSafetensors(path, outputs, {});
  ASSERT_TRUE(status.ok()) << status;
}

void ChangeConfig(const std::string& directory, const nlohmann::json& quantization) {
  std::ifstream file(directory + "/config.json");
  nlohmann::json config = nlohmann::json::parse(file);
  config["quantization_config"] = quantization;
  ASSERT_TRUE(WriteFileAtomically(directory + "/config.json", config.dump()).ok());
}

nlohmann::json Quantization() {
  return {{"quant_method", "fp8"}, {"fmt", "e4m3"}, {"activation_scheme", "dynamic"}, {"weight_block_size", {128, 128}}};
}

// Puts each linear layer of `tensors` in E4M3 under factors of 0.01 to 0.02; values are what they then stand for, by name.
std::map<std::string, std::vector<float>> Quantize(Tensors* tensors) {
  std::map<std::string, std::vector<float>> values;
  Tensors added;
  for (auto& [name, tensor] : *tensors) {
    if (name.find("_proj.") == std::string::npos) continue;
    const std::uint64_t rows = tensor.shape[0], columns = tensor.shape[1], width = (columns + 127) / 128;
    const auto* weights = reinterpret_cast<const float*>(tensor.bytes.data());
    const bool is_bf16 = name.find("mlp") != std::string::npos;
    Tensor scales{is_bf16 ? "BF16" : "F32", {(rows + 127) / 128, width}, {}};
    std::vector<float> factors(scales.shape[0] * width), decoded(rows * columns);
    for (std::size_t i = 0; i < factors.size(); ++i) {
      factors[i] = Bf16ToFloat(FloatToBf16(0.01F + 0.01F * static_cast<float>(i) / static_cast<float>(factors.size())));
    }
    Tensor codes{"F8_E4M3", tensor.shape, std::vector<std::byte>(rows * columns)};
    for (std::uint64_t i = 0; i < decoded.size(); ++i) {
      const float factor = factors[i / columns / 128 * width + i % columns / 128];
      const std::uint8_t code = FloatToFp8E4m3(weights[i] / factor);
      codes.bytes[i] = std::byte{code};
      decoded[i] = Fp8E4m3ToFloat(code) * factor;
    }
    for (const float factor : factors) {
      const std::uint16_t narrow = FloatToBf16(factor);
      const auto bytes = is_bf16 ? std::as_bytes(std::span(&narrow, 1)) : std::as_bytes(std::span(&factor, 1));
      scales.bytes.insert(scales.bytes.end(), bytes.begin(), bytes.end());
    }
    values[name] = std::move(decoded);
    tensor = std::move(codes);
    added[name + "_scale_inv"] = std::move(scales);
  }
  tensors->merge(added);
  return values;
}

TEST(BlockScalesTest, EachWeightIsItsCodeTimesTheFactorOfItsBlock) {
  const TemporaryDirectory directory;
  // 1088 = 8.5 blocks; q is read in two stripes, of which the second begins within a block.
  ASSERT_TRUE(WriteTinyModel(directory.path(), {.num_layers = 1, .hidden_size = 1088, .num_heads = 68, .num_kv_heads = 34}).ok());
  Tensors tensors = ReadTensors(directory.File("model.safetensors"));
  const auto values = Quantize(&tensors);
  ASSERT_EQ(values.size(), 7u);
  WriteTensors(directory.File("model.safetensors"), tensors);
  ChangeConfig(directory.path(), Quantization());
  const auto source = ModelSource::Open(directory.path());
  ASSERT_TRUE(source.ok()) << source.status();
  const WeightLayout layout = WeightLayout::Create((*source)->description().config, StorageFormat::kFp32);
  std::vector<float> region(layout.total_bytes / sizeof(float));
  const absl::Status loaded = (*source)->LoadWeights(layout, Device::kCpu, std::as_writable_bytes(std::span(region)), nullptr);
  ASSERT_TRUE(loaded.ok()) << loaded;
  const LayerPlaces& places = layout.layers[0];
  const auto expect = [&](const LinearPlace& place, const std::vector<std::string>& names) {
    const float* weight = region.data() + place.begin_bytes / sizeof(float);
    for (const std::string& name : names) {
      const std::vector<float>& expected = values.at("model.layers.0." + name + "_proj.weight");
      for (const float value : expected) ASSERT_EQ(*weight++, value) << name;
    }
  };
  expect(places.qkv, {"self_attn.q", "self_attn.k", "self_attn.v"});
  expect(places.o, {"self_attn.o"});
  expect(places.gate_up, {"mlp.gate", "mlp.up"});
  expect(places.down, {"mlp.down"});
}

TEST(BlockScalesTest, WhatDoesNotFitIsRefusedByName) {
  const std::string weight = "model.layers.1.self_attn.o_proj.weight", scales = weight + "_scale_inv";
  const auto open = [&](const std::function<void(Tensors*)>& change, const nlohmann::json& quantization) {
    const TemporaryDirectory directory;
    EXPECT_TRUE(WriteTinyModel(directory.path(), {}).ok());
    Tensors tensors = ReadTensors(directory.File("model.safetensors"));
    Quantize(&tensors);
    change(&tensors);
    WriteTensors(directory.File("model.safetensors"), tensors);
    ChangeConfig(directory.path(), quantization);
    return ModelSource::Open(directory.path()).status();
  };
  const auto keep = [](Tensors*) {};
  EXPECT_TRUE(open(keep, Quantization()).ok());
  EXPECT_TRUE(open(keep, nullptr).ok());  // each tensor says itself what it is
  const auto expect_refused = [&](const absl::Status& status, absl::StatusCode code, const std::string& part) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_NE(status.message().find(part), absl::string_view::npos) << status;
  };
  expect_refused(open([&](Tensors* t) { t->erase(scales); }, Quantization()), absl::StatusCode::kInvalidArgument, scales);
  expect_refused(open(
                     [&](Tensors* t) {
                       (*t)[scales] = {"F32", {2, 1}, std::vector<std::byte>(8)};
                     },
                     Quantization()),
                 absl::StatusCode::kInvalidArgument, "[1, 1]");
  expect_refused(open([&](Tensors* t) { (*t)[scales].dtype = "I32"; }, Quantization()), absl::StatusCode::kUnimplemented, "I32");
  expect_refused(open([&](Tensors* t) { (*t)["model.norm.weight_scale_inv"] = (*t)[scales]; }, Quantization()),
                 absl::StatusCode::kUnimplemented, "model.norm.weight_scale_inv");
  nlohmann::json other = Quantization();
  other["weight_block_size"] = {64, 128};
  expect_refused(open(keep, other), absl::StatusCode::kUnimplemented, "weight_block_size [128,128]");
  other = Quantization();
  other["quant_method"] = "gptq";
  expect_refused(open(keep, other), absl::StatusCode::kUnimplemented, "quant_method \"fp8\"");
}

}  // namespace
}  // namespace tandem

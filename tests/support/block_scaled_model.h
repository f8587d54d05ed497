// The tiny model as a checkpoint in E4M3 with a factor for each block of 128 x 128 weights of a linear layer, and what it holds.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <initializer_list>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "common/model/model_file.h"
#include "common/model/safetensors.h"
#include "common/model/weight_codecs.h"
#include "tests/support/naive_transformer.h"
#include "tests/support/tiny_model.h"

namespace tandem::testing {

struct SavedTensor {
  std::string dtype;
  std::vector<std::uint64_t> shape;
  std::vector<std::byte> bytes;
};
using SavedTensors = std::map<std::string, SavedTensor>;

inline SavedTensors ReadTensors(const std::string& directory) {
  const auto file = SafetensorsFile::Open(directory + "/model.safetensors");
  EXPECT_TRUE(file.ok()) << file.status();
  SavedTensors tensors;
  for (const SafetensorsTensor& tensor : file->tensors()) {
    SavedTensor& read = tensors[tensor.name];
    read = {tensor.dtype, tensor.shape, std::vector<std::byte>(tensor.size_bytes)};
    EXPECT_TRUE(file->file().ReadAt(tensor.begin_bytes, read.bytes).ok());
  }
  return tensors;
}

inline void WriteTensors(const std::string& directory, const SavedTensors& tensors) {
  std::vector<SafetensorsOutput> outputs;
  for (const auto& [name, tensor] : tensors) outputs.push_back({name, tensor.dtype, tensor.shape, {tensor.bytes}});
  const absl::Status status = WriteSafetensors(directory + "/model.safetensors", outputs, {});
  ASSERT_TRUE(status.ok()) << status;
}

inline nlohmann::json BlockQuantization() {
  return {{"quant_method", "fp8"}, {"fmt", "e4m3"}, {"activation_scheme", "dynamic"}, {"weight_block_size", {128, 128}}};
}
inline void WriteQuantization(const std::string& directory, const nlohmann::json& quantization) {
  std::ifstream file(directory + "/config.json");
  nlohmann::json config = nlohmann::json::parse(file);
  config["quantization_config"] = quantization;
  ASSERT_TRUE(WriteFileAtomically(directory + "/config.json", config.dump()).ok());
}

// fp32 values to E4M3 under the factors that make the largest of each block 448, rounded to bf16, which those of the MLP are
// written in. Returns what the codes stand for, in fp32.
inline std::vector<float> QuantizeInBlocks(const std::string& name, SavedTensors* tensors) {
  SavedTensor& tensor = tensors->at(name);
  const std::uint64_t rows = tensor.shape[0], columns = tensor.shape[1], width = (columns + 127) / 128;
  const auto block_of = [&](std::uint64_t i) { return i / columns / 128 * width + i % columns / 128; };
  std::vector<float> weights(rows * columns), factors((rows + 127) / 128 * width);
  std::memcpy(weights.data(), tensor.bytes.data(), tensor.bytes.size());
  for (std::uint64_t i = 0; i < weights.size(); ++i) {
    float& factor = factors[block_of(i)];
    factor = std::max(factor, std::fabs(weights[i]) / kFp8E4m3Max);
  }
  for (float& factor : factors) factor = Bf16ToFloat(FloatToBf16(factor));
  SavedTensor codes{"F8_E4M3", tensor.shape, std::vector<std::byte>(rows * columns)};
  for (std::uint64_t i = 0; i < weights.size(); ++i) {
    const std::uint8_t code = FloatToFp8E4m3(weights[i] / factors[block_of(i)]);
    codes.bytes[i] = std::byte{code};
    weights[i] = Fp8E4m3ToFloat(code) * factors[block_of(i)];
  }
  const bool is_bf16 = name.find("mlp") != std::string::npos;
  SavedTensor scales{is_bf16 ? "BF16" : "F32", {(rows + 127) / 128, width}, {}};
  for (const float factor : factors) {
    const std::uint16_t narrow = FloatToBf16(factor);
    const auto bytes = is_bf16 ? std::as_bytes(std::span(&narrow, 1)) : std::as_bytes(std::span(&factor, 1));
    scales.bytes.insert(scales.bytes.end(), bytes.begin(), bytes.end());
  }
  tensor = std::move(codes);
  (*tensors)[name + "_scale_inv"] = std::move(scales);
  return weights;
}

struct BlockScaledModel {
  SavedTensors tensors;                              // as in the file
  std::map<std::string, std::vector<float>> values;  // what each stands for, without the factors

  BlockScaledModel(const std::string& directory, const TinyModelOptions& options) {
    EXPECT_TRUE(WriteTinyModel(directory, options).ok());
    const SavedTensors plain = ReadTensors(directory);
    tensors = plain;
    for (const auto& [name, tensor] : plain) {
      if (name.find("_proj.") != std::string::npos) {
        values[name] = QuantizeInBlocks(name, &tensors);
      } else {
        values[name].resize(tensor.bytes.size() / sizeof(float));
        std::memcpy(values[name].data(), tensor.bytes.data(), tensor.bytes.size());
      }
    }
    WriteTensors(directory, tensors);
    WriteQuantization(directory, BlockQuantization());
  }

  // As the naive transformer takes it.
  TinyModel AsTinyModel(const ModelConfig& config) const {
    TinyModel model(config);
    const auto put = [&](const TensorPlace& place, std::initializer_list<std::string> names) {
      float* next = model.Weight(place);
      for (const std::string& name : names) next = std::copy(values.at(name).begin(), values.at(name).end(), next);
      EXPECT_EQ(next, model.Weight(place) + place.size_bytes / sizeof(float)) << place.name;
    };
    put(model.layout.embedding, {"model.embed_tokens.weight"});
    for (std::size_t i = 0; i < model.layout.layers.size(); ++i) {
      const LayerPlaces& places = model.layout.layers[i];
      const std::string layer = "model.layers." + std::to_string(i) + ".", attention = layer + "self_attn.", mlp = layer + "mlp.";
      put(places.input_norm, {layer + "input_layernorm.weight"});
      put(places.qkv, {attention + "q_proj.weight", attention + "k_proj.weight", attention + "v_proj.weight"});
      put(places.o, {attention + "o_proj.weight"});
      put(places.post_norm, {layer + "post_attention_layernorm.weight"});
      put(places.gate_up, {mlp + "gate_proj.weight", mlp + "up_proj.weight"});
      put(places.down, {mlp + "down_proj.weight"});
    }
    put(model.layout.final_norm, {"model.norm.weight"});
    return model;  // whose head is its embedding
  }
};

}  // namespace tandem::testing

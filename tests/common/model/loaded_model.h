// Models on disk as tests of their readers look at them: loaded into memory, and the values that their files hold.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "common/model/model_source.h"
#include "common/model/safetensors.h"
#include "common/model/weight_codecs.h"

namespace tandem {

inline nlohmann::json ReadJson(const std::string& path) {
  std::ifstream file(path);
  return nlohmann::json::parse(file);
}

// A model loaded into memory of its own.
struct LoadedModel {
  ModelDescription description;
  std::string digest;
  WeightLayout layout;
  std::vector<std::byte> region;

  const float* Values(const TensorPlace& place) const {
    return reinterpret_cast<const float*>(region.data() + place.begin_bytes);
  }
};

inline LoadedModel Load(const std::string& path, StorageFormat format = StorageFormat::kFp32) {
  LoadedModel model;
  const auto source = ModelSource::Open(path);
  EXPECT_TRUE(source.ok()) << source.status();
  if (!source.ok()) return model;
  model.description = (*source)->description();
  model.digest = (*source)->digest();
  model.layout = WeightLayout::Create(model.description.config, format);
  model.region.resize(model.layout.total_bytes);
  std::uint64_t last_progress = 0;
  const absl::Status status = (*source)->LoadWeights(model.layout, Device::kCpu, model.region, [&](std::uint64_t bytes) {
    EXPECT_GE(bytes, last_progress);
    last_progress = bytes;
  });
  EXPECT_TRUE(status.ok()) << status;
  std::uint64_t tensor_bytes = 0;
  for (const TensorPlace* place : model.layout.Tensors()) {
    if (place->name != "nested_map") tensor_bytes += place->size_bytes;  // which is not the model's
  }
  EXPECT_EQ(last_progress, tensor_bytes);
  return model;
}

// The values of a tensor in the files of a directory, as fp32.
inline std::vector<float> ValuesInFiles(const std::string& directory, const std::string& name) {
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    if (entry.path().extension() != ".safetensors") continue;
    const auto file = SafetensorsFile::Open(entry.path());
    EXPECT_TRUE(file.ok()) << file.status();
    const SafetensorsTensor* tensor = file->Find(name);
    if (tensor == nullptr) continue;
    std::vector<std::byte> bytes(tensor->size_bytes);
    EXPECT_TRUE(file->file().ReadAt(tensor->begin_bytes, bytes).ok());
    const WeightCodec codec = *ParseCodec(tensor->dtype);
    std::vector<float> values(bytes.size() / BlockOf(codec).size_bytes);
    Decode(codec, bytes, values);
    return values;
  }
  ADD_FAILURE() << "no tensor " << name << " in " << directory;
  return {};
}

}  // namespace tandem

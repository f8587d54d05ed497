#include "common/model/peft_adapter.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "common/base/random.h"
#include "common/model/model_file.h"
#include "common/model/weight_codecs.h"
#include "tests/support/temporary_directory.h"

namespace tandem {
namespace {

using testing::TemporaryDirectory;

ModelConfig SmallModel() {
  ModelConfig config;
  config.family = "llama";
  config.num_layers = 2;
  config.hidden_size = 24;
  config.intermediate_size = 40;
  config.num_heads = 3;
  config.num_kv_heads = 1;
  config.head_dim = 8;
  config.vocab_size = 50;
  config.max_positions = 64;
  return config;
}

PeftConfig SmallConfig() {
  return {.rank = 5,
          .alpha = 16,
          .use_rslora = false,
          .targets = {LinearKind::kQProj, LinearKind::kVProj, LinearKind::kDownProj},
          .base_model = "base"};
}

// Random values where the layout has matrices, zero between them.
std::vector<std::byte> RandomSlot(const AdapterLayout& layout) {
  std::vector<std::byte> slot(layout.total_bytes);
  std::uint64_t counter = 0;
  const auto fill = [&](std::uint64_t begin_bytes, int num_values) {
    for (int i = 0; i < num_values; ++i) {
      const auto value = static_cast<float>(RandomUniform(1, counter++) - 0.5);
      std::memcpy(slot.data() + begin_bytes + static_cast<std::size_t>(i) * sizeof(float), &value, sizeof(value));
    }
  };
  for (const AdapterPlace& place : layout.places) {
    fill(place.a_begin_bytes, layout.rank * place.shape.inputs);
    fill(place.b_begin_bytes, layout.rank * place.shape.outputs);
  }
  return slot;
}

class PeftAdapterTest : public ::testing::Test {
 protected:
  void SetUp() override {
    layout_ = AdapterLayout::Create(model_, config_.rank, config_.targets);
    slot_ = RandomSlot(layout_);
    const absl::Status status = WritePeftAdapter(path_, model_, config_, slot_);
    ASSERT_TRUE(status.ok()) << status;
    std::ifstream file(path_ + "/adapter_config.json");
    json_ = nlohmann::json::parse(file);
  }
  // The result of opening the adapter with another adapter_config.json.
  absl::Status OpenWith(const nlohmann::json& json) {
    EXPECT_TRUE(WriteFileAtomically(path_ + "/adapter_config.json", json.dump()).ok());
    return PeftAdapter::Open(path_, model_).status();
  }
  absl::Status OpenWithField(const std::string& field, const nlohmann::json& value) {
    nlohmann::json json = json_;
    json[field] = value;
    return OpenWith(json);
  }

  const ModelConfig model_ = SmallModel();
  const PeftConfig config_ = SmallConfig();
  const TemporaryDirectory directory_;
  const std::string path_ = directory_.File("adapter");
  AdapterLayout layout_;
  std::vector<std::byte> slot_;
  nlohmann::json json_;
};

TEST_F(PeftAdapterTest, WrittenSlotIsReadBackBitForBit) {
  const auto adapter = PeftAdapter::Open(path_, model_);
  ASSERT_TRUE(adapter.ok()) << adapter.status();
  EXPECT_EQ(adapter->config().rank, 5);
  EXPECT_EQ(adapter->config().alpha, 16.0);
  EXPECT_EQ(adapter->config().targets, config_.targets);
  EXPECT_EQ(adapter->config().base_model, "base");
  ASSERT_EQ(adapter->layout().total_bytes, layout_.total_bytes);
  std::vector<std::byte> read(layout_.total_bytes);
  ASSERT_TRUE(adapter->Load(read).ok());
  EXPECT_EQ(read, slot_);
  read.pop_back();
  EXPECT_EQ(adapter->Load(read).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(PeftAdapterTest, FilesAreAsPeftNamesThem) {
  EXPECT_EQ(json_.at("peft_type"), "LORA");
  EXPECT_EQ(json_.at("r"), 5);
  EXPECT_TRUE(json_.at("lora_alpha").is_number_integer());
  EXPECT_EQ(json_.at("target_modules"), nlohmann::json({"q_proj", "v_proj", "down_proj"}));
  const auto file = SafetensorsFile::Open(path_ + "/adapter_model.safetensors");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->tensors().size(), 12u);
  const SafetensorsTensor* a = file->Find("base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight");
  ASSERT_NE(a, nullptr);
  EXPECT_EQ(a->shape, (std::vector<std::uint64_t>{5, 24}));
  const SafetensorsTensor* b = file->Find("base_model.model.model.layers.0.mlp.down_proj.lora_B.weight");
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(b->shape, (std::vector<std::uint64_t>{24, 5}));
  std::vector<std::byte> values(b->size_bytes);
  ASSERT_TRUE(file->file().ReadAt(b->begin_bytes, values).ok());
  EXPECT_EQ(layout_.places[2].kind, LinearKind::kDownProj);
  EXPECT_EQ(std::memcmp(values.data(), slot_.data() + layout_.places[2].b_begin_bytes, values.size()), 0);
}

// CASES C17
TEST_F(PeftAdapterTest, ScaleIsAlphaOverRankOrOverItsRoot) {
  PeftConfig sixteen;
  sixteen.rank = 16;
  sixteen.alpha = 32;
  EXPECT_EQ(sixteen.scale(), 2.0);
  sixteen.use_rslora = true;
  EXPECT_EQ(sixteen.scale(), 8.0);
  ASSERT_TRUE(OpenWithField("use_rslora", true).ok());
  EXPECT_EQ(PeftAdapter::Open(path_, model_)->config().scale(), 16 / std::sqrt(5.0));
  ASSERT_TRUE(OpenWithField("lora_alpha", 12.5).ok());
  EXPECT_EQ(PeftAdapter::Open(path_, model_)->config().scale(), 2.5);
  PeftConfig fraction = config_;
  fraction.alpha = 0.75;
  fraction.use_rslora = true;
  ASSERT_TRUE(WritePeftAdapter(path_, model_, fraction, slot_).ok());
  EXPECT_EQ(PeftAdapter::Open(path_, model_)->config().scale(), 0.75 / std::sqrt(5.0));
}

// CASES C17
TEST_F(PeftAdapterTest, RankOrAlphaMissingIsRefused) {
  for (const char* field : {"r", "lora_alpha", "target_modules"}) {
    nlohmann::json json = json_;
    json.erase(field);
    for (int i = 0; i < 2; ++i) {
      const absl::Status status = OpenWith(json);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_NE(status.message().find(ToAbsl(absl::StrCat("adapter_config.json: ", field, " is missing"))),
                absl::string_view::npos)
          << status;
      json[field] = nullptr;
    }
  }
  for (const nlohmann::json& rank : std::vector<nlohmann::json>{0, -1, 1025, 5.0, "5", true, 4}) {
    EXPECT_EQ(OpenWithField("r", rank).code(), absl::StatusCode::kInvalidArgument) << rank;
  }
  for (const nlohmann::json& alpha : std::vector<nlohmann::json>{0, -16, "16", true}) {
    EXPECT_EQ(OpenWithField("lora_alpha", alpha).code(), absl::StatusCode::kInvalidArgument) << alpha;
  }
}

TEST_F(PeftAdapterTest, WhatWouldComputeSomethingElseIsRefused) {
  const std::map<std::string, nlohmann::json> refused = {{"peft_type", "IA3"},
                                                         {"use_dora", true},
                                                         {"bias", "lora_only"},
                                                         {"lora_bias", true},
                                                         {"fan_in_fan_out", true},
                                                         {"modules_to_save", {"lm_head"}},
                                                         {"rank_pattern", {{"q_proj", 4}}},
                                                         {"alpha_pattern", {{"q_proj", 4}}},
                                                         {"layers_to_transform", {0}},
                                                         {"init_lora_weights", "pissa"},
                                                         {"target_modules", ".*proj"}};
  for (const auto& [field, value] : refused) {
    const absl::Status status = OpenWithField(field, value);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << field << ": " << status;
    EXPECT_NE(status.message().find(ToAbsl(field)), absl::string_view::npos) << status;
  }
  EXPECT_EQ(OpenWithField("target_modules", {"q_proj", "v_proj", "down_proj", "lm_head"}).code(),
            absl::StatusCode::kUnimplemented);
  for (const auto& [field, value] : std::map<std::string, nlohmann::json>{{"modules_to_save", nlohmann::json::array()},
                                                                          {"use_dora", false},
                                                                          {"init_lora_weights", "gaussian"},
                                                                          {"lora_dropout", 0.1}}) {
    EXPECT_TRUE(OpenWithField(field, value).ok()) << field;
  }
}

TEST_F(PeftAdapterTest, TensorsFitTheConfigAndTheModel) {
  EXPECT_EQ(OpenWithField("target_modules", {"q_proj", "k_proj"}).code(), absl::StatusCode::kInvalidArgument);  // one is missing
  EXPECT_EQ(OpenWithField("target_modules", {"q_proj"}).code(), absl::StatusCode::kUnimplemented);  // some are left over
  EXPECT_TRUE(OpenWith(json_).ok());
  ModelConfig wider = model_;
  wider.hidden_size = 48;
  EXPECT_EQ(PeftAdapter::Open(path_, wider).status().code(), absl::StatusCode::kInvalidArgument);
  ModelConfig shallower = model_;
  shallower.num_layers = 1;
  EXPECT_EQ(PeftAdapter::Open(path_, shallower).status().code(), absl::StatusCode::kUnimplemented);
  std::filesystem::remove(path_ + "/adapter_model.safetensors");
  EXPECT_TRUE(absl::IsNotFound(PeftAdapter::Open(path_, model_).status()));
}

TEST_F(PeftAdapterTest, Bf16TensorsAreWidened) {
  std::map<std::string, std::vector<std::uint16_t>> values;
  const auto file = SafetensorsFile::Open(path_ + "/adapter_model.safetensors");
  ASSERT_TRUE(file.ok());
  std::vector<SafetensorsOutput> outputs;
  for (const SafetensorsTensor& tensor : file->tensors()) {
    std::vector<float> wide(tensor.size_bytes / sizeof(float));
    ASSERT_TRUE(file->file().ReadAt(tensor.begin_bytes, std::as_writable_bytes(std::span(wide))).ok());
    std::vector<std::uint16_t>& narrow = values[tensor.name];
    for (const float value : wide) narrow.push_back(FloatToBf16(value));
    outputs.push_back({tensor.name, "BF16", tensor.shape, {std::as_bytes(std::span(narrow))}});
  }
  ASSERT_TRUE(WriteSafetensors(path_ + "/adapter_model.safetensors", outputs, {}).ok());
  const auto adapter = PeftAdapter::Open(path_, model_);
  ASSERT_TRUE(adapter.ok()) << adapter.status();
  std::vector<std::byte> read(layout_.total_bytes);
  ASSERT_TRUE(adapter->Load(read).ok());
  const auto* floats = reinterpret_cast<const float*>(read.data() + layout_.places[1].a_begin_bytes);
  const auto* originals = reinterpret_cast<const float*>(slot_.data() + layout_.places[1].a_begin_bytes);
  for (int i = 0; i < 5 * 24; ++i) EXPECT_EQ(floats[i], Bf16ToFloat(FloatToBf16(originals[i])));
}

TEST_F(PeftAdapterTest, WriterRefusesWhatItCouldNotReadBack) {
  PeftConfig config = config_;
  config.rank = 0;
  EXPECT_EQ(WritePeftAdapter(path_, model_, config, slot_).code(), absl::StatusCode::kInvalidArgument);
  config = config_;
  config.alpha = std::nan("");
  EXPECT_EQ(WritePeftAdapter(path_, model_, config, slot_).code(), absl::StatusCode::kInvalidArgument);
  config = config_;
  config.targets.clear();
  EXPECT_EQ(WritePeftAdapter(path_, model_, config, slot_).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(WritePeftAdapter(path_, model_, config_, std::span(slot_).first(slot_.size() - 64)).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(AdapterLayoutTest, MatricesLieApartAndAreCounted) {
  const ModelConfig model = SmallModel();
  const AdapterLayout layout = AdapterLayout::Create(model, 3, {LinearKind::kDownProj, LinearKind::kQProj, LinearKind::kQProj});
  EXPECT_EQ(layout.targets, (std::vector<LinearKind>{LinearKind::kQProj, LinearKind::kDownProj}));
  ASSERT_EQ(layout.places.size(), 4u);
  EXPECT_EQ(layout.num_parameters, 2u * 3 * ((24 + 24) + (40 + 24)));
  std::uint64_t end_bytes = 0;
  for (const AdapterPlace& place : layout.places) {
    EXPECT_EQ(place.a_begin_bytes % 64, 0u);
    EXPECT_EQ(place.b_begin_bytes % 64, 0u);
    EXPECT_GE(place.a_begin_bytes, end_bytes);
    EXPECT_GE(place.b_begin_bytes, place.a_begin_bytes + static_cast<std::uint64_t>(3 * place.shape.inputs) * 4);
    end_bytes = place.b_begin_bytes + static_cast<std::uint64_t>(3 * place.shape.outputs) * 4;
  }
  EXPECT_LE(end_bytes, layout.total_bytes);
}

}  // namespace
}  // namespace tandem

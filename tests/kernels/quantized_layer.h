// One decoder layer of random weights in a quantised format, of shapes that end within vectors, blocks and nested blocks.
#pragma once

#include <vector>

#include "kernels/quantize/quantized_matrix.h"
#include "tests/kernels/kernel_arrays.h"
#include "tests/support/naive_transformer.h"
#include "tests/support/quantized_weights.h"

namespace tandem {

class QuantizedLayer {
 public:
  QuantizedLayer(const ModelConfig& config, StorageFormat format)
      : model_(config), layout_(WeightLayout::Create(config, format)), encoded_(model_.layout, model_.weights->data(), layout_) {
    encoded_.Decode(model_.weights->data());
  }
  const std::vector<std::byte>& bytes() const { return encoded_.bytes(); }
  const WeightLayout& layout() const { return layout_; }
  struct Linear {
    std::string name;
    const LinearPlace* place;
    HostArray values;  // bf16
  };
  std::vector<Linear> Linears() const {
    std::vector<Linear> linears;
    const LayerPlaces &narrow = layout_.layers[0], &wide = model_.layout.layers[0];
    for (const auto& [place, from] : {std::pair{&narrow.qkv, &wide.qkv},
                                      {&narrow.o, &wide.o},
                                      {&narrow.gate_up, &wide.gate_up},
                                      {&narrow.down, &wide.down}}) {
      HostArray values(DType::kBf16, place->shape[0] * place->shape[1]);
      const float* const decoded = model_.Weight(*from);
      for (std::int64_t i = 0; i < values.count(); ++i) values.Set(i, decoded[i]);
      linears.push_back(
          {absl::StrCat(StorageFormatName(layout_.format), " ", place->name, " [", place->shape[0], ", ", place->shape[1], "]"),
           place, std::move(values)});
    }
    return linears;
  }

  static std::vector<QuantizedLayer> OfManyShapes() {
    std::vector<QuantizedLayer> layers;
    struct Shape {
      int hidden, intermediate, heads, kv_heads, head_dim;
    };
    for (const Shape& shape :
         {Shape{64, 64, 1, 1, 64}, {64, 128, 3, 1, 64}, {576, 1536, 9, 3, 64}, {320, 448, 5, 1, 64}, {1088, 2112, 17, 1, 64}}) {
      ModelConfig config = testing::TinyConfig();
      config.num_layers = 1;
      config.hidden_size = shape.hidden;
      config.intermediate_size = shape.intermediate;
      config.num_heads = shape.heads;
      config.num_kv_heads = shape.kv_heads;
      config.head_dim = shape.head_dim;
      for (const StorageFormat format : {StorageFormat::kFp8Row, StorageFormat::kFp8Block, StorageFormat::kNf4}) {
        layers.emplace_back(config, format);
      }
    }
    // Of FP8 alone: rows that are no multiple of 64, and few rows.
    ModelConfig config = testing::TinyConfig();
    config.num_layers = 1;
    config.hidden_size = 48;
    config.intermediate_size = 80;
    config.num_heads = 3;
    config.num_kv_heads = 1;
    config.head_dim = 16;
    layers.emplace_back(config, StorageFormat::kFp8Row);
    layers.emplace_back(config, StorageFormat::kFp8Block);
    return layers;
  }

 private:
  testing::TinyModel model_;
  WeightLayout layout_;
  testing::EncodedWeights encoded_;
};

}  // namespace tandem

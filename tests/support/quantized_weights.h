// One model's weights in the pool's formats: fp32 values put into a layout, and what a GPU computes with read back from it.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

#include "common/model/weight_codecs.h"
#include "common/model/weight_encoders.h"
#include "common/model/weight_layout.h"

namespace tandem::testing {

// As `layout` (bf16, FP8 per row and in blocks, NF4) says.
class EncodedWeights {
 public:
  EncodedWeights(const WeightLayout& wide, const std::byte* values, const WeightLayout& layout)
      : wide_(wide), layout_(layout), bytes_(layout.total_bytes) {
    if (layout.nested_map.has_value()) std::ranges::copy(Nf4NestedMap(), At<float>(*layout.nested_map));
    Visit([&](const TensorPlace& from, const TensorPlace& to, const LinearPlace* linear) {
      const std::span<const float> source(reinterpret_cast<const float*>(values + from.begin_bytes),
                                          from.size_bytes / sizeof(float));
      if (linear != nullptr && IsQuantized(layout_.format)) {
        for (std::size_t p = 0; p < linear->parts.size(); ++p) EncodePart(*linear, p, source);
      } else {
        std::transform(source.begin(), source.end(), At<std::uint16_t>(to), FloatToBf16);
      }
    });
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }

  // Every weight rounded to bf16, as fp32, laid out as `wide`.
  void Decode(std::byte* values) {
    Visit([&](const TensorPlace& from, const TensorPlace& to, const LinearPlace* linear) {
      const std::span<float> target(reinterpret_cast<float*>(values + from.begin_bytes), from.size_bytes / sizeof(float));
      if (linear != nullptr && IsQuantized(layout_.format)) {
        for (std::size_t p = 0; p < linear->parts.size(); ++p) DecodePart(*linear, p, target);
        for (float& value : target) value = Bf16ToFloat(FloatToBf16(value));
      } else {
        std::transform(At<std::uint16_t>(to), At<std::uint16_t>(to) + target.size(), target.begin(), Bf16ToFloat);
      }
    });
  }

 private:
  template <typename T>
  T* At(const TensorPlace& place) {
    return reinterpret_cast<T*>(bytes_.data() + place.begin_bytes);
  }

  template <typename Visitor>
  void Visit(const Visitor& visit) {
    visit(wide_.embedding, layout_.embedding, nullptr);
    const auto visit_optional = [&](const std::optional<TensorPlace>& from, const std::optional<TensorPlace>& to) {
      if (from.has_value()) visit(*from, *to, nullptr);
    };
    for (std::size_t i = 0; i < layout_.layers.size(); ++i) {
      const LayerPlaces &from = wide_.layers[i], &to = layout_.layers[i];
      visit(from.input_norm, to.input_norm, nullptr);
      visit(from.qkv, to.qkv, &to.qkv);
      visit_optional(from.qkv_bias, to.qkv_bias);
      visit_optional(from.q_norm, to.q_norm);
      visit_optional(from.k_norm, to.k_norm);
      visit(from.o, to.o, &to.o);
      visit(from.post_norm, to.post_norm, nullptr);
      visit(from.gate_up, to.gate_up, &to.gate_up);
      visit(from.down, to.down, &to.down);
    }
    visit(wide_.final_norm, layout_.final_norm, nullptr);
    if (wide_.head.begin_bytes != wide_.embedding.begin_bytes) visit(wide_.head, layout_.head, nullptr);
  }

  // Of one part: its values in the layer's, its codes, its scales.
  struct Part {
    std::size_t first = 0, count = 0, columns = 0, num_blocks = 0;
    std::span<std::uint8_t> codes;
  };
  Part PartOf(const LinearPlace& linear, std::size_t p) {
    const auto columns = static_cast<std::size_t>(linear.shape[1]);
    const auto row = static_cast<std::size_t>(linear.parts[p].row_begin),
               num_rows = static_cast<std::size_t>(linear.parts[p].row_end) - row;
    const std::uint64_t row_bytes = RowBytes(layout_.format, columns);
    return {row * columns,
            num_rows * columns,
            columns,
            num_rows * columns / kNf4BlockValues,
            {At<std::uint8_t>(linear) + row * row_bytes, num_rows * row_bytes}};
  }
  std::span<float> RowScales(const LinearPlace& linear, const Part& part) {
    return {At<float>(*linear.scales) + part.first / part.columns, part.count / part.columns};
  }
  std::span<std::uint8_t> BlockScales(const LinearPlace& linear, const Part& part) {
    return {At<std::uint8_t>(*linear.scales) + part.first / kNf4BlockValues, part.num_blocks};
  }
  std::span<float> Nested(const LinearPlace& linear, std::size_t p, const Part& part) {
    return {At<float>(*linear.nested_absmax) + linear.parts[p].nested_begin,
            (part.num_blocks + kNf4NestedBlocks - 1) / kNf4NestedBlocks};
  }

  // The scale of each value of a part in blocks of 128 x 128.
  struct ScaleOf {
    float* scales;
    std::size_t columns, scale_columns;
    float& operator()(std::size_t i) const { return scales[i / columns / 128 * scale_columns + i % columns / 128]; }
  };
  ScaleOf ScaleOfValue(const LinearPlace& linear, std::size_t p, const Part& part) {
    const auto scale_columns = static_cast<std::size_t>(linear.scales->shape[1]);
    return {At<float>(*linear.scales) + static_cast<std::size_t>(linear.parts[p].scale_row_begin) * scale_columns, part.columns,
            scale_columns};
  }

  void EncodePart(const LinearPlace& linear, std::size_t p, std::span<const float> values) {
    const Part part = PartOf(linear, p);
    const std::span<const float> source = values.subspan(part.first, part.count);
    if (layout_.format == StorageFormat::kFp8Block) {
      const ScaleOf scale = ScaleOfValue(linear, p, part);
      for (std::size_t i = 0; i < source.size(); ++i)
        scale(i) = std::max({scale(i), std::fabs(source[i]) / kFp8E4m3Max, FLT_MIN});
      for (std::size_t i = 0; i < source.size(); ++i) part.codes[i] = FloatToFp8E4m3(source[i] / scale(i));
      return;
    }
    std::vector<float> absmax(layout_.format == StorageFormat::kNf4 ? part.num_blocks : 0);
    const std::span<float> scales = layout_.format == StorageFormat::kNf4 ? std::span(absmax) : RowScales(linear, part);
    if (!EncodeRows(layout_.format, source, part.columns, std::as_writable_bytes(part.codes), scales).ok()) {
      throw std::invalid_argument("weights that are no numbers");
    }
    if (layout_.format == StorageFormat::kNf4) {
      At<float>(*linear.nested_offset)[p] = EncodeNestedAbsmax(absmax, BlockScales(linear, part), Nested(linear, p, part));
    }
  }

  void DecodePart(const LinearPlace& linear, std::size_t p, std::span<float> values) {
    const Part part = PartOf(linear, p);
    const std::span<float> target = values.subspan(part.first, part.count);
    if (layout_.format == StorageFormat::kFp8Block) {
      const ScaleOf scale = ScaleOfValue(linear, p, part);
      for (std::size_t i = 0; i < target.size(); ++i) target[i] = Fp8E4m3ToFloat(part.codes[i]) * scale(i);
      return;
    }
    if (layout_.format == StorageFormat::kFp8Row) {
      const std::span<const float> scales = RowScales(linear, part);
      for (std::size_t i = 0; i < target.size(); ++i) target[i] = Fp8E4m3ToFloat(part.codes[i]) * scales[i / part.columns];
      return;
    }
    std::vector<float> absmax(part.num_blocks);
    DecodeNestedAbsmax(BlockScales(linear, part), Nested(linear, p, part), {At<float>(*layout_.nested_map), 256},
                       At<float>(*linear.nested_offset)[p], kNf4NestedBlocks, absmax);
    DecodeNf4(part.codes, absmax, kNf4BlockValues, target);
  }

  const WeightLayout wide_, layout_;
  std::vector<std::byte> bytes_;
};

}  // namespace tandem::testing

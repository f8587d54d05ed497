// Number formats of weights in files, decoded to fp32. Block formats are GGML's (ggml-common.h) unless named otherwise; decoding
// multiplies in fp32 in the order in which ggml and the Python package `gguf` do, so the values are theirs bit for bit.
// Stateless.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace tandem {

enum class WeightCodec { kF32, kF16, kBf16, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ4_K, kQ5_K, kQ6_K, kMxfp4, kF8E4M3 };

// Values are coded in blocks that stand alone; a row is a whole number of blocks.
struct CodecBlock {
  std::uint64_t num_values = 1;
  std::uint64_t size_bytes = 0;
};
CodecBlock BlockOf(WeightCodec codec);
// GGML's name of the codec: "Q4_1"; F32, F16 and BF16 are also the names in safetensors, F8_E4M3 is
// there alone.
const char* CodecName(WeightCodec codec);
std::optional<WeightCodec> ParseCodec(std::string_view name);

// Decodes values.size() values. Requires: values.size() is a multiple of the block's num_values; `coded` has exactly their bytes.
void Decode(WeightCodec codec, std::span<const std::byte> coded, std::span<float> values);

// NF4's code book (Dettmers et al. 2023, arXiv 2305.14314, appendix E).
inline constexpr std::array<float, 16> kNf4Book = {-1.0F,
                                                   -0.6961928009986877F,
                                                   -0.5250730514526367F,
                                                   -0.39491748809814453F,
                                                   -0.28444138169288635F,
                                                   -0.18477343022823334F,
                                                   -0.09105003625154495F,
                                                   0.0F,
                                                   0.07958029955625534F,
                                                   0.16093020141124725F,
                                                   0.24611230194568634F,
                                                   0.33791524171829224F,
                                                   0.44070982933044434F,
                                                   0.5626170039176941F,
                                                   0.7229568362236023F,
                                                   1.0F};
// NF4 as bitsandbytes packs it: two values a byte, the high nibble first; absmax[i / block_values] scales value i. Requires:
// packed has values.size() / 2 bytes, absmax covers every value.
void DecodeNf4(std::span<const std::uint8_t> packed, std::span<const float> absmax, std::size_t block_values,
               std::span<float> values);
// Double quantisation: absmax[i] = map[codes[i]] * nested_absmax[i / nested_block_values] + offset. Requires: map has 256 values.
void DecodeNestedAbsmax(std::span<const std::uint8_t> codes, std::span<const float> nested_absmax, std::span<const float> map,
                        float offset, std::size_t nested_block_values, std::span<float> absmax);
// MXFP4 (OCP Microscaling Formats 1.0) as gpt-oss lays it in safetensors: blocks of 32 values in 16 bytes, the even value in the
// low nibble; one E8M0 scale (2^(scale - 127)) a block. Requires: blocks has 16 bytes and `values` 32 floats for each scale.
void DecodeMxfp4Interleaved(std::span<const std::uint8_t> blocks, std::span<const std::uint8_t> scales, std::span<float> values);

float HalfToFloat(std::uint16_t bits);
// To the nearest, ties to even; NaN stays NaN.
constexpr std::uint16_t FloatToBf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}
// E4M3 (Micikevicius et al. 2022, arXiv 2209.05433): no infinity, the largest number is 448.
inline constexpr float kFp8E4m3Max = 448;
std::uint8_t FloatToFp8E4m3(float value);  // to the nearest, ties to even; saturates at 448; NaN stays NaN
float Fp8E4m3ToFloat(std::uint8_t code);
constexpr float Bf16ToFloat(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

}  // namespace tandem

#include "common/model/weight_codecs.h"

#include <array>
#include <cmath>
#include <cstring>

#include "common/base/check.h"

namespace tandem {
namespace {

struct CodecFacts {
  WeightCodec codec;
  const char* name;
  CodecBlock block;
};
constexpr std::array<CodecFacts, 13> kCodecs = {{
    {WeightCodec::kF32, "F32", {1, 4}},
    {WeightCodec::kF16, "F16", {1, 2}},
    {WeightCodec::kBf16, "BF16", {1, 2}},
    {WeightCodec::kQ4_0, "Q4_0", {32, 18}},
    {WeightCodec::kQ4_1, "Q4_1", {32, 20}},
    {WeightCodec::kQ5_0, "Q5_0", {32, 22}},
    {WeightCodec::kQ5_1, "Q5_1", {32, 24}},
    {WeightCodec::kQ8_0, "Q8_0", {32, 34}},
    {WeightCodec::kQ4_K, "Q4_K", {256, 144}},
    {WeightCodec::kQ5_K, "Q5_K", {256, 176}},
    {WeightCodec::kQ6_K, "Q6_K", {256, 210}},
    {WeightCodec::kMxfp4, "MXFP4", {32, 17}},
    {WeightCodec::kF8E4M3, "F8_E4M3", {1, 1}},
}};

constexpr std::array<float, 16> kE2m1 = {0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,  4.0F,  6.0F,
                                         -0.0F, -0.5F, -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F};

float ReadHalf(const std::uint8_t* bytes) {
  std::uint16_t bits = 0;
  std::memcpy(&bits, bytes, sizeof(bits));
  return HalfToFloat(bits);
}

float PowerOfTwo(std::uint8_t scale) { return std::ldexp(1.0F, static_cast<int>(scale) - 127); }

float Low(std::uint8_t byte) { return static_cast<float>(byte & 15); }
float High(std::uint8_t byte) { return static_cast<float>(byte >> 4); }

// d fp16, then 16 bytes: value i in the low nibble of byte i, value i + 16 in its high nibble; d * (nibble - 8).
void DecodeQ4_0(const std::uint8_t* block, float* values) {
  const float d = ReadHalf(block);
  for (int i = 0; i < 16; ++i) {
    values[i] = d * (Low(block[2 + i]) - 8.0F);
    values[i + 16] = d * (High(block[2 + i]) - 8.0F);
  }
}

// d, m fp16, then nibbles as in Q4_0; d * nibble + m.
void DecodeQ4_1(const std::uint8_t* block, float* values) {
  const float d = ReadHalf(block);
  const float m = ReadHalf(block + 2);
  for (int i = 0; i < 16; ++i) {
    values[i] = d * Low(block[4 + i]) + m;
    values[i + 16] = d * High(block[4 + i]) + m;
  }
}

// 4 bytes, of which bit i (from the lowest) is the fifth bit of code i, then 16 bytes of nibbles as in Q4_0.
void ReadCodesOf5Bits(const std::uint8_t* bytes, float* codes) {
  std::uint32_t fifth_bits = 0;
  std::memcpy(&fifth_bits, bytes, sizeof(fifth_bits));
  const auto fifth_bit = [fifth_bits](int i) { return 16.0F * static_cast<float>((fifth_bits >> i) & 1U); };
  for (int i = 0; i < 16; ++i) {
    codes[i] = Low(bytes[4 + i]) + fifth_bit(i);
    codes[i + 16] = High(bytes[4 + i]) + fifth_bit(i + 16);
  }
}

// d fp16, then 5-bit codes; d * (code - 16).
void DecodeQ5_0(const std::uint8_t* block, float* values) {
  const float d = ReadHalf(block);
  ReadCodesOf5Bits(block + 2, values);
  for (int i = 0; i < 32; ++i) values[i] = d * (values[i] - 16.0F);
}

// d, m fp16, then 5-bit codes; d * code + m.
void DecodeQ5_1(const std::uint8_t* block, float* values) {
  const float d = ReadHalf(block);
  const float m = ReadHalf(block + 2);
  ReadCodesOf5Bits(block + 4, values);
  for (int i = 0; i < 32; ++i) values[i] = d * values[i] + m;
}

// d fp16, then 32 int8.
void DecodeQ8_0(const std::uint8_t* block, float* values) {
  const float d = ReadHalf(block);
  for (int i = 0; i < 32; ++i) values[i] = d * static_cast<float>(static_cast<std::int8_t>(block[2 + i]));
}

// What Q4_K and Q5_K begin with: d, dmin fp16; 12 bytes hold eight 6-bit scales and eight 6-bit minima. A value of sub-block s
// (of 32) is factor[s] * code - offset[s] = d * scale * code - dmin * minimum.
struct SubBlocks {
  explicit SubBlocks(const std::uint8_t* block) {
    const float d = ReadHalf(block);
    const float dmin = ReadHalf(block + 2);
    const std::uint8_t* packed = block + 4;
    for (std::size_t s = 0; s < 8; ++s) {
      int scale = 0;
      int minimum = 0;
      if (s < 4) {
        scale = packed[s] & 63;
        minimum = packed[s + 4] & 63;
      } else {
        scale = (packed[s + 4] & 15) | ((packed[s - 4] >> 6) << 4);
        minimum = (packed[s + 4] >> 4) | ((packed[s] >> 6) << 4);
      }
      factor[s] = d * static_cast<float>(scale);
      offset[s] = dmin * static_cast<float>(minimum);
    }
  }

  std::array<float, 8> factor = {};
  std::array<float, 8> offset = {};
};

// 16 bytes of SubBlocks; 128 bytes: each run of 32 holds the low nibbles of one sub-block, the high nibbles of the next.
void DecodeQ4_K(const std::uint8_t* block, float* values) {
  const SubBlocks sub_blocks(block);
  for (std::size_t s = 0; s < 8; ++s) {
    const std::uint8_t* run = block + 16 + 32 * (s / 2);
    for (std::size_t i = 0; i < 32; ++i) {
      const float code = s % 2 == 0 ? Low(run[i]) : High(run[i]);
      values[32 * s + i] = sub_blocks.factor[s] * code - sub_blocks.offset[s];
    }
  }
}

// 16 bytes of SubBlocks; 32 bytes: bit s of byte i is the fifth bit of value i of sub-block s; 128 bytes of nibbles as in Q4_K.
void DecodeQ5_K(const std::uint8_t* block, float* values) {
  const SubBlocks sub_blocks(block);
  const std::uint8_t* fifth_bits = block + 16;
  for (std::size_t s = 0; s < 8; ++s) {
    const std::uint8_t* run = block + 48 + 32 * (s / 2);
    for (std::size_t i = 0; i < 32; ++i) {
      const float nibble = s % 2 == 0 ? Low(run[i]) : High(run[i]);
      const float code = nibble + 16.0F * static_cast<float>((fifth_bits[i] >> s) & 1);
      values[32 * s + i] = sub_blocks.factor[s] * code - sub_blocks.offset[s];
    }
  }
}

// 128 bytes of low nibbles, 64 bytes of high bit pairs, 16 int8 scales (one for 16 values), d fp16; d * scale * (6-bit - 32).
void DecodeQ6_K(const std::uint8_t* block, float* values) {
  const float d = ReadHalf(block + 208);
  for (int half = 0; half < 2; ++half) {
    const std::uint8_t* low = block + 64 * half;
    const std::uint8_t* high = block + 128 + 32 * half;
    const std::uint8_t* scales = block + 192 + 8 * half;
    for (int quarter = 0; quarter < 4; ++quarter) {
      for (int i = 0; i < 32; ++i) {
        const std::uint8_t byte = low[i + 32 * (quarter & 1)];
        const int nibble = quarter >= 2 ? byte >> 4 : byte & 15;
        const int code = (nibble | (((high[i] >> (2 * quarter)) & 3) << 4)) - 32;
        const float factor = d * static_cast<float>(static_cast<std::int8_t>(scales[i / 16 + 2 * quarter]));
        values[128 * half + 32 * quarter + i] = factor * static_cast<float>(code);
      }
    }
  }
}

// E8M0 scale, then nibbles as in Q4_0, each an E2M1 number.
void DecodeMxfp4(const std::uint8_t* block, float* values) {
  const float scale = PowerOfTwo(block[0]);
  for (int i = 0; i < 16; ++i) {
    values[i] = scale * kE2m1[block[1 + i] & 15];
    values[i + 16] = scale * kE2m1[block[1 + i] >> 4];
  }
}

}  // namespace

CodecBlock BlockOf(WeightCodec codec) { return kCodecs[static_cast<std::size_t>(codec)].block; }

const char* CodecName(WeightCodec codec) { return kCodecs[static_cast<std::size_t>(codec)].name; }

std::optional<WeightCodec> ParseCodec(std::string_view name) {
  for (const CodecFacts& facts : kCodecs) {
    if (name == facts.name) return facts.codec;
  }
  return std::nullopt;
}

float HalfToFloat(std::uint16_t bits) {
  // Shifted into fp32's place, the exponent is short by 127 - 15: one multiplication puts it right, subnormal numbers too.
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000U) << 16;
  const std::uint32_t magnitude = static_cast<std::uint32_t>(bits & 0x7fffU) << 13;
  if (magnitude >= 0x0f800000U) return std::bit_cast<float>(sign | 0x70000000U | magnitude);  // infinity, NaN
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1.0p112F));
}

std::uint8_t FloatToFp8E4m3(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint8_t>((bits >> 24) & 0x80U);
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7fU;
  if (magnitude >= kFp8E4m3Max) return sign | 0x7eU;
  if (magnitude < 0x1.0p-6F) {
    // Multiples of 2^-9. In the binade of 2^14 that is the last bit of an fp32, so adding it rounds.
    return static_cast<std::uint8_t>(sign | (std::bit_cast<std::uint32_t>(magnitude + 0x1.0p14F) & 0xfU));
  }
  // The exponent moves from bias 127 to bias 7, 20 bits of mantissa are rounded away.
  const std::uint32_t shifted = (bits & 0x7fffffffU) - (120U << 23);
  return static_cast<std::uint8_t>(sign | ((shifted + 0x7ffffU + ((shifted >> 20) & 1U)) >> 20));
}

float Fp8E4m3ToFloat(std::uint8_t code) {
  const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x80U) << 24;
  const std::uint32_t magnitude = code & 0x7fU;
  if (magnitude == 0x7f) return std::bit_cast<float>(sign | 0x7fc00000U);
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude << 20) * 0x1.0p120F));
}

void Decode(WeightCodec codec, std::span<const std::byte> coded, std::span<float> values) {
  const CodecBlock block = BlockOf(codec);
  TANDEM_CHECK(values.size() % block.num_values == 0 && coded.size() == values.size() / block.num_values * block.size_bytes,
               coded.size(), " bytes of ", CodecName(codec), " for ", values.size(), " values");
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(coded.data());
  float* const out = values.data();
  const auto each_block = [&](auto decode_block) {
    for (std::size_t i = 0; i < values.size() / block.num_values; ++i)
      decode_block(bytes + i * block.size_bytes, out + i * block.num_values);
  };
  switch (codec) {
    case WeightCodec::kF32:
      if (!values.empty()) std::memcpy(out, bytes, values.size_bytes());
      break;
    case WeightCodec::kF16:
      each_block([](const std::uint8_t* in, float* value) { *value = ReadHalf(in); });
      break;
    case WeightCodec::kBf16:
      each_block([](const std::uint8_t* in, float* value) {
        std::uint16_t bits = 0;
        std::memcpy(&bits, in, sizeof(bits));
        *value = Bf16ToFloat(bits);
      });
      break;
    case WeightCodec::kQ4_0:
      each_block(DecodeQ4_0);
      break;
    case WeightCodec::kQ4_1:
      each_block(DecodeQ4_1);
      break;
    case WeightCodec::kQ5_0:
      each_block(DecodeQ5_0);
      break;
    case WeightCodec::kQ5_1:
      each_block(DecodeQ5_1);
      break;
    case WeightCodec::kQ8_0:
      each_block(DecodeQ8_0);
      break;
    case WeightCodec::kQ4_K:
      each_block(DecodeQ4_K);
      break;
    case WeightCodec::kQ5_K:
      each_block(DecodeQ5_K);
      break;
    case WeightCodec::kQ6_K:
      each_block(DecodeQ6_K);
      break;
    case WeightCodec::kMxfp4:
      each_block(DecodeMxfp4);
      break;
    case WeightCodec::kF8E4M3:
      each_block([](const std::uint8_t* in, float* value) { *value = Fp8E4m3ToFloat(*in); });
      break;
  }
}

void DecodeNf4(std::span<const std::uint8_t> packed, std::span<const float> absmax, std::size_t block_values,
               std::span<float> values) {
  TANDEM_CHECK(block_values > 0 && packed.size() * 2 == values.size() && absmax.size() * block_values >= values.size(),
               packed.size(), " bytes and ", absmax.size(), " scales for ", values.size(), " values");
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::uint8_t byte = packed[i / 2];
    values[i] = kNf4Book[i % 2 == 0 ? byte >> 4 : byte & 15] * absmax[i / block_values];
  }
}

void DecodeNestedAbsmax(std::span<const std::uint8_t> codes, std::span<const float> nested_absmax, std::span<const float> map,
                        float offset, std::size_t nested_block_values, std::span<float> absmax) {
  TANDEM_CHECK(map.size() == 256 && nested_block_values > 0 && codes.size() == absmax.size() &&
                   nested_absmax.size() * nested_block_values >= codes.size(),
               codes.size(), " codes and ", nested_absmax.size(), " scales for ", absmax.size(), " values");
  for (std::size_t i = 0; i < codes.size(); ++i) absmax[i] = map[codes[i]] * nested_absmax[i / nested_block_values] + offset;
}

void DecodeMxfp4Interleaved(std::span<const std::uint8_t> blocks, std::span<const std::uint8_t> scales, std::span<float> values) {
  TANDEM_CHECK(blocks.size() == 16 * scales.size() && values.size() == 32 * scales.size(), blocks.size(), " bytes and ",
               scales.size(), " scales for ", values.size(), " values");
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const float scale = PowerOfTwo(scales[i / 16]);
    values[2 * i] = scale * kE2m1[blocks[i] & 15];
    values[2 * i + 1] = scale * kE2m1[blocks[i] >> 4];
  }
}

}  // namespace tandem

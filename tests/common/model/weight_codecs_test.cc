#include "common/model/weight_codecs.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "common/base/status.h"

namespace tandem {
namespace {

std::vector<std::uint8_t> FromHex(const std::string& hex) {
  std::vector<std::uint8_t> bytes;
  for (std::size_t i = 0; i < hex.size(); i += 2)
    bytes.push_back(static_cast<std::uint8_t>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  return bytes;
}

std::vector<float> DecodeBlock(WeightCodec codec, const nlohmann::json& inputs) {
  const std::vector<std::uint8_t> block = FromHex(inputs.at("block"));
  std::vector<float> values(block.size() / BlockOf(codec).size_bytes * BlockOf(codec).num_values);
  Decode(codec, std::as_bytes(std::span(block)), values);
  return values;
}

std::vector<float> DecodeCase(const std::string& name, const nlohmann::json& inputs) {
  if (name == "nf4_plain") {
    const std::vector<std::uint8_t> packed = FromHex(inputs.at("packed"));
    std::vector<float> values(packed.size() * 2);
    DecodeNf4(packed, inputs.at("absmax").get<std::vector<float>>(), inputs.at("blocksize"), values);
    return values;
  }
  if (name == "nf4_double_quantised") {
    const std::vector<std::uint8_t> packed = FromHex(inputs.at("packed"));
    const auto codes = inputs.at("absmax").get<std::vector<std::uint8_t>>();
    std::vector<float> absmax(codes.size());
    DecodeNestedAbsmax(codes, inputs.at("nested_absmax").get<std::vector<float>>(),
                       inputs.at("nested_quant_map").get<std::vector<float>>(), inputs.at("nested_offset"),
                       inputs.at("nested_blocksize"), absmax);
    std::vector<float> values(packed.size() * 2);
    DecodeNf4(packed, absmax, inputs.at("blocksize"), values);
    return values;
  }
  if (name == "mxfp4_interleaved") {
    const auto scales = inputs.at("scales").get<std::vector<std::uint8_t>>();
    std::vector<float> values(scales.size() * 32);
    DecodeMxfp4Interleaved(FromHex(inputs.at("blocks")), scales, values);
    return values;
  }
  if (name == "mxfp4_gguf") return DecodeBlock(WeightCodec::kMxfp4, inputs);
  if (name == "gguf_q4_0") return DecodeBlock(WeightCodec::kQ4_0, inputs);
  if (name == "gguf_q4_1") return DecodeBlock(WeightCodec::kQ4_1, inputs);
  if (name == "gguf_q8_0") return DecodeBlock(WeightCodec::kQ8_0, inputs);
  if (name == "gguf_q4_k") return DecodeBlock(WeightCodec::kQ4_K, inputs);
  if (name == "gguf_q6_k") return DecodeBlock(WeightCodec::kQ6_K, inputs);
  ADD_FAILURE() << "no decoder for the case " << name;
  return {};
}

TEST(WeightCodecsTest, GoldenCasesDecodeToTheirValues) {
  std::ifstream file(TANDEM_GOLDEN_DIR "/grpo_cases.json");
  const nlohmann::json cases = nlohmann::json::parse(file).at("codec_cases");
  ASSERT_EQ(cases.size(), 9u);
  for (const nlohmann::json& golden : cases) {
    const std::string name = golden.at("name");
    SCOPED_TRACE(name);
    const auto expected = golden.at("expected").at("values").get<std::vector<double>>();
    const std::vector<float> values = DecodeCase(name, golden.at("inputs"));
    ASSERT_EQ(values.size(), expected.size());
    // fp32 against float64: three roundings, of terms as large as the largest value (a difference may cancel).
    double largest = 0;
    for (const double value : expected) largest = std::max(largest, std::abs(value));
    for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(values[i], expected[i], 3e-7 * largest) << "value " << i;
  }
}

TEST(WeightCodecsTest, BlocksDecodeToTheirValuesBitForBit) {
  std::ifstream file(TANDEM_GOLDEN_DIR "/gguf_blocks.json");
  std::map<std::string, int> counts;
  for (const nlohmann::json& golden : nlohmann::json::parse(file)) {
    const std::string type = golden.at("type");
    SCOPED_TRACE(absl::StrCat(type, ", case ", counts[type]++));
    const std::vector<float> values = DecodeBlock(*ParseCodec(type), golden);
    const std::vector<std::uint8_t> expected = FromHex(golden.at("values"));
    ASSERT_EQ(values.size() * sizeof(float), expected.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, expected.data() + i * sizeof(bits), sizeof(bits));
      ASSERT_EQ(std::bit_cast<std::uint32_t>(values[i]), bits) << "value " << i << " is " << values[i];
    }
  }
  EXPECT_EQ(counts, (std::map<std::string, int>{{"Q4_K", 3}, {"Q5_0", 3}, {"Q5_1", 3}, {"Q5_K", 3}, {"Q6_K", 3}}));
}

// Blocks that are 0 but for a few bytes, and what ggml-common.h says of those.
std::vector<float> DecodeSparse(WeightCodec codec, const std::map<std::size_t, std::uint8_t>& bytes) {
  std::vector<std::uint8_t> block(BlockOf(codec).size_bytes);
  for (const auto& [place, byte] : bytes) block.at(place) = byte;
  std::vector<float> values(BlockOf(codec).num_values);
  Decode(codec, std::as_bytes(std::span(block)), values);
  return values;
}

TEST(WeightCodecsTest, FifthBitsOf32ValuesStandBeforeTheNibbles) {
  // d = 0.5 = 0x3800 at 0; bits 1 and 31 at 2 to 5; bytes 1 and 15 of the nibbles, at 6.
  const std::vector<float> q5_0 = DecodeSparse(WeightCodec::kQ5_0, {{1, 0x38}, {2, 0x02}, {5, 0x80}, {7, 0xa3}, {21, 0xf7}});
  std::vector<float> expected(32, 0.5F * (0 - 16));
  expected[1] = 0.5F * (3 + 16 - 16);
  expected[17] = 0.5F * (10 - 16);
  expected[15] = 0.5F * (7 - 16);
  expected[31] = 0.5F * (15 + 16 - 16);
  EXPECT_EQ(q5_0, expected);
  // m = -2 = 0xc000 at 2 moves the rest by two bytes.
  const std::vector<float> q5_1 =
      DecodeSparse(WeightCodec::kQ5_1, {{1, 0x38}, {3, 0xc0}, {4, 0x02}, {7, 0x80}, {9, 0xa3}, {23, 0xf7}});
  expected.assign(32, -2.0F);
  expected[1] = 0.5F * (3 + 16) - 2;
  expected[17] = 0.5F * 10 - 2;
  expected[15] = 0.5F * 7 - 2;
  expected[31] = 0.5F * (15 + 16) - 2;
  EXPECT_EQ(q5_1, expected);
}

TEST(WeightCodecsTest, ScalesAndMinimaOfSubBlocksAreSplitOverTwelveBytes) {
  // d = 1 = 0x3c00, dmin = 0.5 = 0x3800. Sub-block 1: scale 5 at 4 + 1, minimum 3 at 4 + 5; of these bytes the two top bits are
  // of sub-block 5: scale 2 << 4 | 9, minimum 1 << 4 | 4, whose low nibbles share the byte at 4 + 9.
  const std::map<std::size_t, std::uint8_t> head = {{1, 0x3c}, {3, 0x38}, {5, 0x80 | 5}, {9, 0x40 | 3}, {13, 0x40 | 0x09}};
  // Value 2 of sub-block 1 is a high nibble of run 0, value 30 of sub-block 5 one of run 2.
  std::map<std::size_t, std::uint8_t> q4 = head;
  q4[16 + 2] = 0x70;
  q4[16 + 64 + 30] = 0xb6;
  std::vector<float> expected(256, 0.0F);
  for (std::size_t i = 0; i < 32; ++i) {
    expected[32 + i] = -0.5F * 3;
    expected[160 + i] = -0.5F * 20;
  }
  expected[32 + 2] += 5 * 7;
  expected[160 + 30] += 41 * 11;
  EXPECT_EQ(DecodeSparse(WeightCodec::kQ4_K, q4), expected);

  // The same nibbles after 32 bytes of fifth bits: bit 1 of byte 2, bit 5 of byte 30, and bit 5 of byte 0.
  std::map<std::size_t, std::uint8_t> q5 = head;
  q5[16 + 2] = 1 << 1;
  q5[16 + 30] = 1 << 5;
  q5[16] = 1 << 5;
  q5[48 + 2] = 0x70;
  q5[48 + 64 + 30] = 0xb6;
  expected[32 + 2] += 5 * 16;
  expected[160 + 30] += 41 * 16;
  expected[160] += 41 * 16;
  EXPECT_EQ(DecodeSparse(WeightCodec::kQ5_K, q5), expected);
}

TEST(WeightCodecsTest, ScaleOfQ6KStandsBehindItsCodes) {
  // d = 2 = 0x4000 at 208. Value 128 + 96 + 17 is the high nibble of byte 64 + 32 + 17, bits 6 and 7 of byte 128 + 32 + 17, and
  // has scale 8 + 7 of 16, at 192.
  const std::vector<float> values = DecodeSparse(WeightCodec::kQ6_K, {{209, 0x40}, {113, 0xc0}, {177, 0x40}, {207, 0xfd}});
  std::vector<float> expected(256, 0.0F);
  for (std::size_t i = 240; i < 256; ++i) expected[i] = 2.0F * -3 * (0 - 32);
  expected[241] = 2.0F * -3 * ((1 << 4 | 12) - 32);
  EXPECT_EQ(values, expected);
}

TEST(WeightCodecsTest, EveryHalfDecodesAsIeeeSays) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const int exponent = static_cast<int>((bits >> 10) & 31);
    const auto mantissa = static_cast<float>(bits & 1023);
    float expected = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024.0F + mantissa, exponent - 25);
    if (exponent == 31)
      expected = mantissa == 0 ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
    const float value = HalfToFloat(static_cast<std::uint16_t>(bits));
    ASSERT_EQ(std::isnan(value), std::isnan(expected)) << bits;
    ASSERT_EQ(std::signbit(value), bits >> 15 == 1) << bits;
    if (!std::isnan(expected)) { ASSERT_EQ(std::fabs(value), expected) << bits; }
  }
}

TEST(WeightCodecsTest, Bf16RoundsToNearestEven) {
  EXPECT_EQ(FloatToBf16(1.0F), 0x3f80);
  EXPECT_EQ(FloatToBf16(std::bit_cast<float>(0x3f808000U)), 0x3f80);  // half way: to even
  EXPECT_EQ(FloatToBf16(std::bit_cast<float>(0x3f818000U)), 0x3f82);
  EXPECT_EQ(FloatToBf16(std::bit_cast<float>(0x3f808001U)), 0x3f81);
  EXPECT_EQ(FloatToBf16(std::bit_cast<float>(0xbf808001U)), 0xbf81);
  EXPECT_EQ(FloatToBf16(std::numeric_limits<float>::max()), 0x7f80);  // rounds to infinity
  EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(std::bit_cast<float>(0x7f800001U)))));
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = Bf16ToFloat(static_cast<std::uint16_t>(bits));
    if (!std::isnan(value)) { ASSERT_EQ(FloatToBf16(value), bits); }
  }
}

TEST(WeightCodecsTest, EveryFp8CodeComesBackAndMiddlesGoToEven) {
  EXPECT_EQ(Fp8E4m3ToFloat(0x7e), 448.0F);
  EXPECT_EQ(Fp8E4m3ToFloat(0x08), std::ldexp(1.0F, -6));
  EXPECT_EQ(Fp8E4m3ToFloat(0x01), std::ldexp(1.0F, -9));
  EXPECT_EQ(Fp8E4m3ToFloat(0xb8), -1.0F);
  EXPECT_TRUE(std::isnan(Fp8E4m3ToFloat(0x7f)));
  for (int code = 0; code < 0x7e; ++code) {
    const auto low_code = static_cast<std::uint8_t>(code), high_code = static_cast<std::uint8_t>(code + 1);
    const float low = Fp8E4m3ToFloat(low_code), high = Fp8E4m3ToFloat(high_code), middle = (low + high) / 2;
    ASSERT_LT(low, high);
    ASSERT_EQ(FloatToFp8E4m3(low), low_code);
    ASSERT_EQ(FloatToFp8E4m3(-high), high_code | 0x80);
    ASSERT_EQ(FloatToFp8E4m3(middle), code % 2 == 0 ? low_code : high_code) << code;
    ASSERT_EQ(FloatToFp8E4m3(std::nextafter(middle, 0.0F)), low_code) << code;
    ASSERT_EQ(FloatToFp8E4m3(std::nextafter(middle, 500.0F)), high_code) << code;
  }
  EXPECT_EQ(FloatToFp8E4m3(1e30F), 0x7e);
  EXPECT_EQ(FloatToFp8E4m3(-std::numeric_limits<float>::infinity()), 0xfe);
  EXPECT_EQ(FloatToFp8E4m3(std::numeric_limits<float>::quiet_NaN()) & 0x7f, 0x7f);
}

TEST(WeightCodecsTest, NoValuesNeedNoBytes) {
  for (const char* name :
       {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "F8_E4M3"}) {
    ASSERT_TRUE(ParseCodec(name).has_value()) << name;
    EXPECT_STREQ(CodecName(*ParseCodec(name)), name);
    Decode(*ParseCodec(name), {}, {});
  }
  EXPECT_FALSE(ParseCodec("Q3_K").has_value());
}

}  // namespace
}  // namespace tandem

#include "common/model/weight_encoders.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "common/base/random.h"
#include "common/model/weight_codecs.h"

namespace tandem {
namespace {

std::vector<std::uint8_t> BytesOf(const std::string& hex) {
  std::vector<std::uint8_t> bytes;
  for (std::size_t i = 0; i < hex.size(); i += 2)
    bytes.push_back(static_cast<std::uint8_t>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  return bytes;
}

std::vector<float> FloatsOf(const std::string& hex) {
  const std::vector<std::uint8_t> bytes = BytesOf(hex);
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

nlohmann::json Golden() {
  std::ifstream file(TANDEM_GOLDEN_DIR "/nf4_encoding.json");
  return nlohmann::json::parse(file);
}

std::vector<float> RandomValues(std::uint64_t seed, std::size_t count) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<float>(2 * RandomUniform(seed, i) - 1);
  return values;
}

TEST(Nf4Test, NestedMapIsThatOfBitsandbytes) {
  const std::vector<float> expected = FloatsOf(Golden().at("nested_map"));
  const std::vector<float> map(Nf4NestedMap().begin(), Nf4NestedMap().end());
  EXPECT_EQ(map, expected);
}

TEST(Nf4Test, CodesAndScalesAreThoseOfBitsandbytes) {
  for (const nlohmann::json& golden : Golden().at("cases")) {
    SCOPED_TRACE(golden.at("name").get<std::string>());
    const std::vector<float> values = FloatsOf(golden.at("values"));
    std::vector<std::uint8_t> packed(values.size() / 2);
    std::vector<float> absmax(values.size() / kNf4BlockValues);
    EncodeNf4(values, packed, absmax);
    EXPECT_EQ(packed, BytesOf(golden.at("packed")));
    EXPECT_EQ(absmax, FloatsOf(golden.at("plain_absmax")));

    std::vector<std::uint8_t> codes(absmax.size());
    const std::vector<float> expected_nested = FloatsOf(golden.at("nested_absmax"));
    std::vector<float> nested(expected_nested.size());
    const float offset = EncodeNestedAbsmax(absmax, codes, nested);
    // The mean differs by the order of summation, and what is divided by it with it.
    const float expected_offset = FloatsOf(golden.at("offset"))[0];
    EXPECT_NEAR(offset, expected_offset, 2e-7F * expected_offset);
    for (std::size_t i = 0; i < nested.size(); ++i) EXPECT_NEAR(nested[i], expected_nested[i], 4e-7F * expected_offset);
    EXPECT_EQ(codes, BytesOf(golden.at("absmax")));
  }
}

TEST(Nf4Test, WhatIsDecodedIsTheNearestCodeUnderScalesOfEightBits) {
  const std::vector<float> values = RandomValues(3, 64 * 300);
  std::vector<std::uint8_t> packed(values.size() / 2), codes(300);
  std::vector<float> absmax(300), nested(2), restored(300), decoded(values.size());
  EncodeNf4(values, packed, absmax);
  const float offset = EncodeNestedAbsmax(absmax, codes, nested);
  DecodeNestedAbsmax(codes, nested, Nf4NestedMap(), offset, kNf4NestedBlocks, restored);
  for (std::size_t i = 0; i < restored.size(); ++i) {
    // The widest gap of the map is 0.9 / 64.
    EXPECT_NEAR(restored[i], absmax[i], 0.0075F * nested[i / kNf4NestedBlocks]) << "block " << i;
  }
  DecodeNf4(packed, restored, kNf4BlockValues, decoded);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float scale = absmax[i / kNf4BlockValues];
    // The widest gap of the code book is 0.304.
    EXPECT_NEAR(decoded[i], values[i], 0.153F * scale + std::abs(restored[i / kNf4BlockValues] - scale)) << "value " << i;
  }
}

TEST(Fp8Test, ARowKeepsItsLargestValueAndFourBitsOfTheOthers) {
  std::vector<float> row = RandomValues(5, 256);
  for (std::size_t i = 0; i < row.size(); ++i) row[i] *= std::ldexp(1.0F, -static_cast<int>(i % 4));
  row[17] = -3.5F;
  std::vector<std::uint8_t> codes(row.size());
  const float scale = EncodeFp8Row(row, codes);
  EXPECT_EQ(scale, 3.5F / 448);
  EXPECT_EQ(Fp8E4m3ToFloat(codes[17]) * scale, -3.5F);
  for (std::size_t i = 0; i < row.size(); ++i) {
    const float tolerance = std::max(std::abs(row[i]) / 16, scale * std::ldexp(1.0F, -10));
    EXPECT_NEAR(Fp8E4m3ToFloat(codes[i]) * scale, row[i], tolerance) << "value " << i;
  }
  const std::vector<float> zeros(256);
  EXPECT_GT(EncodeFp8Row(zeros, codes), 0);
  EXPECT_EQ(codes, std::vector<std::uint8_t>(256));
  const std::vector<float> tiny(256, std::numeric_limits<float>::denorm_min());
  EXPECT_GT(EncodeFp8Row(tiny, codes), 0);
  for (const std::uint8_t code : codes) EXPECT_FALSE(std::isnan(Fp8E4m3ToFloat(code)));
}

TEST(EncodeRowsTest, QuantisedFormatsRefuseWhatIsNotFinite) {
  for (const StorageFormat format : {StorageFormat::kFp32, StorageFormat::kBf16, StorageFormat::kFp8Row, StorageFormat::kNf4}) {
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
      std::vector<float> values = RandomValues(7, 256);
      std::vector<std::byte> encoded(2 * RowBytes(format, 128));
      std::vector<float> scales(2 * ScalesPerRow(format, 128));
      EXPECT_TRUE(EncodeRows(format, values, 128, encoded, scales).ok()) << StorageFormatName(format);
      values[200] = bad;
      EXPECT_EQ(EncodeRows(format, values, 128, encoded, scales).ok(), !IsQuantized(format)) << StorageFormatName(format);
    }
  }
}

}  // namespace
}  // namespace tandem

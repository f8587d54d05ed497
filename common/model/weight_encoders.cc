#include "common/model/weight_encoders.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "common/base/check.h"
#include "common/model/weight_codecs.h"

namespace tandem {
namespace {

// A value goes to code i when it is above i of these: the middles of neighbours in the code book, rounded to fp32.
constexpr std::array<float, 15> kNf4Bounds = {
    -0.8480964004993439F,  -0.6106329262256622F,   -0.4599952697753906F, -0.33967943489551544F, -0.23460740596055984F,
    -0.13791173323988914F, -0.045525018125772476F, 0.03979014977812767F, 0.1202552504837513F,   0.2035212516784668F,
    0.2920137718319893F,   0.3893125355243683F,    0.5016634166240692F,  0.6427869200706482F,   0.8614784181118011F};

float AbsMax(std::span<const float> values) {
  float most = 0;
  for (const float value : values) most = std::max(most, std::fabs(value));
  return most;
}

bool AreFinite(std::span<const float> values) {
  bool are_finite = true;
  for (const float value : values) are_finite &= std::fabs(value) <= FLT_MAX;
  return are_finite;
}

// torch.linspace(0.1, 1, n) in fp32 counts from both ends, each product and sum rounded once.
float Linspace(int i, int num_values) {
  const float begin = 0.1F;
  const auto step = static_cast<double>((1 - begin) / static_cast<float>(num_values - 1));
  if (i < num_values / 2) return static_cast<float>(static_cast<double>(begin) + step * i);
  return static_cast<float>(1 - step * (num_values - 1 - i));
}

std::array<float, 256> MakeNestedMap() {
  constexpr std::array<float, 7> kPowersOfTen = {1e-6F, 1e-5F, 1e-4F, 1e-3F, 1e-2F, 1e-1F, 1};
  std::array<float, 256> map{};
  std::size_t count = 0;
  for (std::size_t i = 0; i < kPowersOfTen.size(); ++i) {
    const int num_means = 1 << i;
    for (int k = 0; k < num_means; ++k) {
      const float mean = (Linspace(k, num_means + 1) + Linspace(k + 1, num_means + 1)) / 2;
      map[count++] = kPowersOfTen[i] * mean;
      map[count++] = -kPowersOfTen[i] * mean;
    }
  }
  map[count++] = 0;
  map[count++] = 1;
  std::sort(map.begin(), map.end());
  return map;
}

}  // namespace

std::uint64_t ScalesPerRow(StorageFormat format, std::uint64_t columns) {
  if (format == StorageFormat::kFp8Row) return 1;
  return format == StorageFormat::kNf4 ? columns / kNf4BlockValues : 0;
}

absl::Status EncodeRows(StorageFormat format, std::span<const float> values, std::uint64_t columns, std::span<std::byte> encoded,
                        std::span<float> scales) {
  const std::uint64_t num_rows = values.size() / columns;
  TANDEM_CHECK(values.size() == num_rows * columns && encoded.size() == num_rows * RowBytes(format, columns) &&
                   scales.size() == num_rows * ScalesPerRow(format, columns),
               values.size(), " values in rows of ", columns, " for ", encoded.size(), " bytes and ", scales.size(), " scales");
  if (IsQuantized(format) && !AreFinite(values)) {
    return absl::InvalidArgumentError(
        absl::StrCat("a value is not finite, and in ", StorageFormatName(format), " it would spoil its neighbours"));
  }
  auto* const bytes = reinterpret_cast<std::uint8_t*>(encoded.data());
  switch (format) {
    case StorageFormat::kFp32:
      if (!values.empty()) std::memcpy(bytes, values.data(), values.size_bytes());
      break;
    case StorageFormat::kBf16: {
      auto* const out = reinterpret_cast<std::uint16_t*>(bytes);
      for (std::size_t i = 0; i < values.size(); ++i) out[i] = FloatToBf16(values[i]);
      break;
    }
    case StorageFormat::kFp8Row:
      for (std::uint64_t row = 0; row < num_rows; ++row) {
        scales[row] = EncodeFp8Row(values.subspan(row * columns, columns), {bytes + row * columns, columns});
      }
      break;
    case StorageFormat::kNf4:
      EncodeNf4(values, {bytes, encoded.size()}, scales);
      break;
    case StorageFormat::kFp8Block:
      TANDEM_CHECK(false, "rows are not encoded in ", StorageFormatName(format));
      break;
  }
  return absl::OkStatus();
}

float EncodeFp8Row(std::span<const float> row, std::span<std::uint8_t> codes) {
  TANDEM_CHECK(codes.size() == row.size(), codes.size(), " codes for ", row.size(), " values");
  const float scale = std::max(AbsMax(row) / kFp8E4m3Max, FLT_MIN);
  for (std::size_t i = 0; i < row.size(); ++i) codes[i] = FloatToFp8E4m3(row[i] / scale);
  return scale;
}

void EncodeNf4(std::span<const float> values, std::span<std::uint8_t> packed, std::span<float> absmax) {
  constexpr std::size_t kBlock = kNf4BlockValues;
  TANDEM_CHECK(values.size() % kBlock == 0 && packed.size() * 2 == values.size() && absmax.size() * kBlock == values.size(),
               packed.size(), " bytes and ", absmax.size(), " scales for ", values.size(), " values");
  for (std::size_t block = 0; block < absmax.size(); ++block) {
    const std::span<const float> in = values.subspan(block * kBlock, kBlock);
    absmax[block] = AbsMax(in);
    const float inverse = 1 / std::max(absmax[block], 1e-38F);
    std::array<float, kBlock> scaled;
    std::array<std::int32_t, kBlock> codes{};
    for (std::size_t i = 0; i < kBlock; ++i) scaled[i] = in[i] * inverse;
    for (const float bound : kNf4Bounds) {
      for (std::size_t i = 0; i < kBlock; ++i) codes[i] += scaled[i] > bound ? 1 : 0;
    }
    for (std::size_t i = 0; i < kBlock; i += 2) {
      packed[(block * kBlock + i) / 2] = static_cast<std::uint8_t>((codes[i] << 4) | codes[i + 1]);
    }
  }
}

float EncodeNestedAbsmax(std::span<const float> absmax, std::span<std::uint8_t> codes, std::span<float> nested_absmax) {
  constexpr std::size_t kBlock = kNf4NestedBlocks;
  TANDEM_CHECK(!absmax.empty() && codes.size() == absmax.size() && nested_absmax.size() == (absmax.size() + kBlock - 1) / kBlock,
               codes.size(), " codes and ", nested_absmax.size(), " scales for ", absmax.size(), " values");
  static const std::array<float, 255> kBounds = [] {
    std::array<float, 255> bounds;
    const std::span<const float> map = Nf4NestedMap();
    for (std::size_t i = 0; i < bounds.size(); ++i) bounds[i] = (map[i] + map[i + 1]) / 2;
    return bounds;
  }();
  double sum = 0;
  for (const float value : absmax) sum += static_cast<double>(value);
  const auto offset = static_cast<float>(sum / static_cast<double>(absmax.size()));
  for (std::size_t begin = 0; begin < absmax.size(); begin += kBlock) {
    const std::size_t end = std::min(begin + kBlock, absmax.size());
    float most = 0;
    for (std::size_t i = begin; i < end; ++i) most = std::max(most, std::fabs(absmax[i] - offset));
    nested_absmax[begin / kBlock] = most;
    const float inverse = 1 / std::max(most, 1e-38F);
    for (std::size_t i = begin; i < end; ++i) {
      const float scaled = (absmax[i] - offset) * inverse;
      // The first middle that is not below: what lies half way goes down.
      codes[i] = static_cast<std::uint8_t>(std::lower_bound(kBounds.begin(), kBounds.end(), scaled) - kBounds.begin());
    }
  }
  return offset;
}

std::span<const float> Nf4NestedMap() {
  static const std::array<float, 256> kMap = MakeNestedMap();
  return kMap;
}

}  // namespace tandem

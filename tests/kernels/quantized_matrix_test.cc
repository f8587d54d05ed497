// Weights as codes on the CPU: what the device's kernels are compared with.
#include "kernels/quantize/quantized_matrix.h"

#include "gmock/gmock.h"
#include "tests/kernels/quantized_layer.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

TEST(QuantizedMatrix, ValuesAreTheCodecsRoundedToBf16) {
  for (const QuantizedLayer& layer : QuantizedLayer::OfManyShapes()) {
    testing::AlignedBytes weights(layer.bytes().size());
    std::memcpy(weights.data(), layer.bytes().data(), layer.bytes().size());
    for (const QuantizedLayer::Linear& linear : layer.Linears()) {
      testing::AlignedBytes output(linear.values.bytes().size());
      ASSERT_EQ(
          Dequantize(QuantizedMatrixAt(layer.layout(), *linear.place, weights.data()), output.data(), Device::kCpu, nullptr),
          absl::OkStatus());
      EXPECT_EQ(std::memcmp(output.data(), linear.values.data(), linear.values.bytes().size()), 0) << linear.name;
    }
  }
}

// By hand: NF4, one row of two blocks in the second of two parts. absmax of its blocks is map[code] * nested + offset.
TEST(QuantizedMatrix, ANf4PartCountsItsBlocksFromItsOwnBegin) {
  alignas(16) std::array<std::uint8_t, 128> codes;  // two rows of 128 values
  codes.fill(0xf7);                                 // 1, then 0
  const std::array<std::uint8_t, 4> scales = {0, 1, 2, 3};
  std::array<float, 256> map{};
  map[0] = 8, map[1] = 16, map[2] = 1, map[3] = 2;
  const std::array<float, 2> nested = {100, 4}, offset = {0, 0.5f};
  QuantizedMatrix matrix = {.format = StorageFormat::kNf4, .rows = 2, .columns = 128, .codes = codes.data()};
  matrix.scales = scales.data();
  matrix.nested_map = map.data();
  matrix.nested_absmax = nested.data();
  matrix.nested_offset = offset.data();
  matrix.num_parts = 2;
  matrix.parts = {LinearPart{0, 1, 0}, LinearPart{1, 2, 1}};
  HostArray values(DType::kBf16, 256);
  testing::AlignedBytes output(512);
  ASSERT_EQ(Dequantize(matrix, output.data(), Device::kCpu, nullptr), absl::OkStatus());
  std::memcpy(values.data(), output.data(), 512);
  EXPECT_EQ(values.Get(0), 800);
  EXPECT_EQ(values.Get(1), 0);
  EXPECT_EQ(values.Get(64), 1600);
  EXPECT_EQ(values.Get(128), 4.5f);
  EXPECT_EQ(values.Get(192), 8.5f);
}

// By hand: rows 0 to 128 and 129 of two parts, 144 columns. The second part's blocks begin at its own first row.
TEST(QuantizedMatrix, AnFp8PartCountsItsBlocksFromItsOwnBegin) {
  testing::AlignedBytes codes(130 * 144), output(130 * 144 * 2);
  std::memset(codes.data(), 0x38, 130 * 144);  // 1
  const std::array<float, 6> scales = {1, 2, 3, 4, 5, 6};
  QuantizedMatrix matrix = {.format = StorageFormat::kFp8Block, .rows = 130, .columns = 144, .codes = codes.data()};
  matrix.scales = scales.data();
  matrix.num_parts = 2;
  matrix.parts = {LinearPart{.row_begin = 0, .row_end = 129}, {.row_begin = 129, .row_end = 130, .scale_row_begin = 2}};
  ASSERT_EQ(Dequantize(matrix, output.data(), Device::kCpu, nullptr), absl::OkStatus());
  HostArray values(DType::kBf16, 130 * 144);
  std::memcpy(values.data(), output.data(), 130 * 144 * 2);
  for (const auto& [row, column, scale] :
       {std::array{0, 0, 1}, {0, 127, 1}, {0, 128, 2}, {127, 143, 2}, {128, 0, 3}, {128, 128, 4}, {129, 0, 5}, {129, 143, 6}}) {
    EXPECT_EQ(values.Get(row * 144 + column), static_cast<float>(scale)) << row << ", " << column;
  }
}

TEST(QuantizedMatrix, FewRowsAreMultipliedAndAdded) {
  alignas(16) std::array<std::uint8_t, 32> codes;  // two rows of 16 values
  codes.fill(0x38);                                // 1
  const std::array<float, 2> scales = {0.5f, 2};
  MultiplyFewParams params;
  params.weight = {.rows = 2, .columns = 16, .codes = codes.data(), .scales = scales.data()};
  testing::AlignedBytes x(2 * 32), y(16);
  HostArray ones(DType::kBf16, 32);
  for (int i = 0; i < 32; ++i) ones.Set(i, i < 16 ? 1.f : -3.f);
  std::memcpy(x.data(), ones.data(), 64);
  params.x = x.data();
  params.y = y.data();
  params.y_dtype = DType::kFp32;
  params.num_rows = 2;
  ASSERT_EQ(MultiplyFew(params, Device::kCpu, nullptr), absl::OkStatus());
  EXPECT_THAT(std::vector<float>(y.floats(), y.floats() + 4), ::testing::ElementsAre(8, 32, -24, -96));
  params.is_added = true;
  ASSERT_EQ(MultiplyFew(params, Device::kCpu, nullptr), absl::OkStatus());
  EXPECT_THAT(std::vector<float>(y.floats(), y.floats() + 4), ::testing::ElementsAre(16, 64, -48, -192));
}

TEST(QuantizedMatrix, ShapesThatNoKernelServesAreRefused) {
  alignas(16) std::array<std::uint8_t, 512> codes{};
  const auto refusal = [&](const QuantizedMatrix& matrix) {
    return std::string(Dequantize(matrix, codes.data(), Device::kCpu, nullptr).message());
  };
  EXPECT_THAT(refusal({.rows = 2, .columns = 24, .codes = codes.data()}),
              HasSubstr("[2, 24] in fp8; columns are a multiple of 16"));
  EXPECT_THAT(refusal({.format = StorageFormat::kNf4, .rows = 2, .columns = 32, .codes = codes.data()}),
              HasSubstr("[2, 32] in nf4; columns are a multiple of 64"));
  EXPECT_THAT(refusal({.format = StorageFormat::kBf16, .rows = 2, .columns = 64, .codes = codes.data()}), HasSubstr("in bf16"));
  EXPECT_THAT(refusal({.format = StorageFormat::kNf4, .rows = 2, .columns = 64, .codes = codes.data()}),
              HasSubstr("0 parts that do not cover 2 rows"));
  EXPECT_THAT(refusal({.format = StorageFormat::kFp8Block, .rows = 2, .columns = 24, .codes = codes.data()}),
              HasSubstr("[2, 24] in fp8_block; columns are a multiple of 16"));
  EXPECT_THAT(refusal({.format = StorageFormat::kFp8Block, .rows = 2, .columns = 32, .codes = codes.data()}),
              HasSubstr("0 parts that do not cover 2 rows"));
  EXPECT_THAT(refusal({.rows = 2, .columns = 16, .codes = codes.data() + 1}), HasSubstr("boundary of 16 bytes"));
  MultiplyFewParams params;
  params.weight = {.rows = 1, .columns = 16, .codes = codes.data()};
  params.x = params.y = codes.data();
  params.num_rows = kFewRows + 1;
  EXPECT_THAT(MultiplyFew(params, Device::kCpu, nullptr).message(), HasSubstr("65 rows; at most 64"));
}

}  // namespace
}  // namespace tandem

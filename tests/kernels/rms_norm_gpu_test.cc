#include <cmath>
#include <limits>
#include <tuple>

#include "kernels/rms_norm/rms_norm.h"
#include "tests/kernels/device_array.h"

namespace tandem {
namespace {

constexpr float kEpsilon = 1e-5f;

struct Shape {
  std::int64_t num_rows;
  std::int64_t width;
  std::size_t offset_elements = 0;  // of every array: 1 takes the path without packets
};
constexpr Shape kShapes[] = {{1, 1}, {1, 31}, {3, 576}, {3, 576, 1}, {64, 4096}, {7, 257}, {2, 65536}, {5, 8192, 1}};

class RmsNormGpuTest : public DeviceKernelTest {};

TEST_F(RmsNormGpuTest, EqualsTheReference) {
  for (const DType dtype : {DType::kFp32, DType::kBf16}) {
    for (const Shape& shape : kShapes) {
      const std::string what = absl::StrCat(DTypeName(dtype), " [", shape.num_rows, ", ", shape.width, "]");
      const std::int64_t count = shape.num_rows * shape.width;
      const std::size_t offset = shape.offset_elements * ElementBytes(dtype);
      HostArray input = HostArray::Random(DType::kFp32, count, 3, 4), weight = HostArray::Random(dtype, shape.width, 4);
      HostArray output(dtype, count);
      if (count > 600) {
        input.Set(0, std::numeric_limits<float>::quiet_NaN());
        input.Set(count - 1, std::numeric_limits<float>::infinity());
      }
      const DeviceArray device_input(input, shape.offset_elements * sizeof(float)), device_weight(weight, offset);
      const DeviceArray device_output(output, offset);
      RmsNormParams params{.dtype = dtype, .num_rows = shape.num_rows, .width = shape.width, .epsilon = kEpsilon};
      params.input = device_input.floats();
      params.weight = device_weight.data();
      params.output = device_output.data();
      if (!Fence(RmsNorm(params, Device::kCuda, stream()), what)) return;
      const HostArray device_result = device_output.Read(dtype, what);
      params.input = input.floats();
      params.weight = weight.data();
      params.output = output.data();
      ASSERT_EQ(RmsNorm(params, Device::kCpu, nullptr), absl::OkStatus());
      // The sum of squares adds up width / 512 numbers in a row at most, and rsqrtf is off by two units.
      ExpectClose(device_result, output, LastPlace(dtype) + 150 * LastPlace(DType::kFp32), 1e-30, what);
    }
  }
}

TEST_F(RmsNormGpuTest, GathersRows) {
  constexpr std::int64_t kWidth = 64;
  const std::vector<std::int32_t> rows = {4, 0, 3, 4};
  for (const DType dtype : {DType::kFp32, DType::kBf16}) {
    const HostArray input = HostArray::Random(DType::kFp32, 5 * kWidth, 1), weight = HostArray::Random(dtype, kWidth, 2);
    HostArray gathered(dtype, 4 * kWidth);
    const DeviceArray device_input(input), device_weight(weight), device_gathered(gathered);
    const auto device_rows = DeviceArray::Of(rows);
    RmsNormParams params{.dtype = dtype,
                         .input = device_input.floats(),
                         .weight = device_weight.data(),
                         .output = device_gathered.data(),
                         .num_rows = 4,
                         .width = kWidth,
                         .epsilon = kEpsilon};
    params.rows = static_cast<const std::int32_t*>(device_rows->data());
    if (!Fence(RmsNorm(params, Device::kCuda, stream()), "gathered")) return;
    params.input = input.floats();
    params.weight = weight.data();
    params.output = gathered.data();
    params.rows = rows.data();
    ASSERT_EQ(RmsNorm(params, Device::kCpu, nullptr), absl::OkStatus());
    const double relative = LastPlace(dtype) + 20 * LastPlace(DType::kFp32);
    ExpectClose(device_gathered.Read(dtype, "gathered"), gathered, relative, 1e-30, "gathered");
  }
}

TEST_F(RmsNormGpuTest, WorksInPlace) {
  constexpr std::int64_t kRows = 5, kWidth = 64;
  HostArray input = HostArray::Random(DType::kFp32, kRows * kWidth, 1);
  const HostArray weight = HostArray::Random(DType::kFp32, kWidth, 2);
  const DeviceArray device_input(input), device_weight(weight);
  RmsNormParams params{.input = device_input.floats(),
                       .weight = device_weight.data(),
                       .output = device_input.data(),
                       .num_rows = kRows,
                       .width = kWidth,
                       .epsilon = kEpsilon};
  if (!Fence(RmsNorm(params, Device::kCuda, stream()), "in place")) return;
  params.input = input.floats();
  params.weight = weight.data();
  params.output = input.data();
  ASSERT_EQ(RmsNorm(params, Device::kCpu, nullptr), absl::OkStatus());
  ExpectClose(device_input.Read(DType::kFp32, "in place"), input, 21 * LastPlace(DType::kFp32), 1e-30, "in place");
}

TEST_F(RmsNormGpuTest, BackwardEqualsTheReference) {
  for (const DType dtype : {DType::kFp32, DType::kBf16}) {
    for (const Shape& shape : kShapes) {
      const std::string what = absl::StrCat(DTypeName(dtype), " [", shape.num_rows, ", ", shape.width, "] backward");
      const std::int64_t count = shape.num_rows * shape.width;
      const std::size_t offset = shape.offset_elements * ElementBytes(dtype);
      std::vector<std::int32_t> rows;  // all but the first of twice as many, last first
      for (std::int64_t row = 0; row < shape.num_rows; ++row)
        rows.push_back(static_cast<std::int32_t>(2 * shape.num_rows - 1 - row));
      const std::size_t float_offset = shape.offset_elements * sizeof(float);
      HostArray input = HostArray::Random(DType::kFp32, 2 * count, 3, 4), weight = HostArray::Random(dtype, shape.width, 4);
      HostArray grad_output = HostArray::Random(dtype, count, 5), grad_input = HostArray::Random(DType::kFp32, 2 * count, 6, 0.1);
      const DeviceArray device_input(input, float_offset), device_weight(weight, offset), device_grad_output(grad_output, offset);
      const DeviceArray device_grad_input(grad_input, float_offset);
      const auto device_rows = DeviceArray::Of(rows);
      RmsNormBackwardParams params{.dtype = dtype,
                                   .input = device_input.floats(),
                                   .weight = device_weight.data(),
                                   .grad_output = device_grad_output.data(),
                                   .grad_input = device_grad_input.floats()};
      params.rows = static_cast<const std::int32_t*>(device_rows->data());
      params.num_rows = shape.num_rows;
      params.width = shape.width;
      params.epsilon = kEpsilon;
      if (!Fence(RmsNormBackward(params, Device::kCuda, stream()), what)) return;
      params.input = input.floats();
      params.weight = weight.data();
      params.grad_output = grad_output.data();
      params.grad_input = grad_input.floats();
      params.rows = rows.data();
      ASSERT_EQ(RmsNormBackward(params, Device::kCpu, nullptr), absl::OkStatus());
      // The terms are below 3 (a row of one element: 1 / |x| more) and cancel, so their fp32 rounding counts absolutely.
      ExpectClose(device_grad_input.Read(DType::kFp32, what), grad_input, LastPlace(DType::kFp32), shape.width == 1 ? 1e-5 : 2e-6,
                  what);
    }
  }
}

}  // namespace
}  // namespace tandem

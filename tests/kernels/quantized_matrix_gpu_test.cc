// Weights as codes on the device against the codecs of the host.
#include "kernels/quantize/quantized_matrix.h"

#include "tests/kernels/device_array.h"
#include "tests/kernels/quantized_layer.h"

namespace tandem {
namespace {

class QuantizedMatrixGpuTest : public DeviceKernelTest {};

TEST_F(QuantizedMatrixGpuTest, ValuesAreBitEqualToTheHosts) {
  for (const QuantizedLayer& layer : QuantizedLayer::OfManyShapes()) {
    const DeviceArray weights(layer.bytes());
    for (const QuantizedLayer::Linear& linear : layer.Linears()) {
      const DeviceArray output(HostArray(DType::kBf16, linear.values.count()));
      const QuantizedMatrix matrix =
          QuantizedMatrixAt(layer.layout(), *linear.place, static_cast<const std::byte*>(weights.data()));
      if (!Fence(Dequantize(matrix, output.data(), Device::kCuda, stream()), linear.name)) return;
      const HostArray actual = output.Read(DType::kBf16, linear.name);
      std::int64_t num_wrong = 0, first_wrong = -1;
      for (std::int64_t i = 0; i < actual.count(); ++i) {
        if (actual.Get(i) == linear.values.Get(i)) continue;
        if (num_wrong++ == 0) first_wrong = i;
      }
      EXPECT_EQ(num_wrong, 0) << linear.name << ": first is element " << first_wrong << ", "
                              << actual.Get(std::max<std::int64_t>(first_wrong, 0)) << ", expected "
                              << linear.values.Get(std::max<std::int64_t>(first_wrong, 0));
    }
  }
}

// Every E4M3 number under scales whose products are normal, subnormal in bf16 and above its largest number.
TEST_F(QuantizedMatrixGpuTest, EveryFp8CodeIsTheHosts) {
  std::vector<std::uint8_t> codes(8 * 256);
  const std::vector<float> scales = {1, 0.3f, 1e-38f, 1.1754944e-38f, 3e-41f, 1e36f, 1234.567f, 0x1p-9f};
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::uint8_t>(i % 128 == 127 ? 0 : i % 256);
  HostArray expected(DType::kBf16, static_cast<std::int64_t>(codes.size()));
  QuantizedMatrix matrix = {.rows = 8, .columns = 256, .codes = codes.data(), .scales = scales.data()};
  const auto device_codes = DeviceArray::Of(codes), device_scales = DeviceArray::Of(scales);
  const DeviceArray output(expected);
  testing::AlignedBytes host_codes(codes.size()), host_output(2 * codes.size());
  std::memcpy(host_codes.data(), codes.data(), codes.size());
  matrix.codes = host_codes.data();
  ASSERT_EQ(Dequantize(matrix, host_output.data(), Device::kCpu, nullptr), absl::OkStatus());
  matrix.codes = device_codes->data();
  matrix.scales = device_scales->data();
  if (!Fence(Dequantize(matrix, output.data(), Device::kCuda, stream()), "every code")) return;
  const std::vector<std::byte> actual = output.Read("every code");
  for (std::size_t i = 0; i < codes.size(); ++i) {
    EXPECT_EQ(std::memcmp(actual.data() + 2 * i, host_output.data() + 2 * i, 2), 0)
        << "code " << int{codes[i]} << " under scale " << scales[i / 256];
  }
}

TEST_F(QuantizedMatrixGpuTest, FewRowsEqualTheReference) {
  for (const QuantizedLayer& layer : QuantizedLayer::OfManyShapes()) {
    const DeviceArray weights(layer.bytes());
    testing::AlignedBytes host_weights(layer.bytes().size());
    std::memcpy(host_weights.data(), layer.bytes().data(), layer.bytes().size());
    for (const QuantizedLayer::Linear& linear : layer.Linears()) {
      for (const std::int64_t num_rows : {1, 7, 8, 9, 16, 17, 33, 64}) {
        for (const DType dtype : {DType::kBf16, DType::kFp32}) {
          for (const bool is_added : {false, true}) {
            const std::string what =
                absl::StrCat(linear.name, ", ", num_rows, " rows to ", DTypeName(dtype), is_added ? " added" : "");
            const std::int64_t inputs = linear.place->shape[1], outputs = linear.place->shape[0];
            const HostArray x = HostArray::Random(DType::kBf16, num_rows * inputs, 1);
            HostArray y = HostArray::Random(dtype, num_rows * outputs, 2);
            const DeviceArray device_x(x), device_y(y);
            MultiplyFewParams params;
            params.weight = QuantizedMatrixAt(layer.layout(), *linear.place, static_cast<const std::byte*>(weights.data()));
            params.x = device_x.data();
            params.y = device_y.data();
            params.y_dtype = dtype;
            params.is_added = is_added;
            params.num_rows = num_rows;
            if (!Fence(MultiplyFew(params, Device::kCuda, stream()), what)) return;
            params.weight = QuantizedMatrixAt(layer.layout(), *linear.place, host_weights.data());
            testing::AlignedBytes host_x(x.bytes().size());
            std::memcpy(host_x.data(), x.data(), x.bytes().size());
            params.x = host_x.data();
            params.y = y.data();
            ASSERT_EQ(MultiplyFew(params, Device::kCpu, nullptr), absl::OkStatus());
            // Products are below 0.25 and added up in fp32 in another order.
            const double absolute = static_cast<double>(inputs) * 0.25 * 0x1p-23;
            ExpectClose(device_y.Read(dtype, what), y, LastPlace(dtype), absolute, what);
          }
        }
      }
    }
  }
}

// A row's product does not depend on the rows beside it.
TEST_F(QuantizedMatrixGpuTest, ARowAloneHasTheBitsOfARowAmongMany) {
  for (const QuantizedLayer& layer : QuantizedLayer::OfManyShapes()) {
    const DeviceArray weights(layer.bytes());
    for (const QuantizedLayer::Linear& linear : layer.Linears()) {
      const std::int64_t inputs = linear.place->shape[1], outputs = linear.place->shape[0];
      const HostArray x = HostArray::Random(DType::kBf16, kFewRows * inputs, 1);
      const DeviceArray device_x(x), together(HostArray(DType::kFp32, kFewRows * outputs)),
          alone(HostArray(DType::kFp32, outputs));
      MultiplyFewParams params;
      params.weight = QuantizedMatrixAt(layer.layout(), *linear.place, static_cast<const std::byte*>(weights.data()));
      params.y_dtype = DType::kFp32;
      for (const std::int64_t num_rows : {std::int64_t{16}, std::int64_t{32}, kFewRows}) {
        params.x = device_x.data();
        params.y = together.data();
        params.num_rows = num_rows;
        if (!Fence(MultiplyFew(params, Device::kCuda, stream()), linear.name)) return;
        const std::vector<std::byte> expected = together.Read(linear.name);
        params.y = alone.data();
        params.num_rows = 1;
        for (const std::int64_t row : {std::int64_t{0}, std::int64_t{5}, num_rows - 1}) {
          params.x = static_cast<const std::byte*>(device_x.data()) + row * inputs * 2;
          if (!Fence(MultiplyFew(params, Device::kCuda, stream()), linear.name)) return;
          const std::vector<std::byte> actual = alone.Read(linear.name);
          EXPECT_EQ(std::memcmp(actual.data(), expected.data() + row * outputs * 4, actual.size()), 0)
              << linear.name << " row " << row << " of " << num_rows;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tandem

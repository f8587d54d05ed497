// rope, swiglu and embedding on the device against the CPU.
#include <cmath>
#include <limits>

#include "kernels/embedding/embedding.h"
#include "kernels/rope/rope.h"
#include "kernels/swiglu/swiglu.h"
#include "tests/kernels/device_array.h"

namespace tandem {
namespace {

class RowKernelsGpuTest : public DeviceKernelTest {};

TEST_F(RowKernelsGpuTest, RopeEqualsTheReferenceBothWays) {
  struct Shape {
    std::int64_t num_rows, num_heads, head_dim, row_stride;
    std::size_t offset_elements = 0;
  };
  constexpr std::int64_t kPositions = 50;
  for (const DType dtype : {DType::kFp32, DType::kBf16}) {
    for (const Shape& shape : std::initializer_list<Shape>{{1, 1, 2, 2},
                                                           {3, 2, 6, 15},
                                                           {17, 12, 64, 960},
                                                           {5, 40, 128, 6144},
                                                           {5, 40, 128, 6144, 1},
                                                           {600, 3, 64, 192},
                                                           {2, 300, 64, 19200}}) {
      for (const float sign : {1.0f, -1.0f}) {
        const std::string what =
            absl::StrCat("rope ", DTypeName(dtype), " ", shape.num_rows, " x ", shape.num_heads, " x ", shape.head_dim,
                         " stride ", shape.row_stride, " offset ", shape.offset_elements, " sign ", sign);
        const std::int64_t half = shape.head_dim / 2;
        std::vector<std::int32_t> positions;
        std::vector<float> cosines, sines;
        for (std::int64_t row = 0; row < shape.num_rows; ++row)
          positions.push_back(static_cast<std::int32_t>(row * 7 % kPositions));
        for (std::int64_t i = 0; i < kPositions * half; ++i) {
          const double angle =
              static_cast<double>(i / half) * std::pow(1e4, -static_cast<double>(i % half) / static_cast<double>(half));
          cosines.push_back(static_cast<float>(std::cos(angle)));
          sines.push_back(static_cast<float>(std::sin(angle)));
        }
        HostArray x = HostArray::Random(dtype, shape.num_rows * shape.row_stride, 1);
        const DeviceArray device_x(x, shape.offset_elements * ElementBytes(dtype));
        const auto device_positions = DeviceArray::Of(positions), device_cosines = DeviceArray::Of(cosines);
        const auto device_sines = DeviceArray::Of(sines);
        RopeParams params{.dtype = dtype, .x = device_x.data(), .num_rows = shape.num_rows, .row_stride = shape.row_stride};
        params.num_heads = shape.num_heads;
        params.head_dim = shape.head_dim;
        params.sign = sign;
        params.positions = static_cast<const std::int32_t*>(device_positions->data());
        params.cosines = static_cast<const float*>(device_cosines->data());
        params.sines = static_cast<const float*>(device_sines->data());
        if (!Fence(Rope(params, Device::kCuda, stream()), what)) return;
        params.x = x.data();
        params.positions = positions.data();
        params.cosines = cosines.data();
        params.sines = sines.data();
        ASSERT_EQ(Rope(params, Device::kCpu, nullptr), absl::OkStatus());
        // Two products below 1, fused or not.
        ExpectClose(device_x.Read(dtype, what), x, LastPlace(dtype), 0x1p-22, what);
      }
    }
  }
}

TEST_F(RowKernelsGpuTest, SwigluAndItsGradientEqualTheReference) {
  struct Shape {
    std::int64_t num_rows, width;
    std::size_t offset_elements = 0;
  };
  for (const DType dtype : {DType::kFp32, DType::kBf16}) {
    for (const Shape& shape :
         std::initializer_list<Shape>{{0, 8}, {1, 1}, {3, 31}, {5, 1536}, {5, 1536, 1}, {8, 14336}, {1000, 64}, {2, 4099}}) {
      const std::string what =
          absl::StrCat("swiglu ", DTypeName(dtype), " [", shape.num_rows, ", ", shape.width, "] offset ", shape.offset_elements);
      const std::int64_t count = shape.num_rows * shape.width;
      const std::size_t offset = shape.offset_elements * ElementBytes(dtype);
      HostArray gate_up = HostArray::Random(DType::kFp32, 2 * count, 1, 8), output(dtype, count), gradient(dtype, 2 * count);
      const HostArray grad_output = HostArray::Random(dtype, count, 2);
      if (count > 100) {
        const float infinity = std::numeric_limits<float>::infinity();
        gate_up.Set(0, infinity);
        gate_up.Set(1, -infinity);
        gate_up.Set(2, -200);  // exp(200) is no fp32 number
        gate_up.Set(3, 200);
        gate_up.Set(4, std::numeric_limits<float>::quiet_NaN());
      }
      const DeviceArray device_gate_up(gate_up, shape.offset_elements * sizeof(float)), device_output(output, offset),
          device_grad_output(grad_output, offset), device_gradient(gradient, offset);
      SwigluParams params{.dtype = dtype, .gate_up = device_gate_up.floats(), .output = device_output.data()};
      params.num_rows = shape.num_rows;
      params.width = shape.width;
      if (!Fence(Swiglu(params, Device::kCuda, stream()), what)) return;
      params.gate_up = gate_up.floats();
      params.output = output.data();
      ASSERT_EQ(Swiglu(params, Device::kCpu, nullptr), absl::OkStatus());
      // expf is off by two units, and its share of the sum in the denominator is at most whole.
      const double relative = LastPlace(dtype) + 8 * LastPlace(DType::kFp32);
      ExpectClose(device_output.Read(dtype, what), output, relative, 1e-30, what);

      HostArray gate_up_again(dtype, 2 * count), output_again(dtype, count);
      for (std::int64_t k = 0; k < 2 * count; ++k) gate_up_again.Set(k, static_cast<float>(gate_up.Get(k)));
      const DeviceArray device_gate_up_again(gate_up_again, offset), device_output_again(output_again, offset);
      SwigluBackwardParams backward{
          .dtype = dtype, .gate_up = device_gate_up_again.data(), .grad_output = device_grad_output.data()};
      backward.grad_gate_up = device_gradient.data();
      backward.output = device_output_again.data();
      backward.num_rows = shape.num_rows;
      backward.width = shape.width;
      if (!Fence(SwigluBackward(backward, Device::kCuda, stream()), what)) return;
      ExpectClose(device_gate_up_again.Read(dtype, what), gate_up_again, 0, 1e-30, what + " input");
      backward.gate_up = gate_up_again.data();
      backward.grad_output = grad_output.data();
      backward.grad_gate_up = gradient.data();
      backward.output = output_again.data();
      ASSERT_EQ(SwigluBackward(backward, Device::kCpu, nullptr), absl::OkStatus());
      // 1 + g (1 - s) is up to 9 and cancels near g = -1.28; times an `up` of 8.
      ExpectClose(device_gradient.Read(dtype, what), gradient, relative, 64 * LastPlace(DType::kFp32), what + " backward");
      ExpectClose(device_output_again.Read(dtype, what), output_again, relative, 1e-30, what + " output again");
      backward.gate_up = backward.grad_gate_up = device_gate_up_again.data();
      backward.grad_output = device_grad_output.data();
      backward.output = device_output_again.data();
      if (!Fence(SwigluBackward(backward, Device::kCuda, stream()), what)) return;
      ExpectClose(device_gate_up_again.Read(dtype, what), gradient, relative, 64 * LastPlace(DType::kFp32), what + " in place");
    }
  }
}

TEST_F(RowKernelsGpuTest, EmbeddingWidensRows) {
  struct Shape {
    std::int64_t num_rows, width;
    std::size_t offset_elements = 0;
  };
  constexpr std::int64_t kVocab = 300;
  for (const DType dtype : {DType::kFp32, DType::kBf16}) {
    for (const Shape& shape :
         std::initializer_list<Shape>{{0, 8}, {1, 1}, {3, 31}, {70, 576}, {70, 576, 1}, {9, 4096}, {2, 5001}}) {
      const std::string what = absl::StrCat("embedding ", DTypeName(dtype), " [", shape.num_rows, ", ", shape.width, "] offset ",
                                            shape.offset_elements);
      std::vector<std::uint32_t> token_ids;
      for (std::int64_t row = 0; row < shape.num_rows; ++row)
        token_ids.push_back(static_cast<std::uint32_t>(299 - row * 11 % kVocab));
      const HostArray table = HostArray::Random(dtype, kVocab * shape.width, 1);
      HostArray output(DType::kFp32, shape.num_rows * shape.width);
      const std::size_t offset = shape.offset_elements * ElementBytes(dtype);
      const DeviceArray device_table(table, offset), device_output(output, shape.offset_elements * sizeof(float));
      const auto device_ids = DeviceArray::Of(token_ids);
      EmbeddingParams params{.dtype = dtype, .table = device_table.data()};
      params.token_ids = static_cast<const std::uint32_t*>(device_ids->data());
      params.output = device_output.floats();
      params.num_rows = shape.num_rows;
      params.width = shape.width;
      // Every other row's id where it was drawn: the row's place from the end.
      std::vector<const std::uint32_t*> places, device_places;
      for (std::size_t row = 0; row < token_ids.size(); ++row) {
        const std::size_t from = token_ids.size() - 1 - row;
        places.push_back(row % 2 == 0 ? nullptr : &token_ids[from]);
        device_places.push_back(row % 2 == 0 ? nullptr : params.token_ids + from);
      }
      const auto places_on_device = DeviceArray::Of(device_places);
      EmbeddingParams host = params;
      host.table = table.data();
      host.token_ids = token_ids.data();
      host.output = output.floats();
      for (const bool has_places : {false, true}) {
        if (has_places) {
          params.token_places = static_cast<const std::uint32_t* const*>(places_on_device->data());
          host.token_places = places.data();
        }
        if (!Fence(Embedding(params, Device::kCuda, stream()), what)) return;
        ASSERT_EQ(Embedding(host, Device::kCpu, nullptr), absl::OkStatus());
        EXPECT_EQ(device_output.Read(what), output.bytes()) << what << (has_places ? " with places" : "");
      }
    }
  }
}

}  // namespace
}  // namespace tandem

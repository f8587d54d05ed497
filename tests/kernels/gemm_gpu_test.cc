#include "kernels/gemm/gemm.h"

#include <cmath>
#include <limits>

#include "tests/kernels/device_array.h"

namespace tandem {
namespace {

struct Product {
  std::int64_t m, n, k;
  bool is_a_transposed = false, is_b_transposed = false;
  DType factors = DType::kBf16, result = DType::kBf16;
  std::size_t offset_elements = 0;  // of all three arrays
  std::int64_t gap = 0;             // added to the leading dimensions
  float alpha = 1, beta = 0;

  std::string Described() const {
    return absl::StrCat("m ", m, " n ", n, " k ", k, is_a_transposed ? " a^T" : "", is_b_transposed ? " b^T" : "", " ",
                        DTypeName(factors), " to ", DTypeName(result), " offset ", offset_elements, " gap ", gap, " alpha ",
                        alpha, " beta ", beta);
  }
};

// A view of `data`, transposed in memory or not, and how many elements it spans.
MatrixView ViewOf(std::int64_t rows, std::int64_t columns, bool is_transposed, DType dtype, std::int64_t gap) {
  if (is_transposed) return ViewOf(columns, rows, false, dtype, gap).Transposed();
  return {.dtype = dtype, .rows = rows, .columns = columns, .row_stride = columns + gap};
}
std::int64_t SpanOf(const MatrixView& view) {
  return (view.rows - 1) * view.row_stride + (view.columns - 1) * view.column_stride + 1;
}

class GemmGpuTest : public DeviceKernelTest {
 protected:
  void SetUp() override {
    DeviceKernelTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    workspace_ = std::make_unique<DeviceArray>(std::vector<std::byte>(kGemmWorkspaceBytes));
    auto gemm = Gemm::Create(Device::kCuda, {static_cast<std::byte*>(workspace_->data()), kGemmWorkspaceBytes});
    ASSERT_TRUE(gemm.ok()) << gemm.status();
    gemm_ = *std::move(gemm);
    reference_ = Gemm::Create(Device::kCpu, {}).value();
  }
  void TearDown() override {
    if (workspace_ != nullptr) workspace_->Read("workspace");
  }

  void Check(const Product& product) {
    const std::string what = product.Described();
    GemmParams params{.alpha = product.alpha, .beta = product.beta};
    params.a = ViewOf(product.m, product.k, product.is_a_transposed, product.factors, product.gap);
    params.b = ViewOf(product.k, product.n, product.is_b_transposed, product.factors, product.gap);
    params.c = ViewOf(product.m, product.n, false, product.result, product.gap);
    const HostArray a = HostArray::Random(product.factors, SpanOf(params.a), 1),
                    b = HostArray::Random(product.factors, SpanOf(params.b), 2);
    HostArray c = HostArray::Random(product.result, SpanOf(params.c), 3);
    if (product.beta == 0) {
      for (std::int64_t i = 0; i < product.m; ++i) {
        for (std::int64_t j = 0; j < product.n; ++j) c.Set(i * params.c.row_stride + j, std::numeric_limits<float>::quiet_NaN());
      }
    }
    const std::size_t factor_offset = product.offset_elements * ElementBytes(product.factors);
    const DeviceArray device_a(a, factor_offset), device_b(b, factor_offset);
    const DeviceArray device_c(c, product.offset_elements * ElementBytes(product.result));
    params.a.data = device_a.data();
    params.b.data = device_b.data();
    params.c.data = device_c.data();
    if (!Fence(gemm_->Run(params, stream()), what)) return;
    params.a.data = a.data();
    params.b.data = b.data();
    params.c.data = c.data();
    ASSERT_EQ(reference_->Run(params, nullptr), absl::OkStatus()) << what;
    // Sums of k products below 1 grow as sqrt(k) / 3; adding them one by one in fp32 is off by 0.1 k 2^-24 (standard deviation),
    // so that k 2^-24 is ten of them: a fortieth of what TF32 would be off by at k = 4096. Tensor cores cut off where
    // others round.
    double absolute = static_cast<double>(product.k + 4) * 0x1p-24 * (product.factors == DType::kFp32 ? 1 : 8);
    double relative = LastPlace(product.result);
    if (product.result == DType::kBf16 && product.beta != 0) {
      // Half a unit of alpha a b, which is rounded too: at most 2^-8 of it, and it is no larger than the result and beta c
      // together, c below 1.
      absolute += 0x1p-8 * std::abs(static_cast<double>(product.beta));
      relative += 0x1p-8;
    }
    ExpectClose(device_c.Read(product.result, what), c, relative, absolute, what);
  }

  std::unique_ptr<DeviceArray> workspace_;
  std::unique_ptr<Gemm> gemm_, reference_;
};

constexpr std::pair<DType, DType> kTypes[] = {
    {DType::kFp32, DType::kFp32}, {DType::kBf16, DType::kFp32}, {DType::kBf16, DType::kBf16}};

TEST_F(GemmGpuTest, EqualsTheReferenceInEveryOrderOfMemoryAndType) {
  for (const auto& [factors, result] : kTypes) {
    for (const bool is_a_transposed : {false, true}) {
      for (const bool is_b_transposed : {false, true}) {
        for (const auto& [m, n, k] : std::initializer_list<std::array<std::int64_t, 3>>{{1, 1, 1},
                                                                                        {1, 64, 576},
                                                                                        {64, 1, 576},
                                                                                        {7, 33, 1},
                                                                                        {64, 16, 576},
                                                                                        {64, 576, 8},
                                                                                        {129, 257, 65},
                                                                                        {256, 192, 4096}}) {
          Check({m, n, k, is_a_transposed, is_b_transposed, factors, result});
        }
      }
    }
  }
}

TEST_F(GemmGpuTest, TakesUnalignedArraysAndGapsBetweenRows) {
  for (const auto& [factors, result] : kTypes) {
    for (const bool is_a_transposed : {false, true}) {
      for (const bool is_b_transposed : {false, true}) {
        Check({33, 65, 127, is_a_transposed, is_b_transposed, factors, result, /*offset_elements=*/1, /*gap=*/0});
        Check({64, 64, 64, is_a_transposed, is_b_transposed, factors, result, /*offset_elements=*/0, /*gap=*/3});
        Check({1, 128, 64, is_a_transposed, is_b_transposed, factors, result, /*offset_elements=*/3, /*gap=*/1});
        Check({64, 1, 16, is_a_transposed, is_b_transposed, factors, result, /*offset_elements=*/1, /*gap=*/5});
      }
    }
  }
}

TEST_F(GemmGpuTest, ScalesAndAddsToWhatIsThere) {
  for (const auto& [factors, result] : kTypes) {
    Check({16, 48, 576, false, true, factors, result, 0, 0, /*alpha=*/0.5f, /*beta=*/1});
    Check({576, 8, 64, true, false, factors, result, 0, 0, /*alpha=*/-0.25f, /*beta=*/0.5f});
  }
}

TEST_F(GemmGpuTest, RemembersAlgorithmsAndChecksItsParameters) {
  for (int i = 0; i < 3; ++i) Check({24, 96, 64, false, true});
  EXPECT_EQ(gemm_->Run({.a = {.rows = 0, .columns = 3, .row_stride = 3},
                        .b = {.rows = 3, .columns = 4, .row_stride = 4},
                        .c = {.rows = 0, .columns = 4, .row_stride = 4}},
                       stream()),
            absl::OkStatus());
  EXPECT_TRUE(absl::IsInvalidArgument(gemm_->Run({.a = {.rows = 2, .columns = 3, .row_stride = 3}}, stream())));
}

TEST_F(GemmGpuTest, WorksWithoutAWorkspace) {
  auto gemm = Gemm::Create(Device::kCuda, {});
  ASSERT_TRUE(gemm.ok()) << gemm.status();
  gemm_ = *std::move(gemm);
  Check({64, 576, 1536, false, true});
  Check({1, 576, 4096, false, true, DType::kFp32, DType::kFp32});
}

}  // namespace
}  // namespace tandem

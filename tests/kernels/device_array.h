// Device memory for kernel tests, with guard bytes on both sides.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <string>

#include "common/gpu/stream.h"
#include "tests/kernels/kernel_arrays.h"

namespace tandem {

class DeviceArray {
 public:
  // The contents begin `offset_bytes` behind a boundary of 256 bytes.
  explicit DeviceArray(const std::vector<std::byte>& contents, std::size_t offset_bytes = 0)
      : begin_(kGuardBytes + offset_bytes), size_(contents.size()) {
    std::vector<std::byte> whole(begin_ + size_ + kGuardBytes, kGuard);
    if (size_ > 0) std::memcpy(whole.data() + begin_, contents.data(), size_);
    EXPECT_EQ(cudaMalloc(&memory_, whole.size()), cudaSuccess);
    EXPECT_EQ(CopyFromHost(Device::kCuda, memory_, whole.data(), whole.size()), absl::OkStatus());
  }
  explicit DeviceArray(const HostArray& array, std::size_t offset_bytes = 0) : DeviceArray(array.bytes(), offset_bytes) {}
  template <typename T>
  static std::unique_ptr<DeviceArray> Of(const std::vector<T>& values) {
    const auto* bytes = reinterpret_cast<const std::byte*>(values.data());
    return std::make_unique<DeviceArray>(std::vector<std::byte>(bytes, bytes + values.size() * sizeof(T)));
  }
  ~DeviceArray() { cudaFree(memory_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  void* data() const { return static_cast<std::byte*>(memory_) + begin_; }
  float* floats() const { return static_cast<float*>(data()); }

  // The contents; fails the test when a guard byte has changed.
  std::vector<std::byte> Read(const std::string& what) const {
    std::vector<std::byte> whole(begin_ + size_ + kGuardBytes);
    EXPECT_EQ(CopyToHost(Device::kCuda, whole.data(), memory_, whole.size()), absl::OkStatus()) << what;
    for (std::size_t i = 0; i < whole.size(); ++i) {
      if (i == begin_) i += size_;
      if (whole[i] != kGuard) {
        ADD_FAILURE() << what << ": guard byte " << static_cast<std::int64_t>(i) - static_cast<std::int64_t>(begin_) << " of "
                      << size_ << " bytes was written";
        break;
      }
    }
    return {whole.begin() + static_cast<std::ptrdiff_t>(begin_), whole.begin() + static_cast<std::ptrdiff_t>(begin_ + size_)};
  }
  HostArray Read(DType dtype, const std::string& what) const {
    HostArray array(dtype, static_cast<std::int64_t>(size_ / ElementBytes(dtype)));
    *array.mutable_bytes() = Read(what);
    return array;
  }

 private:
  static constexpr std::size_t kGuardBytes = 256;
  static constexpr std::byte kGuard{0xfb};  // as bf16 and fp32 a number that no result has

  const std::size_t begin_, size_;
  void* memory_ = nullptr;
};

// A test of device code: a stream, fenced by Fence.
class DeviceKernelTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!HasCudaDevice()) GTEST_SKIP() << "no CUDA device";
    auto stream = Stream::Create(Device::kCuda);
    ASSERT_TRUE(stream.ok()) << stream.status();
    stream_ = *std::move(stream);
  }
  void* stream() const { return stream_->handle(); }
  // False, with the test failed, when the launch or the kernel went wrong.
  bool Fence(const absl::Status& launched, const std::string& what) {
    EXPECT_EQ(launched, absl::OkStatus()) << what;
    const absl::Status status = stream_->Synchronize();
    EXPECT_EQ(status, absl::OkStatus()) << what;
    return launched.ok() && status.ok();
  }

 private:
  std::unique_ptr<Stream> stream_;
};

}  // namespace tandem

#include "common/gpu/nvml.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace tandem {
namespace {

class NvmlTest : public ::testing::Test {
 protected:
  void TearDown() override {
    ::unsetenv("TANDEM_FAKE_NVML_FAILS");
    ::unsetenv("TANDEM_FAKE_NVML_SILENT");
  }
};

TEST_F(NvmlTest, ReadsInBaseUnits) {
  const auto nvml = Nvml::Open("GPU-fake", TANDEM_FAKE_NVML);
  ASSERT_TRUE(nvml.ok()) << nvml.status();
  const GpuReading reading = (*nvml)->Read();
  EXPECT_DOUBLE_EQ(reading.busy_ratio.value(), 0.73);
  EXPECT_DOUBLE_EQ(reading.power_watts.value(), 412.5);
  EXPECT_DOUBLE_EQ(reading.temperature_celsius.value(), 61);
  EXPECT_DOUBLE_EQ(reading.clock_hertz.value(), 1.98e9);
  EXPECT_EQ(reading.process_memory_bytes.value(), 123456789u);
}

TEST_F(NvmlTest, WhatTheDriverDoesNotSayIsAbsentAndTheRestIsThere) {
  const auto nvml = Nvml::Open("GPU-fake", TANDEM_FAKE_NVML);
  ASSERT_TRUE(nvml.ok()) << nvml.status();
  ::setenv("TANDEM_FAKE_NVML_FAILS", "power", 1);
  ::setenv("TANDEM_FAKE_NVML_SILENT", "1", 1);
  const GpuReading reading = (*nvml)->Read();
  EXPECT_FALSE(reading.power_watts.has_value());
  EXPECT_FALSE(reading.process_memory_bytes.has_value());
  EXPECT_DOUBLE_EQ(reading.temperature_celsius.value(), 61);
  ::setenv("TANDEM_FAKE_NVML_FAILS", "processes", 1);
  EXPECT_FALSE((*nvml)->Read().process_memory_bytes.has_value());
}

TEST_F(NvmlTest, DescribesTheDriverAndItsGpus) {
  const auto driver = DescribeDriver(TANDEM_FAKE_NVML);
  ASSERT_TRUE(driver.ok()) << driver.status();
  EXPECT_EQ(driver->version, "580.95.05");
  EXPECT_EQ(driver->cuda_version, 13000);
  ASSERT_EQ(driver->gpus.size(), 1u);
  EXPECT_EQ(driver->gpus[0].name, "NVIDIA Fake");
  EXPECT_EQ(driver->gpus[0].total_bytes, 80ULL << 30);
  EXPECT_EQ(driver->gpus[0].free_bytes, 60ULL << 30);
  EXPECT_EQ(DescribeDriver("/nowhere/libnvidia-ml.so.1").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(DescribeDriver("libc.so.6").status().code(), absl::StatusCode::kInternal);
  ::setenv("TANDEM_FAKE_NVML_FAILS", "memory", 1);
  const auto failed = DescribeDriver(TANDEM_FAKE_NVML);
  EXPECT_EQ(failed.status().code(), absl::StatusCode::kInternal);
  EXPECT_NE(failed.status().message().find("memory of a GPU: Unknown Error"), std::string::npos) << failed.status();
}

TEST_F(NvmlTest, AMissingLibraryAnotherOneAndAnUnknownGpuAreNamed) {
  const auto missing = Nvml::Open("GPU-fake", "/nowhere/libnvidia-ml.so.1");
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_NE(missing.status().message().find("/nowhere/libnvidia-ml.so.1"), std::string::npos) << missing.status();
  const auto other = Nvml::Open("GPU-fake", "libc.so.6");
  EXPECT_EQ(other.status().code(), absl::StatusCode::kInternal);
  EXPECT_NE(other.status().message().find("nvmlInit_v2"), std::string::npos) << other.status();
  const auto unknown = Nvml::Open("GPU-other", TANDEM_FAKE_NVML);
  EXPECT_EQ(unknown.status().code(), absl::StatusCode::kNotFound);
  EXPECT_NE(unknown.status().message().find("GPU-other"), std::string::npos) << unknown.status();
  ::setenv("TANDEM_FAKE_NVML_FAILS", "init", 1);
  EXPECT_EQ(Nvml::Open("GPU-fake", TANDEM_FAKE_NVML).status().code(), absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace tandem

// Skips every test of the binary where the device asked for is not there.
#include <gtest/gtest.h>

#include "tests/system/daemon_pair.h"

namespace tandem {
namespace {

class DeviceEnvironment final : public ::testing::Environment {
 public:
  void SetUp() override {
    if (TestDevice() == Device::kCuda && !HasCudaDevice()) GTEST_SKIP() << "no GPU";
  }
};
[[maybe_unused]] const ::testing::Environment* const environment = ::testing::AddGlobalTestEnvironment(new DeviceEnvironment);

}  // namespace
}  // namespace tandem

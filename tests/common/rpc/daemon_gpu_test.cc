// Exit codes of a daemon whose device is lost while it does not serve: each case in a process of its own, which may lose its
// context.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>

#include "common/gpu/stream.h"
#include "common/rpc/daemon.h"
#include "kernels/embedding/embedding.h"

namespace tandem {
namespace {

// A kernel reads where nothing is.
void LoseTheContext() {
  const auto stream = Stream::Create(Device::kCuda);
  float output = 0;
  const absl::Status launched = Embedding({.dtype = DType::kFp32,
                                           .table = &output,
                                           .token_ids = reinterpret_cast<const std::uint32_t*>(std::uintptr_t{64}),
                                           .output = &output,
                                           .num_rows = 1,
                                           .width = 1},
                                          Device::kCuda, (*stream)->handle());
  if (!launched.ok() || (*stream)->Synchronize().ok()) std::_Exit(100);  // nothing was lost
}

[[noreturn]] void End(Device device, bool loses_context, const absl::StatusOr<int>& served) {
  if (loses_context) LoseTheContext();
  DaemonConfig config;
  config.pool.device = device;
  std::_Exit(Daemon::ExitCode(config, served));
}

TEST(DaemonGpuTest, ALostContextEndsItWithFourBeforeAndAfterItServes) {
  if (!HasCudaDevice()) GTEST_SKIP() << "no CUDA device";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const absl::Status failed = absl::InternalError("encoding weights");
  const auto exits_with = [](int code) { return ::testing::ExitedWithCode(code); };
  EXPECT_EXIT(End(Device::kCuda, true, failed), exits_with(kPoisonedContextExitCode), "encoding weights.*\n.*poisoned");
  EXPECT_EXIT(End(Device::kCuda, true, 0), exits_with(kPoisonedContextExitCode), "ending with code 4");
  EXPECT_EXIT(End(Device::kCuda, true, 3), exits_with(kPoisonedContextExitCode), "ending with code 4");
  EXPECT_EXIT(End(Device::kCuda, false, failed), exits_with(2), "could not start: INTERNAL: encoding weights");
  EXPECT_EXIT(End(Device::kCuda, false, 3), exits_with(3), "");
  EXPECT_EXIT(End(Device::kCpu, true, failed), exits_with(2), "could not start") << "it uses no GPU";
}

}  // namespace
}  // namespace tandem

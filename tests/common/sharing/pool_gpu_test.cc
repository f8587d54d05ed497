// Pools in device memory between real processes. What does not depend on the kind of memory is in pool_member_test.cc.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "common/base/units.h"
#include "common/gpu/device.h"
#include "tests/common/sharing/pool_process.h"
#include "tests/support/tiny_model.h"

namespace tandem {
namespace {

using testing::FreePort;
using testing::PoolProcess;
using testing::PoolProcessOptions;
using Words = std::vector<std::string>;

constexpr absl::Duration kStart = absl::Seconds(60);  // two contexts
constexpr const char* kTrainerStanding = "4";
constexpr const char* kElastic = "5";

class PoolGpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!HasCudaDevice()) GTEST_SKIP() << "no GPU";
    folder_ =
        absl::StrCat("/tmp/tandem_pool_gpu_", ::getpid(), "_", ::testing::UnitTest::GetInstance()->current_test_info()->name());
    ASSERT_TRUE(WriteTinyModel(folder_ + "/model", {}).ok());
    for (std::string& address : addresses_) address = absl::StrCat("127.0.0.1:", FreePort());
    uuid_ = DeviceUuid(Device::kCuda).value();
  }
  void TearDown() override {
    rollout_.reset();
    trainer_.reset();
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }
  std::unique_ptr<PoolProcess> Launch(v1::Role role, const Words& more = {}) const {
    const std::size_t own = role == v1::ROLE_ROLLOUT ? 0 : 1;
    PoolProcessOptions options{.role = role,
                               .run_dir = folder_ + "/run",
                               .listen = addresses_[own],
                               .peer = addresses_[1 - own],
                               .model = folder_ + "/model",
                               .chunk_bytes = "2MiB",
                               .more = {"device=cuda", "pool_bytes=64MiB", "standing_bytes=4MiB"}};
    options.more.insert(options.more.end(), more.begin(), more.end());  // the last of a key counts
    return std::make_unique<PoolProcess>(options);
  }
  void StartPair(const Words& more = {}) {
    rollout_ = Launch(v1::ROLE_ROLLOUT, more);
    ASSERT_EQ(rollout_->ReadLine(kStart), "ready made");
    trainer_ = Launch(v1::ROLE_TRAINER, more);
    ASSERT_EQ(trainer_->ReadLine(kStart), "ready joined");
  }
  static bool AskUntil(PoolProcess* process, const std::string& command, const std::string& wanted) {
    for (int i = 0; i < 500; ++i) {
      if (process->Ask(command) == wanted) return true;
      absl::SleepFor(absl::Milliseconds(20));
    }
    return false;
  }
  // Once it ends by itself; -1 otherwise.
  static int ExitCodeOf(PoolProcess* process) {
    const int status = process->Wait(absl::Seconds(30));
    return status != -1 && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  // Of the card, all processes.
  static std::uint64_t UsedBytes() {
    const auto use = DriverMemory(Device::kCuda);
    EXPECT_TRUE(use.ok()) << use.status();
    return use.ok() ? use->total_bytes - use->free_bytes : 0;
  }

  std::string folder_;
  std::string uuid_;
  std::string addresses_[2];  // rollout server, trainer
  std::unique_ptr<PoolProcess> rollout_, trainer_;
};

TEST_F(PoolGpuTest, EitherStartsFirstAndBothSeeOneMemory) {
  for (const v1::Role first : {v1::ROLE_ROLLOUT, v1::ROLE_TRAINER}) {
    const auto maker = Launch(first);
    ASSERT_EQ(maker->ReadLine(kStart), "ready made");
    const auto joiner = Launch(first == v1::ROLE_ROLLOUT ? v1::ROLE_TRAINER : v1::ROLE_ROLLOUT);
    ASSERT_EQ(joiner->ReadLine(kStart), "ready joined");
    EXPECT_EQ(maker->Ask("manifest"), absl::StrCat("cuda_vmm ", uuid_, " 32x2097152 WEIGHT_FORMAT_BF16 stays"));
    EXPECT_EQ(joiner->Ask("manifest"), maker->Ask("manifest"));
    EXPECT_EQ(joiner->Ask("get 4"), "0") << "a new pool is zeroed";
    ASSERT_EQ(maker->Ask("put 4 77"), "ok");
    EXPECT_EQ(joiner->Ask("get 4"), "77");
    ASSERT_EQ(joiner->Ask("put 5 78"), "ok");
    EXPECT_EQ(maker->Ask("get 5"), "78");
    const std::string weights = maker->Ask("read_weights");
    EXPECT_EQ(weights, joiner->Ask("read_weights"));
    EXPECT_NE(weights, "0");
    EXPECT_TRUE(absl::StrContains(maker->Ask("ledger"), "outside_pool=")) << maker->Ask("ledger");
  }
}

TEST_F(PoolGpuTest, AnotherDeviceIsRefusedWithBothNamed) {
  rollout_ = Launch(v1::ROLE_ROLLOUT);
  ASSERT_EQ(rollout_->ReadLine(kStart), "ready made");
  trainer_ = Launch(v1::ROLE_TRAINER, {"device=cpu", "chunk_bytes=64KiB"});
  const std::string line = trainer_->ReadLine(kStart);
  EXPECT_TRUE(absl::StartsWith(line, "failed FAILED_PRECONDITION")) << line;
  EXPECT_TRUE(absl::StrContains(line, "'cpu'") && absl::StrContains(line, uuid_)) << line;
}

TEST_F(PoolGpuTest, CardThatIsTooSmallIsNamedWithFigures) {
  rollout_ = Launch(v1::ROLE_ROLLOUT, {"pool_bytes=0", "reserve_bytes=4096GiB"});
  const std::string reserved = rollout_->ReadLine(kStart);
  EXPECT_TRUE(absl::StartsWith(reserved, "failed RESOURCE_EXHAUSTED") && absl::StrContains(reserved, "free of")) << reserved;
  rollout_ = Launch(v1::ROLE_ROLLOUT, {"pool_bytes=4096GiB", "chunk_bytes=256MiB"});
  const std::string asked = rollout_->ReadLine(kStart);
  EXPECT_TRUE(absl::StartsWith(asked, "failed RESOURCE_EXHAUSTED") && absl::StrContains(asked, "pool_bytes")) << asked;
}

// CASES C41
TEST_F(PoolGpuTest, SurvivorOfTheMakerHandsThePoolOnWithoutTheModel) {
  StartPair();
  const std::string pool = rollout_->Ask("pool"), weights = rollout_->Ask("read_weights");
  ASSERT_EQ(rollout_->Ask("put 4 1024980523"), "ok");  // CASES C13: bits 0x3d17f62b
  std::filesystem::remove_all(folder_ + "/model");
  for (int round = 0; round < 3; ++round) {  // each time the other: all of the first makers are gone after two
    std::unique_ptr<PoolProcess>& dead = round % 2 == 0 ? rollout_ : trainer_;
    PoolProcess* const survivor = round % 2 == 0 ? trainer_.get() : rollout_.get();
    dead->Kill();
    ASSERT_TRUE(AskUntil(survivor, "attached", "no")) << round;
    EXPECT_EQ(survivor->Ask("get 4"), "1024980523");
    dead = Launch(round % 2 == 0 ? v1::ROLE_ROLLOUT : v1::ROLE_TRAINER);
    ASSERT_EQ(dead->ReadLine(kStart), "ready joined") << round;
    EXPECT_EQ(dead->Ask("pool"), pool);
    EXPECT_EQ(dead->Ask("get 4"), "1024980523");
    EXPECT_EQ(dead->Ask("read_weights"), weights);
  }
}

// CASES C42
TEST_F(PoolGpuTest, ThreeHundredAndTwentyChunksTravelUnderALowDescriptorLimit) {
  StartPair({"pool_bytes=640MiB", "nofile=256"});
  EXPECT_TRUE(absl::StrContains(trainer_->Ask("manifest"), " 320x2097152 ")) << trainer_->Ask("manifest");
  ASSERT_EQ(rollout_->Ask("put 5 3"), "ok");
  EXPECT_EQ(trainer_->Ask("get 5"), "3");
  EXPECT_EQ(trainer_->Ask("acquire"), "trainer_server 2");  // the first call opens the connection that later ones use
  EXPECT_EQ(trainer_->Ask("release"), "ok");
  const std::string rollout_descriptors = rollout_->Ask("descriptors"), trainer_descriptors = trainer_->Ask("descriptors");
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(trainer_->Ask("acquire"), absl::StrCat("trainer_server ", 2 * i + 4));
    EXPECT_EQ(trainer_->Ask("release"), "ok");
  }
  EXPECT_EQ(rollout_->Ask("descriptors"), rollout_descriptors);
  EXPECT_EQ(trainer_->Ask("descriptors"), trainer_descriptors);
}

TEST_F(PoolGpuTest, SecondDaemonAddsAContextAndNoPool) {
  const std::uint64_t empty = UsedBytes();
  const Words large = {"pool_bytes=8GiB", "chunk_bytes=64MiB"};
  rollout_ = Launch(v1::ROLE_ROLLOUT, large);
  ASSERT_EQ(rollout_->ReadLine(kStart), "ready made");
  const std::uint64_t one = UsedBytes();
  trainer_ = Launch(v1::ROLE_TRAINER, large);
  ASSERT_EQ(trainer_->ReadLine(kStart), "ready joined");
  const std::uint64_t two = UsedBytes();
  std::printf("used: %s before, %s with one daemon, %s with two\n", FormatBytes(empty).c_str(), FormatBytes(one).c_str(),
              FormatBytes(two).c_str());
  EXPECT_GE(one - empty, 8 * kGiB);
  EXPECT_LT(one - empty, 9 * kGiB + 512 * kMiB);
  EXPECT_LT(two - one, kGiB) << "a context takes about 0.5 GiB";
  // CASES C34, C40: switches take nothing.
  for (int i = 0; i < 100; ++i) {
    ASSERT_EQ(trainer_->Ask("acquire"), absl::StrCat("trainer_server ", 2 * i + 2));
    ASSERT_EQ(trainer_->Ask("release"), "ok");
  }
  const std::uint64_t after = UsedBytes();
  EXPECT_LT(std::max(two, after) - std::min(two, after), 2 * kMiB + 1) << FormatBytes(two) << ", then " << FormatBytes(after);
}

// CASES C34
TEST_F(PoolGpuTest, StrictLeasesEndTheStrayProcessAndNoOther) {
  StartPair({"strict=1", "daemon=1"});
  ASSERT_EQ(rollout_->Ask("put 5 9"), "ok");
  EXPECT_EQ(rollout_->Ask("touch 5"), "ok");
  ASSERT_EQ(trainer_->Ask("acquire"), "trainer_server 2");
  EXPECT_EQ(trainer_->Ask("touch 5"), "ok");
  ASSERT_EQ(trainer_->Ask("release"), "ok");
  trainer_->Send("touch 5");
  EXPECT_EQ(ExitCodeOf(trainer_.get()), kPoisonedContextExitCode);
  ASSERT_TRUE(AskUntil(rollout_.get(), "attached", "no"));
  EXPECT_EQ(rollout_->Ask("touch 5"), "ok");
  EXPECT_EQ(rollout_->Ask("get 5"), "1") << "byte 1 over 9";
  trainer_ = Launch(v1::ROLE_TRAINER, {"strict=1", "daemon=1"});
  ASSERT_EQ(trainer_->ReadLine(kStart), "ready joined");
  ASSERT_TRUE(absl::StartsWith(trainer_->Ask("acquire"), "trainer_server"));
  EXPECT_EQ(trainer_->Ask("touch 5"), "ok");
}

TEST_F(PoolGpuTest, SecondTransportSharesMemoryThatDiesWithItsMaker) {
  const Words ipc = {"transport=cuda_ipc"};
  StartPair(ipc);
  EXPECT_EQ(trainer_->Ask("manifest"), absl::StrCat("cuda_ipc ", uuid_, " 1x67108864 WEIGHT_FORMAT_BF16 dies"));
  ASSERT_EQ(rollout_->Ask("put 4 77"), "ok");
  EXPECT_EQ(trainer_->Ask("get 4"), "77");
  EXPECT_EQ(rollout_->Ask("read_weights"), trainer_->Ask("read_weights"));
  EXPECT_EQ(trainer_->Ask("acquire"), "trainer_server 2");
  EXPECT_EQ(trainer_->Ask("release"), "ok");

  trainer_->Kill();  // not the maker: nothing is lost
  ASSERT_TRUE(AskUntil(rollout_.get(), "attached", "no"));
  EXPECT_EQ(rollout_->Ask("health"), "ok");
  trainer_ = Launch(v1::ROLE_TRAINER, ipc);
  ASSERT_EQ(trainer_->ReadLine(kStart), "ready joined");
  EXPECT_EQ(trainer_->Ask("get 4"), "77");

  rollout_->Kill();
  ASSERT_TRUE(AskUntil(trainer_.get(), "attached", "no"));
  const std::string health = trainer_->Ask("health");
  EXPECT_TRUE(absl::StartsWith(health, "UNAVAILABLE") && absl::StrContains(health, "died with rollout_server")) << health;
  const std::string refused = trainer_->Ask("acquire");
  EXPECT_TRUE(absl::StrContains(refused, "died with rollout_server")) << refused;
  // A new maker waits for the survivor to go, then makes a pool of its own.
  rollout_ = Launch(v1::ROLE_ROLLOUT, ipc);
  EXPECT_EQ(rollout_->ReadLine(absl::Seconds(2)), "");
  trainer_->Kill();
  EXPECT_EQ(rollout_->ReadLine(kStart), "ready made");
  EXPECT_EQ(rollout_->Ask("get 4"), "0");
}

TEST_F(PoolGpuTest, DaemonOfTheSecondTransportEndsWithItsMaker) {
  const Words ipc = {"transport=cuda_ipc", "daemon=1"};
  StartPair(ipc);
  rollout_->Kill();
  EXPECT_EQ(ExitCodeOf(trainer_.get()), 3);
  StartPair(ipc);
}

TEST_F(PoolGpuTest, TransportsDoNotMixAndTheSecondHasNoStrictLeases) {
  rollout_ = Launch(v1::ROLE_ROLLOUT);
  ASSERT_EQ(rollout_->ReadLine(kStart), "ready made");
  trainer_ = Launch(v1::ROLE_TRAINER, {"transport=cuda_ipc"});
  const std::string mixed = trainer_->ReadLine(kStart);
  EXPECT_TRUE(absl::StrContains(mixed, "transport is 'cuda_vmm', here 'cuda_ipc'")) << mixed;
  trainer_ = Launch(v1::ROLE_TRAINER, {"transport=cuda_ipc", "strict=1"});
  const std::string strict = trainer_->ReadLine(kStart);
  EXPECT_TRUE(absl::StartsWith(strict, "failed INVALID_ARGUMENT")) << strict;
}

}  // namespace
}  // namespace tandem

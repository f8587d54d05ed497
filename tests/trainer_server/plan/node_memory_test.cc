#include "trainer_server/plan/node_memory.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "common/base/units.h"
#include "tests/trainer_server/support/fake_model.h"

namespace tandem {
namespace {

TEST(HostMemoryTest, IsWhatTheTightestGroupAroundThisProcessHasLeft) {
  const std::string root = FreshDirectory("host_memory"), proc = root + "/proc", groups = root + "/groups";
  std::filesystem::create_directories(proc + "/self");
  std::filesystem::create_directories(groups + "/job.slice/step");
  EXPECT_EQ(AvailableHostBytes(proc, groups), 0u);
  WriteText(proc + "/meminfo", "MemTotal: 2000 kB\nMemAvailable:    1000 kB\n");
  EXPECT_EQ(AvailableHostBytes(proc, groups), 1000 * kKiB);
  const auto limit = [&](const std::string& folder, std::uint64_t max_kib, std::uint64_t used_kib, std::uint64_t cached_kib) {
    WriteText(groups + folder + "/memory.max", absl::StrCat(max_kib * kKiB, "\n"));
    WriteText(groups + folder + "/memory.current", absl::StrCat(used_kib * kKiB, "\n"));
    WriteText(groups + folder + "/memory.stat", absl::StrCat("anon 1\ninactive_file ", cached_kib * kKiB, "\nactive_file 0\n"));
  };
  limit("/job.slice", 900, 300, 100);
  EXPECT_EQ(AvailableHostBytes(proc, groups), 1000 * kKiB) << "it is not known to be this process's";
  WriteText(proc + "/self/cgroup", "1:cpuset:/old\n0::/job.slice/step\n");
  EXPECT_EQ(AvailableHostBytes(proc, groups), 700 * kKiB) << "of the group around it";
  limit("/job.slice/step", 500, 600, 150);
  EXPECT_EQ(AvailableHostBytes(proc, groups), 50 * kKiB);
  WriteText(groups + "/job.slice/step/memory.max", "max\n");
  EXPECT_EQ(AvailableHostBytes(proc, groups), 700 * kKiB);
  WriteText(proc + "/self/cgroup", "0::/\n");
  limit("", 400, 0, 0);
  EXPECT_EQ(AvailableHostBytes(proc, groups), 400 * kKiB) << "a container sees its own as the root";
}

}  // namespace
}  // namespace tandem

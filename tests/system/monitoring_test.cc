// A job under a real Prometheus: both daemons' pages, every panel of every dashboard, and what is left when the job has ended.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "tests/support/tiny_model.h"
#include "tests/system/daemon_pair.h"
#include "tests/system/system_jobs.h"

namespace tandem {
namespace {

// "metrics=127.0.0.1:9091" of the daemon's log.
std::string MetricsAddress(const DaemonPair& pair, Half half) {
  const std::string log = pair.log(half), before = " metrics=";
  const std::size_t begin = log.find(before);
  EXPECT_NE(begin, std::string::npos) << log;
  return begin == std::string::npos ? "" : log.substr(begin + before.size(), log.find('\n', begin) - begin - before.size());
}

TEST(MonitoringTest, EveryPanelHasDataUnderARunningJobAndNoSeriesOutlivesIt) {
  const std::string directory = ::testing::TempDir() + "/monitoring";
  std::filesystem::remove_all(directory);
  const absl::StatusOr<std::string> model = WriteTinyModel(directory + "/model", SystemModel());
  ASSERT_TRUE(model.ok()) << model.status();
  std::ofstream(directory + "/rows.jsonl") << TinyRows(32);
  const int num_steps = TestDevice() == Device::kCuda ? 100 : 400;  // a quarter of a minute
  std::ofstream(directory + "/job.textproto") << "name: \"watched\" seed: 1 num_steps: " << num_steps << R"(
    data { path: "rows.jsonl" }
    rollout { prompts_per_step: 4 group_size: 8 sampling { temperature: 1 max_tokens: 48 } }
    rewards { name: "ended" weight: 1 ended_by_itself {} }
    rewards { name: "vowel" weight: 0.5 regular_expression { pattern: "[aeiou]" } }
    loss { preset: LOSS_PRESET_DR_GRPO beta: 0.01 }
    adapter { rank: 4 alpha: 8 }
    optimizer { learning_rate: 5e-4 }
    evaluation { path: "rows.jsonl" interval_steps: 50 samples_per_prompt: 4 pass_at: 1 pass_at: 4 }
    checkpoint { interval_steps: 20 })";
  DaemonPairOptions options;
  options.directory = directory + "/pair";
  options.model = *model;
  DaemonPair pair(std::move(options));
  for (Half half : {Half::kRollout, Half::kTrainer}) pair.Start(half);
  for (Half half : {Half::kRollout, Half::kTrainer}) ASSERT_TRUE(pair.WaitReady(half, absl::Seconds(60))) << pair.log(half);

  const std::string bin = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  const std::string command = absl::StrCat(
      "python3 ", TANDEM_SOURCE_DIR, "/tests/system/run_dashboards.py --source=", TANDEM_SOURCE_DIR, " --tandem=", bin,
      "/tandem --trainer=", pair.address(Half::kTrainer), " --rollout=", pair.address(Half::kRollout),
      " --trainer_metrics=", MetricsAddress(pair, Half::kTrainer), " --rollout_metrics=", MetricsAddress(pair, Half::kRollout),
      " --work=", directory, "/work --job=", directory, "/job.textproto", TestDevice() == Device::kCuda ? " --gpu" : "");
  EXPECT_EQ(std::system(command.c_str()), 0) << command << pair.log(Half::kTrainer);
  EXPECT_EQ(pair.log(Half::kTrainer).find("no metric is declared"), std::string::npos) << pair.log(Half::kTrainer);
}

}  // namespace
}  // namespace tandem

// tandem_train_bench: one training step's forward and backward passes and its optimizer step, on packed groups. Weights are
// random unless
// --model names a file: speed does not depend on their values.
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <span>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/time/clock.h"
#include "common/base/random.h"
#include "common/torch/bench_model.h"
#include "common/torch/parallel.h"
#include "trainer_server/batch/pack_micro_batches.h"
#include "trainer_server/optim/adamw.h"
#include "trainer_server/policy/policy_model.h"

ABSL_FLAG(std::string, model, "", "model directory or GGUF file; empty: SmolLM2-135M's shape with random weights");
ABSL_FLAG(int, batch, 64, "completions of a step");
ABSL_FLAG(int, group_size, 8, "completions that share a prompt");
ABSL_FLAG(int, prompt, 30, "tokens of each prompt");
ABSL_FLAG(int, tokens, 12, "tokens of each completion");
ABSL_FLAG(int, micro_batch_tokens, 2048, "rows of one micro-batch at most");
ABSL_FLAG(int, rank, 8, "rank of the adapter on all linear layers");
ABSL_FLAG(int, steps, 3, "steps timed; the median counts");
ABSL_FLAG(bool, json, false, "one line of JSON instead of text");

namespace tandem {
namespace {

struct Group {
  std::vector<std::uint32_t> prompt;
  std::vector<std::vector<std::uint32_t>> completions;
};

std::vector<Group> RandomGroups(int vocab_size) {
  std::uint64_t counter = 0;
  const auto ids = [&](int count) {
    std::vector<std::uint32_t> drawn(static_cast<std::size_t>(count));
    for (std::uint32_t& id : drawn)
      id = static_cast<std::uint32_t>(RandomBelow(3, counter++, static_cast<std::uint64_t>(vocab_size)));
    return drawn;
  };
  std::vector<Group> groups;
  const int group_size = absl::GetFlag(FLAGS_group_size);
  for (int done = 0; done < absl::GetFlag(FLAGS_batch); done += group_size) {
    groups.push_back({ids(absl::GetFlag(FLAGS_prompt)), {}});
    for (int i = done; i < std::min(done + group_size, absl::GetFlag(FLAGS_batch)); ++i) {
      groups.back().completions.push_back(ids(absl::GetFlag(FLAGS_tokens)));
    }
  }
  return groups;
}

absl::StatusOr<std::vector<MicroBatch>> Pack(const std::vector<Group>& groups) {
  const std::vector<std::uint8_t> mask(static_cast<std::size_t>(absl::GetFlag(FLAGS_tokens)), 1);
  std::vector<GroupToPack> to_pack;
  std::int32_t sequence = 0;
  for (const Group& group : groups) {
    to_pack.push_back({group.prompt, {}});
    for (const auto& completion : group.completions) to_pack.back().completions.push_back({sequence++, completion, mask});
  }
  return PackMicroBatches(to_pack, absl::GetFlag(FLAGS_micro_batch_tokens));
}

std::span<float> Floats(const BenchBytes& bytes) {
  return {reinterpret_cast<float*>(bytes.span().data()), bytes.span().size() / sizeof(float)};
}

absl::Status RunBench() {
  TANDEM_ASSIGN_OR_RETURN(const BenchModel bench, BenchModel::Open(absl::GetFlag(FLAGS_model)));
  PolicyOptions options;
  options.rank = absl::GetFlag(FLAGS_rank);
  for (int kind = 0; kind < kNumLinearKinds; ++kind) options.targets.push_back(static_cast<LinearKind>(kind));
  const AdapterLayout layout = AdapterLayout::Create(bench.config, options.rank, options.targets);
  const BenchBytes masters(layout.total_bytes), gradients(layout.total_bytes), first(layout.total_bytes),
      second(layout.total_bytes);
  TANDEM_ASSIGN_OR_RETURN(const auto policy, PolicyModel::Create(bench.config, bench.layout, bench.weights.span().data(),
                                                                 {masters.span(), gradients.span()}, options));
  TANDEM_RETURN_IF_ERROR(policy->InitializeAdapters(1));
  const std::vector<Group> groups = RandomGroups(bench.config.vocab_size);
  TANDEM_ASSIGN_OR_RETURN(const std::vector<MicroBatch> batches, Pack(groups));

  std::vector<double> seconds;
  std::size_t rows = 0, head_rows = 0;
  for (int step = 1; step <= absl::GetFlag(FLAGS_steps); ++step) {
    const absl::Time begin = absl::Now();
    rows = head_rows = 0;
    TANDEM_RETURN_IF_ERROR(policy->ZeroGradients());
    for (const MicroBatch& batch : batches) {
      TANDEM_ASSIGN_OR_RETURN(const HeadScores scores, policy->Forward(batch, false, 0));
      const std::vector<double> grad_logprobs(scores.logprobs.size(), 1e-3);
      TANDEM_RETURN_IF_ERROR(policy->Backward(grad_logprobs, {}));
      rows += batch.token_ids.size();
      head_rows += batch.head_rows.size();
    }
    TANDEM_RETURN_IF_ERROR(
        AdamWStep({}, 1e-5, static_cast<std::uint64_t>(step), Floats(masters), Floats(gradients), Floats(first), Floats(second))
            .status());
    seconds.push_back(absl::ToDoubleSeconds(absl::Now() - begin));
  }
  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2];
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const double peak_mib = static_cast<double>(usage.ru_maxrss) / 1024;
  if (absl::GetFlag(FLAGS_json)) {
    std::printf(
        "{\"bench\":\"train\",\"model\":\"%s\",\"rows\":%zu,\"completion_tokens\":%zu,\"micro_batches\":%zu,\"rank\":%d,"
        "\"threads\":%d,"
        "\"step_seconds_median\":%.4f,\"completion_tokens_per_second\":%.1f,\"peak_resident_mib\":%.0f}\n",
        bench.config.name.c_str(), rows, head_rows, batches.size(), options.rank, NumTorchThreads(), median,
        static_cast<double>(head_rows) / median, peak_mib);
  } else {
    std::printf(
        "%s, %d threads\nstep of %zu rows (%zu completion tokens) in %zu micro-batches: median %.3f s, %.0f completion tokens/s, "
        "peak %.0f MiB\n",
        bench.config.name.c_str(), NumTorchThreads(), rows, head_rows, batches.size(), median,
        static_cast<double>(head_rows) / median, peak_mib);
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  for (const auto* flag : {&FLAGS_batch, &FLAGS_group_size, &FLAGS_prompt, &FLAGS_tokens, &FLAGS_rank, &FLAGS_steps}) {
    if (absl::GetFlag(*flag) < 1) {
      std::fprintf(stderr, "--batch, --group_size, --prompt, --tokens, --rank and --steps must be at least 1\n");
      return 2;
    }
  }
  if (const absl::Status status = tandem::RunBench(); !status.ok()) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    return 1;
  }
  return 0;
}

// tandem_attention_bench: the trainer's attention on a GPU, forward and backward on one sequence of random values.
//
// FLOP of T causal rows: 2 T^2 H D forward, 2.5 times that backward. cuDNN's dense attention reaches 644 and 569 TFLOP/s on an
// H200 at the default shape.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "common/base/clock.h"
#include "common/base/random.h"
#include "common/base/units.h"
#include "common/gpu/stream.h"
#include "common/model/weight_codecs.h"
#include "common/torch/arena_allocator.h"
#include "common/torch/buffer.h"
#include "common/torch/run_torch.h"
#include "trainer_server/policy/bench_pool.h"
#include "trainer_server/policy/cudnn_attention.h"
#include "trainer_server/policy/flash_attention.h"

ABSL_FLAG(int, tokens, 20480, "rows: a prompt of --prompt, and completions that share the others");
ABSL_FLAG(int, prompt, 512, "rows of the prompt");
ABSL_FLAG(int, completions, 1, "completions of the prompt");
ABSL_FLAG(int, heads, 32, "query heads");
ABSL_FLAG(int, kv_heads, 8, "key-value heads");
ABSL_FLAG(int, head_dim, 128, "elements of a head");
ABSL_FLAG(int, scratch_mib, 512, "what cuDNN's attention may take at most, in MiB");
ABSL_FLAG(int, memory_gib, 16, "memory of the device");
ABSL_FLAG(int, runs, 5, "runs timed; the median counts");

namespace tandem {
namespace {

MicroBatch OneGroup() {
  const std::int32_t tokens = absl::GetFlag(FLAGS_tokens), prompt = absl::GetFlag(FLAGS_prompt),
                     completions = absl::GetFlag(FLAGS_completions);
  MicroBatch batch;
  batch.token_ids.resize(static_cast<std::size_t>(tokens));
  std::int32_t begin = prompt;
  for (std::int32_t n = 0; n < completions; ++n) {
    const std::int32_t end = begin + (tokens - begin) / (completions - n);
    batch.completions.push_back({n, 0, prompt, begin, end});
    begin = end;
  }
  return batch;
}

// Scores of the forward pass: pairs of a row and a key that it sees.
double NumScores() {
  const double prompt = absl::GetFlag(FLAGS_prompt), completions = absl::GetFlag(FLAGS_completions);
  const double length = (absl::GetFlag(FLAGS_tokens) - prompt) / completions;
  return prompt * prompt / 2 + completions * (length * length / 2 + length * prompt);
}

absl::StatusOr<double> MedianSeconds(Stream* stream, const std::function<void()>& run) {
  std::vector<double> seconds;
  for (int n = 0; n <= absl::GetFlag(FLAGS_runs); ++n) {
    TANDEM_RETURN_IF_ERROR(stream->Synchronize());
    const MonotonicTime begin = MonotonicTime::Now();
    run();
    TANDEM_RETURN_IF_ERROR(stream->Synchronize());
    if (n > 0) seconds.push_back(absl::ToDoubleSeconds(MonotonicTime::Now() - begin));  // the first one builds graphs
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

absl::Status Run() {
  ModelConfig config;
  config.num_heads = absl::GetFlag(FLAGS_heads);
  config.num_kv_heads = absl::GetFlag(FLAGS_kv_heads);
  config.head_dim = absl::GetFlag(FLAGS_head_dim);
  const MicroBatch batch = OneGroup();
  const std::int64_t rows = absl::GetFlag(FLAGS_tokens), q = config.q_size(), width = q + 2 * config.kv_size();
  TANDEM_ASSIGN_OR_RETURN(const BenchPool pool,
                          BenchPool::Create(Device::kCuda, static_cast<std::uint64_t>(absl::GetFlag(FLAGS_memory_gib)) * kGiB));
  TANDEM_ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, Stream::Create(Device::kCuda));
  return RunTorch("attention", [&]() -> absl::Status {
    const ArenaScope scope(pool.rest(), "bench", Device::kCuda);
    using Elements = Buffer<std::uint16_t, Device::kCuda>;
    const Elements qkv(rows * width), output(rows * q), grad_output(rows * q), grad_qkv(rows * width);
    const Buffer<float, Device::kCuda> lse(rows * config.num_heads);
    std::vector<std::uint16_t> block(static_cast<std::size_t>(width) * 256);
    for (std::size_t i = 0; i < block.size(); ++i) block[i] = FloatToBf16(static_cast<float>(2 * RandomUniform(1, i) - 1));
    for (const Elements* elements : {&qkv, &grad_output}) {
      for (std::int64_t first = 0; first < elements->size(); first += static_cast<std::int64_t>(block.size())) {
        const std::int64_t count = std::min(elements->size() - first, static_cast<std::int64_t>(block.size()));
        TANDEM_RETURN_IF_ERROR(
            CopyFromHost(Device::kCuda, elements->data() + first, block.data(), static_cast<std::uint64_t>(count) * 2));
      }
    }
    const AttentionRows attention_rows(batch);
    const auto time = [&](const char* name, const FusedAttention& attention) -> absl::Status {
      const std::uint64_t held = scope.used_bytes();
      TANDEM_ASSIGN_OR_RETURN(const DeviceMemoryUse before, DriverMemory(Device::kCuda));
      TANDEM_ASSIGN_OR_RETURN(const double forward,
                              MedianSeconds(stream.get(), [&] { attention.Forward(qkv.data(), output.data(), lse.data()); }));
      TANDEM_ASSIGN_OR_RETURN(const double backward, MedianSeconds(stream.get(), [&] {
                                attention.Backward(qkv.data(), output.data(), lse.data(), grad_output.data(), grad_qkv.data());
                              }));
      TANDEM_ASSIGN_OR_RETURN(const DeviceMemoryUse after, DriverMemory(Device::kCuda));
      const double flop = 4 * NumScores() * static_cast<double>(q);
      std::printf(
          "%s: %lld rows, prompt %d, %d completions, %d/%d heads of %d: forward %.3f ms %.0f TFLOP/s, backward %.3f ms "
          "%.0f TFLOP/s, scratch %.1f MiB, outside of it %.1f MiB\n",
          name, static_cast<long long>(rows), absl::GetFlag(FLAGS_prompt), absl::GetFlag(FLAGS_completions), config.num_heads,
          config.num_kv_heads, config.head_dim, forward * 1e3, flop / forward * 1e-12, backward * 1e3,
          2.5 * flop / backward * 1e-12, static_cast<double>(scope.peak_bytes() - held) / kMiB,
          (static_cast<double>(before.free_bytes) - static_cast<double>(after.free_bytes)) / kMiB);
      return absl::OkStatus();
    };
    if (CudnnAttention::Serves(config)) {
      CudnnGraphs graphs(config);
      TANDEM_RETURN_IF_ERROR(
          time("cuDNN", CudnnAttention(config, attention_rows, static_cast<std::int64_t>(absl::GetFlag(FLAGS_scratch_mib)) << 20,
                                       &graphs, stream->handle())));
    }
    return time("LibTorch's flash attention(deterministic)", FlashAttention(config, attention_rows, stream->handle()));
  });
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  const absl::Status status = tandem::Run();
  if (status.ok()) return 0;
  std::fprintf(stderr, "tandem_attention_bench: %s\n", status.ToString().c_str());
  return 1;
}

// tandem_trainer_bench: a training step's forward and backward passes and its optimizer step, on packed groups, without rollout
// server and RPC. Prints tokens a second and FLOP rates, time by stage, peak memory by owner, and what of the layer inputs went
// to the host. Weights are random unless a model is named; speed does not depend on their values.
//
// FLOP, useful and executed, are those of trainer_server/batch/pass_work.h: a shared prompt counts once, in tokens a second for
// each of its completions. Rates are shares of a bf16 product of 8192^3 in the same run.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "common/base/clock.h"
#include "common/base/random.h"
#include "common/base/units.h"
#include "common/gpu/device.h"
#include "common/gpu/stage_clock.h"
#include "common/gpu/stream.h"
#include "common/model/model_source.h"
#include "common/model/random_model_source.h"
#include "common/model/weight_codecs.h"
#include "common/torch/arena_allocator.h"
#include "common/torch/buffer.h"
#include "common/torch/parallel.h"
#include "common/torch/run_torch.h"
#include "kernels/adamw/adamw.h"
#include "kernels/gemm/gemm.h"
#include "trainer_server/batch/pack_micro_batches.h"
#include "trainer_server/batch/pass_work.h"
#include "trainer_server/optim/adamw.h"
#include "trainer_server/policy/bench_pool.h"
#include "trainer_server/policy/policy_model.h"

ABSL_FLAG(std::string, device, "cpu", "cpu or cuda");
ABSL_FLAG(std::string, model, "", "model directory or GGUF file; empty: random weights in --shape");
ABSL_FLAG(std::string, shape, "smollm2-135m", "smollm2-135m, qwen2.5-1.5b, llama-3.1-8b or qwen3-8b, where no model is named");
ABSL_FLAG(std::string, weights, "auto", "auto (what the daemons take), fp32, bf16, fp8, fp8_block or nf4");
ABSL_FLAG(double, memory_gib, 4, "memory for weights, trained state and the arena of activations");
ABSL_FLAG(int, completions, 64, "completions of a step");
ABSL_FLAG(int, group_size, 8, "completions that share a prompt");
ABSL_FLAG(int, prompt, 30, "tokens of each prompt");
ABSL_FLAG(int, tokens, 12, "tokens of each completion");
ABSL_FLAG(int, micro_batch_tokens, 0, "rows of one micro-batch at most; 0: 2048, or one group");
ABSL_FLAG(bool, score_prompts, false, "prompts' tokens go through the head too");
ABSL_FLAG(int, rank, 8, "rank of the adapter on all linear layers");
ABSL_FLAG(int, steps, 3, "steps timed after a first one; the median counts");
ABSL_FLAG(double, host_gib, 64, "page-locked host memory for what is kept of layers, at most");
ABSL_FLAG(bool, deterministic_attention, false, "the same bits each time, by LibTorch's flash attention");
ABSL_FLAG(std::string, trace, "", "file for the last step's stages and copies in Chrome's trace format, which Perfetto draws");
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
  for (int done = 0; done < absl::GetFlag(FLAGS_completions); done += group_size) {
    groups.push_back({ids(absl::GetFlag(FLAGS_prompt)), {}});
    for (int i = done; i < std::min(done + group_size, absl::GetFlag(FLAGS_completions)); ++i) {
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
  const int group_rows = absl::GetFlag(FLAGS_prompt) + absl::GetFlag(FLAGS_group_size) * absl::GetFlag(FLAGS_tokens);
  const int max_tokens = absl::GetFlag(FLAGS_micro_batch_tokens);
  TANDEM_ASSIGN_OR_RETURN(std::vector<MicroBatch> batches,
                          PackMicroBatches(to_pack, max_tokens > 0 ? max_tokens : std::max(2048, group_rows)));
  if (absl::GetFlag(FLAGS_score_prompts)) std::ranges::for_each(batches, [](MicroBatch& batch) { AddPromptHeadRows(&batch); });
  return batches;
}

struct BenchedModel {
  ModelConfig config;
  WeightLayout layout;
  std::span<std::byte> weights;
};

// Numbers that are finite in every format, whatever bytes a tensor begins at: bf16 of at most 0.05 with the lowest bit off, so
// that no byte is a NaN in E4M3.
absl::Status FillRandom(Device device, std::span<std::byte> weights) {
  constexpr std::size_t kCount = (std::size_t{1} << 22) + 64;  // no multiple of any row
  std::vector<std::uint16_t> block(kCount);
  for (std::size_t i = 0; i < kCount; ++i) {
    block[i] = FloatToBf16(static_cast<float>(0.1 * RandomUniform(1, i) - 0.05)) & 0xfffe;
  }
  const std::size_t block_bytes = kCount * sizeof(block[0]);
  for (std::size_t begin = 0; begin < weights.size(); begin += block_bytes) {
    TANDEM_RETURN_IF_ERROR(
        CopyFromHost(device, weights.data() + begin, block.data(), std::min(block_bytes, weights.size() - begin)));
  }
  return absl::OkStatus();
}

absl::StatusOr<BenchedModel> OpenModel(Device device, BenchPool* memory) {
  const std::string name = absl::GetFlag(FLAGS_weights);
  const std::optional<StorageFormat> wanted = ParseStorageFormat(name);  // none: auto
  if (!wanted.has_value() && name != "auto") {
    return absl::InvalidArgumentError(absl::StrCat("--weights=", name, ": auto, fp32, bf16, fp8, fp8_block or nf4"));
  }
  StorageFormat format = wanted.value_or(device == Device::kCuda ? StorageFormat::kBf16 : StorageFormat::kFp32);
  BenchedModel model;
  std::unique_ptr<ModelSource> source;
  if (const std::string path = absl::GetFlag(FLAGS_model); path.empty()) {
    TANDEM_ASSIGN_OR_RETURN(model.config, ConfigOfShape(absl::GetFlag(FLAGS_shape)));
  } else {
    TANDEM_ASSIGN_OR_RETURN(source, ModelSource::Open(path));
    TANDEM_ASSIGN_OR_RETURN(format, ChooseStorageFormat(wanted, device, *source));
    model.config = source->description().config;
  }
  TANDEM_RETURN_IF_ERROR(CheckStorageFormat(model.config, format));
  model.layout = WeightLayout::Create(model.config, format);
  TANDEM_ASSIGN_OR_RETURN(model.weights, memory->Take(model.layout.total_bytes));
  TANDEM_RETURN_IF_ERROR(source == nullptr ? FillRandom(device, model.weights)
                                           : source->LoadWeights(model.layout, device, model.weights, [](std::uint64_t) {}));
  return model;
}

std::span<float> Floats(std::span<std::byte> bytes) {
  return {reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float)};
}

// FLOP a second of a bf16 product of 8192^3, the best of ten. 0 on the CPU.
absl::StatusOr<double> ReferenceRate(Device device, Gemm* gemm, Stream* stream) {
  constexpr std::int64_t kSize = 8192;
  if (device == Device::kCpu) return 0;
  const Buffer<std::uint16_t, Device::kCuda> factors(2 * kSize * kSize), product(kSize * kSize);
  TANDEM_RETURN_IF_ERROR(
      FillRandom(device, {reinterpret_cast<std::byte*>(factors.data()), static_cast<std::size_t>(4 * kSize * kSize)}));
  const auto view = [](std::uint16_t* data) { return MatrixView{data, DType::kBf16, kSize, kSize, kSize, 1}; };
  double best = 0;
  for (int round = 0; round < 10; ++round) {
    TANDEM_RETURN_IF_ERROR(stream->Synchronize());
    const MonotonicTime begin = MonotonicTime::Now();
    TANDEM_RETURN_IF_ERROR(
        gemm->Run({view(factors.data()), view(factors.data() + kSize * kSize), view(product.data())}, stream->handle()));
    TANDEM_RETURN_IF_ERROR(stream->Synchronize());
    best = std::max(best, 2.0 * kSize * kSize * kSize / absl::ToDoubleSeconds(MonotonicTime::Now() - begin));
  }
  return best;
}

struct Figures {
  double seconds = 0;                    // of a step, the median
  std::map<std::string, double> stages;  // seconds of a step, by stage, mean over the timed steps
  double overlapped_copies = 0;          // share of the copies' time in which the pass computed, in the last step
  double tokens = 0;                     // a shared prompt's for each of its completions
  PassWork work;
  double reference_rate = 0;
  std::map<std::string, double> gib;  // by owner
  PassMemory pass;
  std::size_t micro_batches = 0;
};

double Gib(std::uint64_t bytes) { return static_cast<double>(bytes) / (1 << 30); }

std::string Json(const std::map<std::string, double>& values) {
  std::string text;
  for (const auto& [name, value] : values) absl::StrAppend(&text, text.empty() ? "" : ",", "\"", name, "\":", value);
  return absl::StrCat("{", text, "}");
}

void Print(const BenchedModel& bench, Device device, const Figures& figures) {
  const double tokens_rate = figures.tokens / figures.seconds, scored_rate = figures.work.head_rows / figures.seconds;
  const double useful_rate = UsefulFlops(bench.config, figures.work) / figures.seconds,
               executed_rate = ExecutedFlops(bench.config, figures.work) / figures.seconds;
  if (absl::GetFlag(FLAGS_json)) {
    std::printf(
        "{\"bench\":\"trainer\",\"model\":\"%s\",\"weights\":\"%s\",\"device\":\"%s\",\"rank\":%d,\"rows\":%.0f,\"tokens\":%.0f,"
        "\"scored_tokens\":%.0f,\"micro_batches\":%zu,\"step_seconds_median\":%.4f,\"tokens_per_second\":%.1f,"
        "\"scored_tokens_per_second\":%.1f,\"useful_tflops\":%.1f,\"executed_tflops\":%.1f,\"reference_tflops\":%.1f,"
        "\"layers_on_device\":%lld,\"keeps_attention\":%s,\"offloaded_bytes\":%llu,\"overlapped_copies\":%.4f,\"gib\":%s,\"stage_"
        "seconds\":%s}\n",
        bench.config.name.c_str(), StorageFormatName(bench.layout.format), DeviceName(device).c_str(), absl::GetFlag(FLAGS_rank),
        figures.work.rows, figures.tokens, figures.work.head_rows, figures.micro_batches, figures.seconds, tokens_rate,
        scored_rate, useful_rate * 1e-12, executed_rate * 1e-12, figures.reference_rate * 1e-12,
        static_cast<long long>(figures.pass.layers_on_device), figures.pass.keeps_attention ? "true" : "false",
        static_cast<unsigned long long>(figures.pass.offloaded_bytes), figures.overlapped_copies, Json(figures.gib).c_str(),
        Json(figures.stages).c_str());
    return;
  }
  std::printf("%s, weights %s, adapter rank %d, %s, %d threads\n", bench.config.name.c_str(),
              StorageFormatName(bench.layout.format), absl::GetFlag(FLAGS_rank), DeviceName(device).c_str(), NumTorchThreads());
  std::printf("step of %.0f tokens (%.0f scored) in %zu micro-batches of %.0f rows in all: median %.3f s\n", figures.tokens,
              figures.work.head_rows, figures.micro_batches, figures.work.rows, figures.seconds);
  std::printf("  %.0f tokens/s, %.0f scored tokens/s; useful %.0f TFLOP/s, executed %.0f", tokens_rate, scored_rate,
              useful_rate * 1e-12, executed_rate * 1e-12);
  if (figures.reference_rate > 0) {
    std::printf("; of a product's %.0f: %.0f %%, %.0f %%", figures.reference_rate * 1e-12,
                100 * useful_rate / figures.reference_rate, 100 * executed_rate / figures.reference_rate);
  }
  std::printf("\n");
  for (const auto& [stage, seconds] : figures.stages) std::printf("  %-20s %8.1f ms\n", stage.c_str(), 1000 * seconds);
  for (const auto& [owner, gib] : figures.gib) std::printf("  %-20s %8.3f GiB\n", owner.c_str(), gib);
  std::printf(
      "  layer inputs%s: %lld of %d layers' stay on the device, %s to the host and back a pass, %.1f %% of the copies' time "
      "while the pass computes\n",
      figures.pass.keeps_attention ? " and attention's outputs" : "", static_cast<long long>(figures.pass.layers_on_device),
      bench.config.num_layers, FormatBytes(figures.pass.offloaded_bytes).c_str(), 100 * figures.overlapped_copies);
}

// Copies have a stream of their own. While the pass is in "layer inputs" it may wait for one.
absl::Status LookAtCopies(const std::vector<StageSpan>& spans, const void* compute_stream, Figures* figures) {
  std::vector<StageSpan> copies, computing;
  for (const StageSpan& span : spans) {
    if (span.stream != compute_stream) {
      copies.push_back(span);
    } else if (std::string_view(span.stage) != "layer inputs") {
      computing.push_back(span);
    }
  }
  figures->overlapped_copies = OverlappedShare(copies, computing);
  const std::string path = absl::GetFlag(FLAGS_trace);
  if (path.empty()) return absl::OkStatus();
  std::ofstream file(path);
  file << ChromeTrace(spans);
  file.close();
  return file.good() ? absl::OkStatus() : absl::InvalidArgumentError(absl::StrCat("--trace=", path, " cannot be written"));
}

absl::Status RunBench() {
  const Device device = absl::GetFlag(FLAGS_device) == "cuda" ? Device::kCuda : Device::kCpu;
  const auto memory_bytes = static_cast<std::uint64_t>(absl::GetFlag(FLAGS_memory_gib) * (1 << 30));
  TANDEM_ASSIGN_OR_RETURN(BenchPool memory, BenchPool::Create(device, memory_bytes));
  TANDEM_ASSIGN_OR_RETURN(const BenchedModel bench, OpenModel(device, &memory));
  PolicyOptions options;
  options.rank = absl::GetFlag(FLAGS_rank);
  for (int kind = 0; kind < kNumLinearKinds; ++kind) options.targets.push_back(static_cast<LinearKind>(kind));
  const AdapterLayout layout = AdapterLayout::Create(bench.config, options.rank, options.targets);
  std::span<std::byte> masters, gradients, first, second, workspace, scratch;
  for (std::span<std::byte>* array : {&masters, &gradients, &first, &second}) {
    TANDEM_ASSIGN_OR_RETURN(*array, memory.Take(layout.total_bytes));
    TANDEM_RETURN_IF_ERROR(ZeroMemory(device, array->data(), array->size()));
  }
  TANDEM_ASSIGN_OR_RETURN(workspace, memory.Take(kGemmWorkspaceBytes));
  TANDEM_ASSIGN_OR_RETURN(scratch, memory.Take(AdamWScratchBytes()));
  TANDEM_ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, Stream::Create(device));
  TANDEM_ASSIGN_OR_RETURN(const std::unique_ptr<Gemm> gemm, Gemm::Create(device, workspace));
  TANDEM_ASSIGN_OR_RETURN(const std::unique_ptr<StageClock> clock, StageClock::Create(device));
  Figures figures;
  {
    const ArenaScope arena(memory.rest(), "reference product", device);
    TANDEM_RETURN_IF_ERROR(RunTorch("reference product", [&] {
      TANDEM_ASSIGN_OR_RETURN(figures.reference_rate, ReferenceRate(device, gemm.get(), stream.get()));
      return absl::OkStatus();
    }));
  }
  const ArenaScope arena(memory.rest(), "activations", device);
  PolicyDevice policy_device{.device = device, .stream = stream.get(), .gemm = gemm.get()};
  policy_device.attention.is_deterministic = absl::GetFlag(FLAGS_deterministic_attention);
  policy_device.host_limit_bytes = static_cast<std::uint64_t>(absl::GetFlag(FLAGS_host_gib) * (1 << 30));
  policy_device.clock = clock.get();
  TANDEM_ASSIGN_OR_RETURN(const auto policy, PolicyModel::Create(bench.config, bench.layout, bench.weights.data(),
                                                                 {masters, gradients}, options, policy_device));
  TANDEM_RETURN_IF_ERROR(policy->InitializeAdapters(1));
  const std::vector<Group> groups = RandomGroups(bench.config.vocab_size);
  TANDEM_ASSIGN_OR_RETURN(const std::vector<MicroBatch> batches, Pack(groups));
  figures.micro_batches = batches.size();
  for (const MicroBatch& batch : batches) {
    figures.work.Add(batch);
    for (const PackedCompletion& completion : batch.completions) {
      figures.tokens += completion.prompt_end - completion.prompt_begin + completion.end - completion.begin;
    }
  }

  std::vector<double> seconds;
  const int num_steps = absl::GetFlag(FLAGS_steps);
  for (int step = 0; step <= num_steps; ++step) {
    const MonotonicTime begin = MonotonicTime::Now();
    TANDEM_RETURN_IF_ERROR(policy->ZeroGradients());
    for (const MicroBatch& batch : batches) {
      TANDEM_ASSIGN_OR_RETURN(const HeadScores scores, policy->Forward(batch, false, 0));
      const std::vector<double> grad_logprobs(scores.logprobs.size(), 1e-3);
      TANDEM_RETURN_IF_ERROR(policy->Backward(grad_logprobs, {}));
    }
    TANDEM_RETURN_IF_ERROR(AdamWStep({}, 1e-5, static_cast<std::uint64_t>(step + 1), Floats(masters), Floats(gradients),
                                     Floats(first), Floats(second), {device, stream.get(), scratch.data()})
                               .status());
    TANDEM_ASSIGN_OR_RETURN(const std::vector<StageSpan> spans, clock->Take());
    if (step == 0) continue;
    seconds.push_back(absl::ToDoubleSeconds(MonotonicTime::Now() - begin));
    for (const auto& [stage, spent] : SecondsByStage(spans)) figures.stages[stage] += spent / num_steps;
    if (step == num_steps) TANDEM_RETURN_IF_ERROR(LookAtCopies(spans, stream->handle(), &figures));
  }
  std::sort(seconds.begin(), seconds.end());
  figures.seconds = seconds[seconds.size() / 2];
  figures.pass = policy->last_pass();
  figures.gib["weights"] = Gib(bench.weights.size());
  figures.gib["trained state"] = Gib(4 * layout.total_bytes);
  figures.gib["workspaces"] = Gib(workspace.size() + scratch.size());
  figures.gib["arena peak"] = Gib(arena.peak_bytes());
  figures.gib["layer inputs on host"] = Gib(figures.pass.offloaded_bytes);
  if (const auto driver = DriverMemory(device); driver.ok()) {
    const std::uint64_t used = driver->total_bytes - driver->free_bytes;
    figures.gib["driver, whole card"] = Gib(used);
    figures.gib["outside the pool"] = Gib(used - std::min(used, memory.size_bytes()));
  }
  Print(bench, device, figures);
  return absl::OkStatus();
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  for (const auto* flag : {&FLAGS_completions, &FLAGS_group_size, &FLAGS_prompt, &FLAGS_tokens, &FLAGS_rank, &FLAGS_steps}) {
    if (absl::GetFlag(*flag) < 1) {
      std::fprintf(stderr, "--completions, --group_size, --prompt, --tokens, --rank and --steps must be at least 1\n");
      return 2;
    }
  }
  if (const std::string device = absl::GetFlag(FLAGS_device); device != "cpu" && device != "cuda") {
    std::fprintf(stderr, "--device=%s is neither cpu nor cuda\n", device.c_str());
    return 2;
  }
  if (const absl::Status status = tandem::RunBench(); !status.ok()) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    return 1;
  }
  return 0;
}

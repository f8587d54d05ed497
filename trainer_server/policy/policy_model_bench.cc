// tandem_train_bench: one training step's forward and backward passes and its optimizer step, on packed groups. Weights are
// random unless
// --model names a file: speed does not depend on their values.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/time/clock.h"
#include "common/base/random.h"
#include "common/base/units.h"
#include "common/gpu/stream.h"
#include "common/memory/pool_chunks.h"
#include "common/model/model_source.h"
#include "common/model/random_model_source.h"
#include "common/model/weight_codecs.h"
#include "common/torch/arena_allocator.h"
#include "common/torch/parallel.h"
#include "kernels/adamw/adamw.h"
#include "kernels/gemm/gemm.h"
#include "trainer_server/batch/pack_micro_batches.h"
#include "trainer_server/optim/adamw.h"
#include "trainer_server/policy/policy_model.h"

ABSL_FLAG(std::string, device, "cpu", "cpu (fp32 weights) or cuda (bf16 weights)");
ABSL_FLAG(std::string, model, "", "model directory or GGUF file; empty: random weights in --shape");
ABSL_FLAG(std::string, shape, "smollm2-135m", "smollm2-135m, llama-3.1-8b or qwen3-8b, where no model is named");
ABSL_FLAG(int, memory_gib, 4, "memory for weights, trained state and activations");
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

// All of the bench's memory on one device, as the pool takes it.
class BenchMemory {
 public:
  static absl::StatusOr<BenchMemory> Create(Device device, std::uint64_t size_bytes) {
    std::unique_ptr<PoolMemory> memory = PoolMemory::CreateMemfd();
    if (device == Device::kCuda) { TANDEM_ASSIGN_OR_RETURN(memory, PoolMemory::CreateCuda()); }
    const std::uint64_t chunk_bytes = RoundUp(std::uint64_t{64} << 20, memory->granularity_bytes());
    const auto num_chunks = static_cast<std::uint32_t>((size_bytes + chunk_bytes - 1) / chunk_bytes);
    TANDEM_RETURN_IF_ERROR(RaiseDescriptorLimit(num_chunks));
    BenchMemory bench;
    TANDEM_ASSIGN_OR_RETURN(const std::vector<UniqueFd> chunks, memory->CreateChunks(num_chunks, chunk_bytes));
    TANDEM_ASSIGN_OR_RETURN(bench.mapping_, memory->Map(chunks, chunk_bytes));
    bench.free_ = {bench.mapping_->base(), bench.mapping_->size_bytes()};
    bench.memory_ = std::move(memory);
    return bench;
  }
  absl::StatusOr<std::span<std::byte>> Take(std::uint64_t size_bytes) {
    const std::uint64_t rounded = RoundUp(size_bytes, 4096);
    if (rounded > free_.size()) {
      return absl::ResourceExhaustedError(absl::StrCat("--memory_gib: ", size_bytes, " bytes wanted, ", free_.size(), " left"));
    }
    const std::span<std::byte> piece = free_.first(size_bytes);
    free_ = free_.subspan(rounded);
    return piece;
  }
  std::span<std::byte> rest() const { return free_; }

 private:
  std::unique_ptr<PoolMemory> memory_;
  std::unique_ptr<PoolMapping> mapping_;
  std::span<std::byte> free_;
};

struct BenchedModel {
  ModelConfig config;
  WeightLayout layout;
  std::span<std::byte> weights;
};

// Random numbers in [-0.05, 0.05), the same block again and again.
absl::Status FillRandom(Device device, StorageFormat format, std::span<std::byte> weights) {
  constexpr std::size_t kCount = std::size_t{1} << 22;
  std::vector<float> block(kCount);
  for (std::size_t i = 0; i < kCount; ++i) block[i] = static_cast<float>(0.1 * RandomUniform(1, i) - 0.05);
  std::vector<std::uint16_t> rounded;
  for (const float value : block) rounded.push_back(FloatToBf16(value));
  const bool is_bf16 = format == StorageFormat::kBf16;
  const void* const source = is_bf16 ? static_cast<const void*>(rounded.data()) : block.data();
  const std::size_t block_bytes = kCount * (is_bf16 ? 2 : 4);
  for (std::size_t begin = 0; begin < weights.size(); begin += block_bytes) {
    TANDEM_RETURN_IF_ERROR(CopyFromHost(device, weights.data() + begin, source, std::min(block_bytes, weights.size() - begin)));
  }
  return absl::OkStatus();
}

absl::StatusOr<BenchedModel> OpenModel(Device device, BenchMemory* memory) {
  const StorageFormat format = device == Device::kCuda ? StorageFormat::kBf16 : StorageFormat::kFp32;
  BenchedModel model;
  std::unique_ptr<ModelSource> source;
  if (const std::string path = absl::GetFlag(FLAGS_model); path.empty()) {
    TANDEM_ASSIGN_OR_RETURN(model.config, ConfigOfShape(absl::GetFlag(FLAGS_shape)));
  } else {
    TANDEM_ASSIGN_OR_RETURN(source, ModelSource::Open(path));
    model.config = source->description().config;
  }
  model.layout = WeightLayout::Create(model.config, format);
  TANDEM_ASSIGN_OR_RETURN(model.weights, memory->Take(model.layout.total_bytes));
  TANDEM_RETURN_IF_ERROR(source == nullptr ? FillRandom(device, format, model.weights)
                                           : source->LoadWeights(model.layout, device, model.weights, [](std::uint64_t) {}));
  return model;
}

std::span<float> Floats(std::span<std::byte> bytes) {
  return {reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float)};
}

absl::Status RunBench() {
  const Device device = absl::GetFlag(FLAGS_device) == "cuda" ? Device::kCuda : Device::kCpu;
  TANDEM_ASSIGN_OR_RETURN(BenchMemory memory,
                          BenchMemory::Create(device, static_cast<std::uint64_t>(absl::GetFlag(FLAGS_memory_gib)) << 30));
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
  const ArenaScope arena(memory.rest(), "activations", device);
  TANDEM_ASSIGN_OR_RETURN(const auto policy,
                          PolicyModel::Create(bench.config, bench.layout, bench.weights.data(), {masters, gradients}, options,
                                              {device, stream.get(), gemm.get()}));
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
    TANDEM_RETURN_IF_ERROR(AdamWStep({}, 1e-5, static_cast<std::uint64_t>(step), Floats(masters), Floats(gradients),
                                     Floats(first), Floats(second), {device, stream.get(), scratch.data()})
                               .status());
    seconds.push_back(absl::ToDoubleSeconds(absl::Now() - begin));
  }
  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2];
  const double peak_mib = static_cast<double>(arena.peak_bytes()) / (1 << 20);
  if (absl::GetFlag(FLAGS_json)) {
    std::printf(
        "{\"bench\":\"train\",\"model\":\"%s\",\"rows\":%zu,\"completion_tokens\":%zu,\"micro_batches\":%zu,\"rank\":%d,"
        "\"device\":\"%s\",\"threads\":%d,"
        "\"step_seconds_median\":%.4f,\"completion_tokens_per_second\":%.1f,\"peak_activation_mib\":%.0f}\n",
        bench.config.name.c_str(), rows, head_rows, batches.size(), options.rank, absl::GetFlag(FLAGS_device).c_str(),
        NumTorchThreads(), median, static_cast<double>(head_rows) / median, peak_mib);
  } else {
    std::printf(
        "%s, %s, %d threads\nstep of %zu rows (%zu completion tokens) in %zu micro-batches: median %.3f s, %.0f completion "
        "tokens/s, "
        "peak of activations %.0f MiB\n",
        bench.config.name.c_str(), DeviceName(device).c_str(), NumTorchThreads(), rows, head_rows, batches.size(), median,
        static_cast<double>(head_rows) / median, peak_mib);
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  for (const auto* flag :
       {&FLAGS_batch, &FLAGS_group_size, &FLAGS_prompt, &FLAGS_tokens, &FLAGS_rank, &FLAGS_steps, &FLAGS_memory_gib}) {
    if (absl::GetFlag(*flag) < 1) {
      std::fprintf(stderr, "--batch, --group_size, --prompt, --tokens, --rank, --steps and --memory_gib must be at least 1\n");
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

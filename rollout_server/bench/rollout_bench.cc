// tandem_rollout_bench: decode on the GPU by the rollout server's model and sampler, without engine and RPC: prefill, then steps
// at the first, the middle and the last context length of a case, whose time grows linearly with the context between them. As in
// the engine a step is handed over before the tokens of the one before are collected. Weights are random; speed does not depend
// on their values. Prints ms a step, tokens a second over the whole case, bytes that a step has to read, and the share of the
// read sweep that the same run measured. Then, of steps at the middle context that are not captured as graphs, the ms of each
// kernel family, and what it has to read.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "common/base/clock.h"
#include "common/base/random.h"
#include "common/base/units.h"
#include "common/gpu/stage_clock.h"
#include "common/model/random_model_source.h"
#include "common/model/weight_codecs.h"
#include "rollout_server/bench/bench_memory.h"
#include "rollout_server/bench/read_sweep.h"
#include "rollout_server/model/decoder_model.h"
#include "rollout_server/sample/sampler.h"

ABSL_FLAG(std::string, shape, "llama-3.1-8b", "smollm2-135m, qwen2.5-1.5b, llama-3.1-8b or qwen3-8b");
ABSL_FLAG(std::string, cases, "a,c,d", "a: 64 sequences, 256 + 1024 tokens; c: 8 of one prompt, 512 + 8192; d: 256, 256 + 512");
ABSL_FLAG(std::string, weights, "bf16", "bf16, fp8, fp8_block or nf4");
ABSL_FLAG(std::string, kv_cache_dtype, "bf16", "bf16 or fp8");
ABSL_FLAG(int, rank, 0, "rank of an adapter on all linear layers; 0: none");
ABSL_FLAG(int, steps, 24, "timed steps at each context length");
ABSL_FLAG(double, top_p, 1, "of the sampler");
ABSL_FLAG(bool, in_turn, false, "collect a step's tokens before the next step is handed over");
ABSL_FLAG(bool, json, false, "one line of JSON a case instead of a table");

namespace tandem {
namespace {

constexpr int kBlockTokens = 16, kMaxBatchTokens = 8192;

struct Case {
  std::string name;
  int sequences = 0;
  int prompt = 0;
  int tokens = 0;
  bool is_prompt_shared = false;
};
const std::array<Case, 3> kCases = {{{"a", 64, 256, 1024, false}, {"c", 8, 512, 8192, true}, {"d", 256, 256, 512, false}}};

// The model's parts, the draw, and from the end of a draw until the next step's first kernel: the copy of its indices, and what
// the host is late by.
enum class BenchPart { kLinear, kAttention, kElementwise, kHead, kSampling, kHostGap };
constexpr std::array kBenchPartNames = {"linear", "attention", "elementwise", "head", "sampling", "host_gap"};
constexpr std::size_t kNumBenchParts = kBenchPartNames.size();

// What comes next in `stream` belongs to `part`.
void Begin(StageClock* clock, BenchPart part, void* stream) {
  if (clock != nullptr) clock->Enter(kBenchPartNames[static_cast<std::size_t>(part)], stream);
}

constexpr std::size_t kPatternValues = (std::size_t{1} << 22) + 64;  // no multiple of any row
float PatternValue(std::size_t i) { return static_cast<float>((RandomUniform(1, i) * 2 - 1) * 0.03); }

// One case's sequences over their blocks.
class Sequences {
 public:
  explicit Sequences(const Case& c) : case_(c) {
    const int blocks = (c.prompt + c.tokens + kBlockTokens - 1) / kBlockTokens;
    for (int s = 0; s < c.sequences; ++s) {
      std::vector<std::int32_t> table;
      for (int b = 0; b < blocks; ++b) {
        const bool is_shared = c.is_prompt_shared && s > 0 && (b + 1) * kBlockTokens <= c.prompt;
        table.push_back(is_shared ? tables_[0][static_cast<std::size_t>(b)] : num_blocks_++);
      }
      tables_.push_back(std::move(table));
    }
  }
  int num_blocks() const { return num_blocks_; }

  // The token at `context - 1` of every sequence, which `before` draws.
  StepBatch Decode(int context, std::uint32_t vocab_size, std::optional<AdapterView> adapter,
                   const std::optional<PendingDraw>& before) const {
    StepBatch batch = Step(0, case_.sequences, context - 1, context, vocab_size, adapter);
    if (!before.has_value()) return batch;
    for (std::int64_t row = 0; row < case_.sequences; ++row) batch.token_places.push_back(before->place(row));
    return batch;
  }

  // Tokens [begin, end) of sequences [first, last).
  StepBatch Step(int first, int last, int begin, int end, std::uint32_t vocab_size, std::optional<AdapterView> adapter) const {
    StepBatch batch;
    batch.cu_query_lens.push_back(0);
    for (int s = first; s < last; ++s) {
      const std::vector<std::int32_t>& table = tables_[static_cast<std::size_t>(s)];
      for (int position = begin; position < end; ++position) {
        batch.token_ids.push_back(static_cast<std::uint32_t>(
            RandomBelow(2, static_cast<std::uint64_t>(s) << 32 | static_cast<std::uint64_t>(position), vocab_size)));
        batch.positions.push_back(position);
        batch.slot_mapping.push_back(std::int64_t{table[static_cast<std::size_t>(position / kBlockTokens)]} * kBlockTokens +
                                     position % kBlockTokens);
      }
      batch.cu_query_lens.push_back(static_cast<std::int32_t>(batch.token_ids.size()));
      batch.context_lens.push_back(end);
      const auto used = static_cast<std::ptrdiff_t>((end + kBlockTokens - 1) / kBlockTokens);
      batch.block_tables.emplace_back(table.begin(), table.begin() + used);
      batch.logit_rows.push_back(batch.cu_query_lens.back() - 1);
      batch.adapter_of.push_back(adapter.has_value() ? 0 : -1);
    }
    if (adapter.has_value()) batch.adapters.push_back(*adapter);
    return batch;
  }

 private:
  const Case case_;
  std::vector<std::vector<std::int32_t>> tables_;
  int num_blocks_ = 0;
};

struct Bench {
  ModelConfig config;
  WeightLayout layout;
  DecoderModelOptions options;
  std::span<std::byte> weights, cache;
  std::unique_ptr<DecoderModel> model;
  Sampler* sampler = nullptr;
  std::optional<AdapterView> adapter;
  double sweep_bytes_per_second = 0;

  // Captures its steps, or tells `clock` about the parts of each.
  absl::Status MakeModel(StageClock* clock) {
    model.reset();
    options.on_part = {};
    if (clock != nullptr) {
      options.on_part = [clock](StepPart part, void* stream) {
        Begin(clock,
              part == StepPart::kLinear      ? BenchPart::kLinear
              : part == StepPart::kAttention ? BenchPart::kAttention
              : part == StepPart::kHead      ? BenchPart::kHead
                                             : BenchPart::kElementwise,
              stream);
      };
    }
    TANDEM_ASSIGN_OR_RETURN(model, DecoderModel::Create(config, layout, weights.data(), cache, options));
    return absl::OkStatus();
  }
  std::uint32_t vocab_size() const { return static_cast<std::uint32_t>(config.vocab_size); }
};

absl::StatusOr<PendingDraw> StartStep(const Bench& bench, const StepBatch& batch, std::uint32_t position,
                                      const SamplingParams& params, StageClock* clock) {
  TANDEM_ASSIGN_OR_RETURN(const Logits logits, bench.model->Run(batch));
  std::vector<DrawInput> inputs;
  for (std::size_t row = 0; row < batch.logit_rows.size(); ++row) {
    inputs.push_back({.params = &params, .seed = row, .position = position});
  }
  Begin(clock, BenchPart::kSampling, logits.stream);
  absl::StatusOr<PendingDraw> draw = bench.sampler->Start(logits, inputs);
  Begin(clock, BenchPart::kHostGap, logits.stream);
  return draw;
}

absl::Status FinishStep(const Bench& bench, const PendingDraw& draw) {
  for (const absl::StatusOr<DrawnToken>& drawn : bench.sampler->Collect(draw)) TANDEM_RETURN_IF_ERROR(drawn.status());
  return absl::OkStatus();
}

constexpr int kWarmUpSteps = 4;  // as it is, capture, replay

// Seconds of one step that draws the token at `context`, the median.
absl::StatusOr<double> TimeSteps(const Bench& bench, const Sequences& sequences, int context, const SamplingParams& params,
                                 StageClock* clock) {
  std::vector<double> seconds;
  std::optional<PendingDraw> under_way;
  MonotonicTime finished = MonotonicTime::Now();
  for (int i = 0; i < kWarmUpSteps + absl::GetFlag(FLAGS_steps); ++i) {
    if (i == kWarmUpSteps && clock != nullptr) TANDEM_RETURN_IF_ERROR(clock->Take().status());
    const StepBatch batch = sequences.Decode(context, bench.vocab_size(), bench.adapter, under_way);
    TANDEM_ASSIGN_OR_RETURN(const PendingDraw next, StartStep(bench, batch, static_cast<std::uint32_t>(i), params, clock));
    if (under_way.has_value()) TANDEM_RETURN_IF_ERROR(FinishStep(bench, *under_way));
    under_way = next;
    if (absl::GetFlag(FLAGS_in_turn)) {
      TANDEM_RETURN_IF_ERROR(FinishStep(bench, next));
      under_way.reset();
    }
    const MonotonicTime now = MonotonicTime::Now();
    if (i >= kWarmUpSteps) seconds.push_back(absl::ToDoubleSeconds(now - finished));
    finished = now;
  }
  if (under_way.has_value()) TANDEM_RETURN_IF_ERROR(FinishStep(bench, *under_way));
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

absl::StatusOr<double> TimePrefill(const Bench& bench, const Case& c, const Sequences& sequences, const SamplingParams& params) {
  const int prefilled = c.is_prompt_shared ? 1 : c.sequences, at_once = std::max(1, kMaxBatchTokens / c.prompt);
  const MonotonicTime begin = MonotonicTime::Now();
  for (int first = 0; first < prefilled; first += at_once) {
    const StepBatch batch =
        sequences.Step(first, std::min(first + at_once, prefilled), 0, c.prompt, bench.vocab_size(), bench.adapter);
    TANDEM_ASSIGN_OR_RETURN(const PendingDraw draw, StartStep(bench, batch, 0, params, nullptr));
    TANDEM_RETURN_IF_ERROR(FinishStep(bench, draw));
  }
  return absl::ToDoubleSeconds(MonotonicTime::Now() - begin);
}

// Milliseconds a step at the middle context, by part; warm-up steps are none of them.
absl::StatusOr<std::array<double, kNumBenchParts>> TimeParts(Bench* bench, const Case& c, const Sequences& sequences,
                                                             const SamplingParams& params) {
  TANDEM_ASSIGN_OR_RETURN(const std::unique_ptr<StageClock> clock, StageClock::Create(Device::kCuda));
  TANDEM_RETURN_IF_ERROR(bench->MakeModel(clock.get()));
  TANDEM_RETURN_IF_ERROR(TimeSteps(*bench, sequences, c.prompt + c.tokens / 2, params, clock.get()).status());
  TANDEM_ASSIGN_OR_RETURN(const auto spans, clock->Take());
  const std::map<std::string, double> seconds = SecondsByStage(spans);
  std::array<double, kNumBenchParts> milliseconds = {};
  for (std::size_t part = 0; part < kNumBenchParts; ++part) {
    const auto spent = seconds.find(kBenchPartNames[part]);
    if (spent != seconds.end()) milliseconds[part] = 1e3 * spent->second / absl::GetFlag(FLAGS_steps);
  }
  TANDEM_RETURN_IF_ERROR(bench->MakeModel(nullptr));
  return milliseconds;
}

// Read each step: every weight but an embedding that is not the head, the adapter, and the keys and values of all contexts.
std::array<double, kNumBenchParts> BytesOfParts(const Bench& bench, const Case& c) {
  const WeightLayout& layout = bench.layout;
  const std::uint64_t embedding_bytes = bench.config.is_embedding_tied ? 0 : layout.embedding.size_bytes;
  const std::uint64_t adapter_bytes = bench.adapter.has_value() ? bench.adapter->layout->num_parameters * 2 : 0;
  const double token_bytes = static_cast<double>(DecoderModel::BlockBytes(bench.config, 1, bench.options.kv_dtype));
  std::array<double, kNumBenchParts> bytes = {};
  bytes[static_cast<std::size_t>(BenchPart::kLinear)] =
      static_cast<double>(layout.total_bytes - embedding_bytes - layout.head.size_bytes + adapter_bytes);
  bytes[static_cast<std::size_t>(BenchPart::kHead)] = static_cast<double>(layout.head.size_bytes);
  bytes[static_cast<std::size_t>(BenchPart::kAttention)] = token_bytes * c.sequences * (c.prompt + c.tokens / 2.0);
  return bytes;
}

absl::Status RunCase(Bench* bench, const Case& c, const Sequences& sequences) {
  SamplingParams params;
  params.top_p = absl::GetFlag(FLAGS_top_p);
  TANDEM_RETURN_IF_ERROR(TimePrefill(*bench, c, sequences, params).status());  // the products choose their algorithms
  TANDEM_ASSIGN_OR_RETURN(const double prefill_seconds, TimePrefill(*bench, c, sequences, params));
  const std::array<int, 3> contexts = {c.prompt + 1, c.prompt + c.tokens / 2, c.prompt + c.tokens};
  std::array<double, 3> step_seconds = {};
  for (std::size_t i = 0; i < contexts.size(); ++i) {
    TANDEM_ASSIGN_OR_RETURN(step_seconds[i], TimeSteps(*bench, sequences, contexts[i], params, nullptr));
  }
  TANDEM_ASSIGN_OR_RETURN(const auto part_ms, TimeParts(bench, c, sequences, params));
  const double mean_seconds = (step_seconds[0] + 4 * step_seconds[1] + step_seconds[2]) / 6;  // Simpson
  const double total_seconds = prefill_seconds + mean_seconds * c.tokens;
  const double tokens_per_second = c.sequences * c.tokens / total_seconds;
  const auto part_bytes = BytesOfParts(*bench, c);
  const double step_bytes = std::accumulate(part_bytes.begin(), part_bytes.end(), 0.0);
  const double floor_seconds = step_bytes / bench->sweep_bytes_per_second;
  const auto share = [&](std::size_t part) { return part_bytes[part] / bench->sweep_bytes_per_second / (part_ms[part] * 1e-3); };
  if (absl::GetFlag(FLAGS_json)) {
    std::printf(
        "{\"bench\":\"rollout\",\"model\":\"%s\",\"case\":\"%s\",\"weights\":\"%s\",\"kv\":\"%s\",\"rank\":%d,"
        "\"sequences\":%d,\"prompt\":%d,\"tokens\":%d,\"in_turn\":%s,\"prefill_seconds\":%.4f,\"step_ms_first\":%.4f,"
        "\"step_ms_middle\":%.4f,\"step_ms_last\":%.4f,\"step_ms_mean\":%.4f,\"tokens_per_second\":%.1f,\"step_bytes\":%.0f,"
        "\"sweep_bytes_per_second\":%.4g,\"floor_ms\":%.4f,\"share_of_sweep\":%.4f,\"parts\":{",
        bench->config.name.c_str(), c.name.c_str(), StorageFormatName(bench->layout.format),
        absl::GetFlag(FLAGS_kv_cache_dtype).c_str(), absl::GetFlag(FLAGS_rank), c.sequences, c.prompt, c.tokens,
        absl::GetFlag(FLAGS_in_turn) ? "true" : "false", prefill_seconds, step_seconds[0] * 1e3, step_seconds[1] * 1e3,
        step_seconds[2] * 1e3, mean_seconds * 1e3, tokens_per_second, step_bytes, bench->sweep_bytes_per_second,
        floor_seconds * 1e3, floor_seconds / mean_seconds);
    for (std::size_t part = 0; part < kNumBenchParts; ++part) {
      std::printf("%s\"%s\":{\"ms\":%.4f,\"bytes\":%.0f,\"share_of_sweep\":%.4f}", part == 0 ? "" : ",", kBenchPartNames[part],
                  part_ms[part], part_bytes[part], part_bytes[part] == 0 ? 0 : share(part));
    }
    std::printf("}}\n");
  } else {
    std::printf("%-4s %9d %6d + %-5d %8.3f s %7.2f %7.2f %7.2f ms %9.0f %8.2f GB %7.2f ms %6.1f %%\n", c.name.c_str(),
                c.sequences, c.prompt, c.tokens, prefill_seconds, step_seconds[0] * 1e3, step_seconds[1] * 1e3,
                step_seconds[2] * 1e3, tokens_per_second, step_bytes * 1e-9, floor_seconds * 1e3,
                100 * floor_seconds / mean_seconds);
    for (std::size_t part = 0; part < kNumBenchParts; ++part) {
      std::printf("     %-12s %7.3f ms", kBenchPartNames[part], part_ms[part]);
      if (part_bytes[part] > 0) std::printf(" %8.2f GB %6.1f %% of sweep", part_bytes[part] * 1e-9, 100 * share(part));
      std::printf("\n");
    }
  }
  std::fflush(stdout);
  return absl::OkStatus();
}

absl::Status RunBench() {
  if (!HasCudaDevice()) return absl::FailedPreconditionError("no CUDA device");
  Bench bench;
  TANDEM_ASSIGN_OR_RETURN(bench.config, ConfigOfShape(absl::GetFlag(FLAGS_shape)));
  const std::optional<StorageFormat> format = ParseStorageFormat(absl::GetFlag(FLAGS_weights));
  if (!format.has_value() || format == StorageFormat::kFp32) {
    return absl::InvalidArgumentError(absl::StrCat("--weights=", absl::GetFlag(FLAGS_weights), ": bf16, fp8, fp8_block or nf4"));
  }
  const std::string kv_name = absl::GetFlag(FLAGS_kv_cache_dtype);
  if (kv_name != "bf16" && kv_name != "fp8") {
    return absl::InvalidArgumentError(absl::StrCat("--kv_cache_dtype=", kv_name, ": bf16 or fp8"));
  }
  bench.layout = WeightLayout::Create(bench.config, *format);
  const std::string wanted = absl::GetFlag(FLAGS_cases);
  int num_blocks = 1;
  for (const Case& c : kCases) {
    if (wanted.find(c.name) != std::string::npos) num_blocks = std::max(num_blocks, Sequences(c).num_blocks());
  }
  std::vector<std::uint16_t> pattern(kPatternValues);
  for (std::size_t i = 0; i < pattern.size(); ++i) pattern[i] = FloatToBf16(PatternValue(i));
  if (IsQuantized(*format)) {  // numbers as bf16, as pairs that are an fp32, and as bytes that are E4M3
    for (std::size_t i = 0; i < pattern.size(); ++i) {
      if (i % 2 == 1) pattern[i] = pattern[i - 1];
      if ((pattern[i] & 0x7f) == 0x7f) pattern[i] ^= 1;
    }
  }
  TANDEM_ASSIGN_OR_RETURN(const auto weights, BenchMemory::Create(Device::kCuda, bench.layout.total_bytes));
  TANDEM_RETURN_IF_ERROR(weights->Fill(pattern.data(), pattern.size() * sizeof(pattern[0])));

  bench.options.device = Device::kCuda;
  bench.options.weight_format = bench.layout.format;
  bench.options.kv_dtype = kv_name == "fp8" ? DType::kFp8E3m4 : DType::kBf16;
  bench.options.block_tokens = kBlockTokens;
  bench.options.num_blocks = num_blocks;
  bench.options.max_batch_tokens = kMaxBatchTokens;
  bench.options.max_adapters = absl::GetFlag(FLAGS_rank) > 0 ? 1 : 0;
  bench.options.max_adapter_rank = absl::GetFlag(FLAGS_rank);
  TANDEM_ASSIGN_OR_RETURN(const auto workspace,
                          BenchMemory::Create(Device::kCuda, DecoderModel::WorkspaceBytes(bench.config, bench.options)));
  bench.options.workspace = workspace->span();
  TANDEM_ASSIGN_OR_RETURN(
      const auto cache,
      BenchMemory::Create(Device::kCuda, static_cast<std::uint64_t>(num_blocks) *
                                             DecoderModel::BlockBytes(bench.config, kBlockTokens, bench.options.kv_dtype)));
  bench.weights = weights->span();
  bench.cache = cache->span();
  TANDEM_RETURN_IF_ERROR(bench.MakeModel(nullptr));
  SamplerOptions sampler_options = {
      .device = Device::kCuda, .vocab_size = bench.config.vocab_size, .max_rows = bench.options.max_sequences};
  TANDEM_ASSIGN_OR_RETURN(const auto sampler_memory,
                          BenchMemory::Create(Device::kCuda, Sampler::WorkspaceBytes(sampler_options)));
  sampler_options.workspace = sampler_memory->span();
  TANDEM_ASSIGN_OR_RETURN(const auto sampler, Sampler::Create(sampler_options));
  bench.sampler = sampler.get();

  std::unique_ptr<BenchMemory> slot;
  AdapterLayout adapter_layout;
  if (absl::GetFlag(FLAGS_rank) > 0) {
    std::vector<LinearKind> targets;
    for (int kind = 0; kind < kNumLinearKinds; ++kind) targets.push_back(static_cast<LinearKind>(kind));
    adapter_layout = AdapterLayout::Create(bench.config, absl::GetFlag(FLAGS_rank), targets);
    std::vector<float> values(kPatternValues);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = PatternValue(i);
    TANDEM_ASSIGN_OR_RETURN(slot, BenchMemory::Create(Device::kCuda, adapter_layout.total_bytes));
    TANDEM_RETURN_IF_ERROR(slot->Fill(values.data(), values.size() * sizeof(values[0])));
    bench.adapter = {.slot = slot->span().data(), .layout = &adapter_layout, .scale = 2.f, .activation_id = 1};
  }
  const std::uint64_t sweep_bytes = std::min<std::uint64_t>(weights->span().size(), 8 * kGiB) / 16 * 16;
  TANDEM_ASSIGN_OR_RETURN(bench.sweep_bytes_per_second, MeasureReadSweep(weights->span().first(sweep_bytes)));
  if (!absl::GetFlag(FLAGS_json)) {
    std::printf("%s, weights %s, KV cache %s, adapter rank %d, %s, read sweep %.2f TB/s over %s, workspace %s\n",
                bench.config.name.c_str(), StorageFormatName(*format), kv_name.c_str(), absl::GetFlag(FLAGS_rank),
                DeviceName(Device::kCuda).c_str(), bench.sweep_bytes_per_second * 1e-12, FormatBytes(sweep_bytes).c_str(),
                FormatBytes(workspace->span().size()).c_str());
    std::printf("case sequences prompt+tokens  prefill   step first middle  last   tokens/s     read    floor    of sweep\n");
  }
  for (const Case& c : kCases) {
    if (wanted.find(c.name) == std::string::npos) continue;
    TANDEM_RETURN_IF_ERROR(RunCase(&bench, c, Sequences(c)));
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  if (absl::GetFlag(FLAGS_steps) < 1 || absl::GetFlag(FLAGS_rank) < 0) {
    std::fprintf(stderr, "--steps must be at least 1, --rank at least 0\n");
    return 2;
  }
  if (const absl::Status status = tandem::RunBench(); !status.ok()) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    return 1;
  }
  return 0;
}

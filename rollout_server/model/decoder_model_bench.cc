// tandem_decode_bench: tokens per second of batched decoding, the forward pass alone. Weights are random unless --model names a
// file: speed does not depend on their values.
#include <algorithm>
#include <cstdio>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "common/base/clock.h"
#include "common/base/random.h"
#include "common/torch/bench_model.h"
#include "common/torch/parallel.h"
#include "rollout_server/model/decoder_model.h"

ABSL_FLAG(std::string, model, "", "model directory or GGUF file; empty: SmolLM2-135M's shape with random weights");
ABSL_FLAG(int, batch, 64, "sequences decoded together");
ABSL_FLAG(int, prompt, 30, "tokens of each prompt");
ABSL_FLAG(int, tokens, 16, "tokens decoded per sequence");
ABSL_FLAG(int, rank, 8, "rank of an adapter on all linear layers; 0: none");
ABSL_FLAG(bool, json, false, "one line of JSON instead of text");

namespace tandem {
namespace {

StepBatch Prefill(const ModelConfig& config, int batch_size, int prompt, int block_tokens, int blocks_per_sequence) {
  StepBatch batch;
  batch.cu_query_lens.push_back(0);
  for (int s = 0; s < batch_size; ++s) {
    std::vector<std::int32_t> table;
    for (int b = 0; b < blocks_per_sequence; ++b) table.push_back(s * blocks_per_sequence + b);
    for (int t = 0; t < prompt; ++t) {
      batch.token_ids.push_back(
          static_cast<std::uint32_t>(RandomBelow(2, batch.token_ids.size(), static_cast<std::uint64_t>(config.vocab_size))));
      batch.positions.push_back(t);
      batch.slot_mapping.push_back(static_cast<std::int64_t>(table[static_cast<std::size_t>(t / block_tokens)]) * block_tokens +
                                   t % block_tokens);
    }
    batch.cu_query_lens.push_back(static_cast<std::int32_t>(batch.token_ids.size()));
    batch.context_lens.push_back(prompt);
    batch.logit_rows.push_back(batch.cu_query_lens.back() - 1);
    batch.block_tables.push_back(table);
    batch.adapter_of.push_back(-1);
  }
  return batch;
}

// The likeliest token of every sequence comes next.
void Advance(const Logits& logits, int block_tokens, StepBatch* batch) {
  const std::size_t sequences = batch->context_lens.size();
  batch->token_ids.resize(sequences);
  batch->positions.resize(sequences);
  batch->slot_mapping.resize(sequences);
  for (std::size_t s = 0; s < sequences; ++s) {
    const std::span<const float> row = logits.row(static_cast<std::int64_t>(s));
    batch->token_ids[s] = static_cast<std::uint32_t>(std::max_element(row.begin(), row.end()) - row.begin());
    const std::int32_t position = batch->context_lens[s]++;
    batch->positions[s] = position;
    batch->slot_mapping[s] =
        static_cast<std::int64_t>(batch->block_tables[s][static_cast<std::size_t>(position / block_tokens)]) * block_tokens +
        position % block_tokens;
    batch->cu_query_lens[s + 1] = static_cast<std::int32_t>(s + 1);
    batch->logit_rows[s] = static_cast<std::int32_t>(s);
  }
}

absl::Status RunBench() {
  TANDEM_ASSIGN_OR_RETURN(const BenchModel bench, BenchModel::Open(absl::GetFlag(FLAGS_model)));
  const ModelConfig& config = bench.config;
  constexpr int kBlockTokens = 16;
  const int batch_size = absl::GetFlag(FLAGS_batch), prompt = absl::GetFlag(FLAGS_prompt), tokens = absl::GetFlag(FLAGS_tokens);
  const int blocks_per_sequence = (prompt + tokens + kBlockTokens) / kBlockTokens, num_blocks = batch_size * blocks_per_sequence;
  const BenchBytes cache(static_cast<std::uint64_t>(num_blocks) * DecoderModel::BlockBytes(config, kBlockTokens, DType::kFp32));
  TANDEM_ASSIGN_OR_RETURN(const auto model, DecoderModel::Create(config, bench.layout, bench.weights.span().data(), cache.span(),
                                                                 {.block_tokens = kBlockTokens, .num_blocks = num_blocks}));
  AdapterLayout adapter_layout;
  std::optional<BenchBytes> slot;
  StepBatch batch = Prefill(config, batch_size, prompt, kBlockTokens, blocks_per_sequence);
  if (const int rank = absl::GetFlag(FLAGS_rank); rank > 0) {
    std::vector<LinearKind> targets;
    for (int kind = 0; kind < kNumLinearKinds; ++kind) targets.push_back(static_cast<LinearKind>(kind));
    adapter_layout = AdapterLayout::Create(config, rank, targets);
    slot.emplace(adapter_layout.total_bytes);
    slot->FillRandom();
    batch.adapters.push_back({slot->span().data(), &adapter_layout, 2.f});
    batch.adapter_of.assign(batch.adapter_of.size(), 0);
  }

  const MonotonicTime start = MonotonicTime::Now();
  TANDEM_ASSIGN_OR_RETURN(Logits logits, model->Run(batch));
  const double prefill_seconds = absl::ToDoubleSeconds(MonotonicTime::Now() - start);
  std::vector<double> seconds;
  for (int t = 0; t < tokens; ++t) {
    Advance(logits, kBlockTokens, &batch);
    const MonotonicTime begin = MonotonicTime::Now();
    TANDEM_ASSIGN_OR_RETURN(logits, model->Run(batch));
    seconds.push_back(absl::ToDoubleSeconds(MonotonicTime::Now() - begin));
  }
  double total = 0;
  for (const double s : seconds) total += s;
  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2];
  const double tokens_per_second = batch_size * tokens / total;
  if (absl::GetFlag(FLAGS_json)) {
    std::printf(
        "{\"bench\":\"decode\",\"model\":\"%s\",\"batch\":%d,\"prompt\":%d,\"tokens\":%d,\"rank\":%d,\"threads\":%d,\"prefill_"
        "seconds\":%.4f,"
        "\"step_seconds_median\":%.5f,\"tokens_per_second\":%.1f}\n",
        config.name.c_str(), batch_size, prompt, tokens, adapter_layout.rank, NumTorchThreads(), prefill_seconds, median,
        tokens_per_second);
  } else {
    std::printf(
        "%s, %d threads\nprefill %d x %d tokens: %.3f s (%.0f tokens/s)\ndecode batch %d: median step %.1f ms, %.0f tokens/s\n",
        config.name.c_str(), NumTorchThreads(), batch_size, prompt, prefill_seconds, batch_size * prompt / prefill_seconds,
        batch_size, median * 1e3, tokens_per_second);
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  if (absl::GetFlag(FLAGS_batch) < 1 || absl::GetFlag(FLAGS_prompt) < 1 || absl::GetFlag(FLAGS_tokens) < 1) {
    std::fprintf(stderr, "--batch, --prompt and --tokens must be at least 1\n");
    return 2;
  }
  if (const absl::Status status = tandem::RunBench(); !status.ok()) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    return 1;
  }
  return 0;
}

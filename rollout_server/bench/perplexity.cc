// tandem_perplexity: how well the rollout server's model predicts a fixed text, in the chosen format of weights and KV cache:
// what a format costs. The text is cut into windows that know nothing of each other; each is prefilled in chunks, so that keys
// and values are read back from the cache. exp of the mean negative log-prob of every token but each window's first.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "common/model/model_source.h"
#include "rollout_server/bench/bench_memory.h"
#include "rollout_server/model/decoder_model.h"

ABSL_FLAG(std::string, model, "", "model directory or GGUF file");
ABSL_FLAG(std::string, text, "", "text file");
ABSL_FLAG(std::string, device, "auto", "auto, cpu or cuda");
ABSL_FLAG(std::string, weights, "auto", "auto, fp32, bf16, fp8, fp8_block or nf4");
ABSL_FLAG(std::string, kv_cache_dtype, "auto", "auto, bf16 or fp8");
ABSL_FLAG(int, window, 1024, "tokens of one window");
ABSL_FLAG(int, max_tokens, 8192, "tokens of the text at most");
ABSL_FLAG(bool, json, false, "one line of JSON");

namespace tandem {
namespace {

constexpr int kBlockTokens = 16, kChunkTokens = 256;

// -log softmax(row)[target].
double NegativeLogprob(std::span<const float> row, std::uint32_t target) {
  const float top = *std::max_element(row.begin(), row.end());
  double sum = 0;
  for (const float logit : row) sum += std::exp(static_cast<double>(logit - top));
  return std::log(sum) + static_cast<double>(top) - static_cast<double>(row[target]);
}

class Scorer {
 public:
  Scorer(DecoderModel* model, Device device, int vocab_size) : model_(model), device_(device), vocab_size_(vocab_size) {}

  // Adds the tokens of one window to `sum` and `count`.
  absl::Status Add(std::span<const std::uint32_t> window, double* sum, std::int64_t* count) {
    const int size = static_cast<int>(window.size());
    for (int begin = 0; begin < size; begin += kChunkTokens) {
      const int end = std::min(begin + kChunkTokens, size);
      TANDEM_ASSIGN_OR_RETURN(const Logits logits, model_->Run(Chunk(window, begin, end)));
      TANDEM_RETURN_IF_ERROR(model_->Fence());
      rows_.resize(static_cast<std::size_t>(logits.num_rows) * static_cast<std::size_t>(vocab_size_));
      TANDEM_RETURN_IF_ERROR(CopyToHost(device_, rows_.data(), logits.data, rows_.size() * sizeof(float)));
      for (int position = begin; position < end && position + 1 < size; ++position) {
        const auto row = static_cast<std::size_t>(position - begin) * static_cast<std::size_t>(vocab_size_);
        *sum += NegativeLogprob(std::span(rows_).subspan(row, static_cast<std::size_t>(vocab_size_)),
                                window[static_cast<std::size_t>(position) + 1]);
        ++*count;
      }
    }
    return absl::OkStatus();
  }

 private:
  static StepBatch Chunk(std::span<const std::uint32_t> window, int begin, int end) {
    StepBatch batch;
    for (int position = begin; position < end; ++position) {
      batch.token_ids.push_back(window[static_cast<std::size_t>(position)]);
      batch.positions.push_back(position);
      batch.slot_mapping.push_back(position);
      batch.logit_rows.push_back(position - begin);
    }
    batch.cu_query_lens = {0, end - begin};
    batch.context_lens = {end};
    batch.block_tables.emplace_back();
    for (int block = 0; block * kBlockTokens < end; ++block) batch.block_tables[0].push_back(block);
    batch.adapter_of = {-1};
    return batch;
  }

  DecoderModel* const model_;
  const Device device_;
  const int vocab_size_;
  std::vector<float> rows_;
};

absl::StatusOr<std::vector<std::uint32_t>> ReadTokens(const ModelDescription& description) {
  std::ifstream file(absl::GetFlag(FLAGS_text), std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  if (text.empty()) return absl::InvalidArgumentError(absl::StrCat("--text=", absl::GetFlag(FLAGS_text), " has no text"));
  TANDEM_ASSIGN_OR_RETURN(const auto tokenizer, Tokenizer::Create(description.tokenizer));
  std::vector<std::uint32_t> ids = tokenizer->Encode(text, ControlTokens::kLiteral);
  ids.resize(std::min<std::size_t>(ids.size(), static_cast<std::size_t>(absl::GetFlag(FLAGS_max_tokens))));
  return ids;
}

absl::Status Run() {
  const std::string device_name = absl::GetFlag(FLAGS_device);
  const Device device = device_name == "cuda" || (device_name == "auto" && HasCudaDevice()) ? Device::kCuda : Device::kCpu;
  const std::string weights_name = absl::GetFlag(FLAGS_weights), kv_name = absl::GetFlag(FLAGS_kv_cache_dtype);
  TANDEM_ASSIGN_OR_RETURN(const auto source, ModelSource::Open(absl::GetFlag(FLAGS_model)));
  const ModelDescription& description = source->description();
  const ModelConfig& config = description.config;
  TANDEM_ASSIGN_OR_RETURN(const std::vector<std::uint32_t> ids, ReadTokens(description));
  const std::optional<StorageFormat> wanted = ParseStorageFormat(weights_name);  // none: auto
  if (!wanted.has_value() && weights_name != "auto")
    return absl::InvalidArgumentError(absl::StrCat("--weights=", weights_name, " is no format"));
  TANDEM_ASSIGN_OR_RETURN(const StorageFormat format, ChooseStorageFormat(wanted, device, *source));
  const WeightLayout layout = WeightLayout::Create(config, format);
  TANDEM_ASSIGN_OR_RETURN(const auto weights, BenchMemory::Create(device, layout.total_bytes));
  TANDEM_RETURN_IF_ERROR(source->LoadWeights(layout, device, weights->span(), {}));

  const int window = absl::GetFlag(FLAGS_window);
  DecoderModelOptions options;
  options.device = device;
  options.weight_format = layout.format;
  options.kv_dtype = device == Device::kCpu ? DType::kFp32 : kv_name == "fp8" ? DType::kFp8E3m4 : DType::kBf16;
  options.block_tokens = kBlockTokens;
  options.num_blocks = (window + kBlockTokens - 1) / kBlockTokens;
  options.max_batch_tokens = kChunkTokens;
  options.max_logit_rows = kChunkTokens;
  options.max_sequences = 1;
  options.max_adapters = 0;
  TANDEM_ASSIGN_OR_RETURN(const auto workspace, BenchMemory::Create(device, DecoderModel::WorkspaceBytes(config, options)));
  options.workspace = workspace->span();
  TANDEM_ASSIGN_OR_RETURN(const auto cache,
                          BenchMemory::Create(device, static_cast<std::uint64_t>(options.num_blocks) *
                                                          DecoderModel::BlockBytes(config, kBlockTokens, options.kv_dtype)));
  TANDEM_ASSIGN_OR_RETURN(const auto model, DecoderModel::Create(config, layout, weights->span().data(), cache->span(), options));
  Scorer scorer(model.get(), device, config.vocab_size);
  double sum = 0;
  std::int64_t count = 0;
  for (std::size_t begin = 0; begin + 1 < ids.size(); begin += static_cast<std::size_t>(window)) {
    const std::size_t size = std::min(static_cast<std::size_t>(window), ids.size() - begin);
    TANDEM_RETURN_IF_ERROR(scorer.Add(std::span(ids).subspan(begin, size), &sum, &count));
  }
  const double perplexity = std::exp(sum / static_cast<double>(count));
  if (absl::GetFlag(FLAGS_json)) {
    std::printf(
        "{\"model\":\"%s\",\"weights\":\"%s\",\"kv_cache_dtype\":\"%s\",\"tokens\":%lld,\"window\":%d,\"perplexity\":%.6f}\n",
        config.name.c_str(), weights_name.c_str(), kv_name.c_str(), static_cast<long long>(count), window, perplexity);
  } else {
    std::printf("%s  weights %s  KV %s  %lld tokens in windows of %d  perplexity %.4f\n", config.name.c_str(),
                weights_name.c_str(), kv_name.c_str(), static_cast<long long>(count), window, perplexity);
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  if (absl::GetFlag(FLAGS_window) < 2 || absl::GetFlag(FLAGS_max_tokens) < 2) {
    std::fprintf(stderr, "--window and --max_tokens must be at least 2\n");
    return 2;
  }
  if (const absl::Status status = tandem::Run(); !status.ok()) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    return 1;
  }
  return 0;
}

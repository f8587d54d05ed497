// The sampler on the GPU: one packed copy in, one kernel, one copy out, one fence.
#include <cuda_runtime_api.h>

#include <algorithm>

#include "common/base/random.h"
#include "common/base/units.h"
#include "common/gpu/cuda_status.h"
#include "common/gpu/stream.h"
#include "kernels/sampling/sampling.h"
#include "rollout_server/sample/sampler_backends.h"

namespace tandem {
namespace {

// The workspace, and the same in page-locked memory: rows, then the maps of rows that are penalised, then what was drawn.
struct Places {
  explicit Places(const SamplerOptions& options) {
    constexpr std::uint64_t kAlignment = 256;
    const auto rows = static_cast<std::uint64_t>(options.max_rows);
    seen_words = SampleParams::SeenWords(options.vocab_size);
    seen_begin = RoundUp(rows * sizeof(SampleRow), kAlignment);
    tokens_begin = RoundUp(seen_begin + rows * 2 * static_cast<std::uint64_t>(seen_words) * sizeof(std::uint32_t), kAlignment);
    total_bytes = tokens_begin + rows * sizeof(SampledToken);
  }
  std::int64_t seen_words = 0;
  std::uint64_t seen_begin = 0;
  std::uint64_t tokens_begin = 0;
  std::uint64_t total_bytes = 0;
};

absl::StatusOr<DrawnToken> ToDrawn(const SampledToken& token, std::uint32_t position) {
  if (token.fault == SampleFault::kNone) {
    return DrawnToken{
        .id = token.id, .rollout_logprob = token.rollout_logprob, .raw_logprob = token.raw_logprob, .kept_mass = token.kept_mass};
  }
  const bool is_penalised = token.fault == SampleFault::kNanAfterPenalties || token.fault == SampleFault::kInfiniteAfterPenalties;
  const bool has_nan = token.fault == SampleFault::kNan || token.fault == SampleFault::kNanAfterPenalties;
  return BadLogits(has_nan, token.maximum, position, is_penalised);
}

class CudaSampler : public Sampler {
 public:
  CudaSampler(const SamplerOptions& options, std::unique_ptr<HostBuffer> staging)
      : options_(options), places_(options), staging_(std::move(staging)) {}

  std::vector<absl::StatusOr<DrawnToken>> Draw(const Logits& logits, std::span<const DrawInput> inputs) override {
    std::vector<absl::StatusOr<DrawnToken>> drawn;
    drawn.reserve(inputs.size());
    if (const absl::Status status = Run(logits, inputs); !status.ok()) {
      drawn.assign(inputs.size(), status);
      return drawn;
    }
    const auto* tokens = reinterpret_cast<const SampledToken*>(host(places_.tokens_begin));
    for (std::size_t i = 0; i < inputs.size(); ++i) drawn.push_back(ToDrawn(tokens[i], inputs[i].position));
    return drawn;
  }

 private:
  std::byte* host(std::uint64_t begin) const { return staging_->bytes().data() + begin; }
  std::byte* device(std::uint64_t begin) const { return options_.workspace.data() + begin; }

  absl::Status Run(const Logits& logits, std::span<const DrawInput> inputs) {
    if (inputs.size() > static_cast<std::size_t>(options_.max_rows) || logits.vocab_size != options_.vocab_size ||
        logits.device != Device::kCuda) {
      return absl::InternalError(absl::StrCat("drawing ", inputs.size(), " rows of ", logits.vocab_size,
                                              " logits; the sampler was made for ", options_.max_rows, " of ",
                                              options_.vocab_size, " on the device"));
    }
    const auto stream = static_cast<cudaStream_t>(logits.stream);
    if (!inputs.empty()) TANDEM_RETURN_IF_ERROR(Enqueue(logits, inputs, stream));
    return CudaToStatus(cudaStreamSynchronize(stream), "fence of the step");
  }

  absl::Status Enqueue(const Logits& logits, std::span<const DrawInput> inputs, cudaStream_t stream) {
    auto* rows = reinterpret_cast<SampleRow*>(host(0));
    std::int32_t num_penalised = 0;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const SamplingParams& params = *inputs[i].params;
      SampleRow row;
      row.inverse_temperature = params.temperature == 0 ? 0.f : static_cast<float>(1.0 / params.temperature);
      row.top_k = params.top_k;
      row.top_p = params.top_p;
      row.min_p = params.min_p;
      row.repetition_penalty = static_cast<float>(params.repetition_penalty);
      row.presence_penalty = static_cast<float>(params.presence_penalty);
      row.uniform = RandomUniform(inputs[i].seed, inputs[i].position);
      if (params.penalises()) {
        FillSeen(inputs[i], num_penalised);
        row.seen = num_penalised++;
      }
      rows[i] = row;
    }
    const std::size_t row_bytes = inputs.size() * sizeof(SampleRow);
    const std::size_t seen_bytes = static_cast<std::size_t>(num_penalised * 2 * places_.seen_words) * sizeof(std::uint32_t);
    TANDEM_RETURN_IF_ERROR(
        CudaToStatus(cudaMemcpyAsync(device(0), host(0), seen_bytes == 0 ? row_bytes : places_.seen_begin + seen_bytes,
                                     cudaMemcpyHostToDevice, stream),
                     "sampling parameters"));
    TANDEM_RETURN_IF_ERROR(Sample({.logits = logits.data,
                                   .rows = reinterpret_cast<const SampleRow*>(device(0)),
                                   .seen = reinterpret_cast<const std::uint32_t*>(device(places_.seen_begin)),
                                   .tokens = reinterpret_cast<SampledToken*>(device(places_.tokens_begin)),
                                   .num_rows = static_cast<std::int64_t>(inputs.size()),
                                   .vocab_size = logits.vocab_size},
                                  Device::kCuda, stream));
    return CudaToStatus(cudaMemcpyAsync(host(places_.tokens_begin), device(places_.tokens_begin),
                                        inputs.size() * sizeof(SampledToken), cudaMemcpyDeviceToHost, stream),
                        "drawn tokens");
  }

  void FillSeen(const DrawInput& input, std::int32_t index) {
    auto* in_text = reinterpret_cast<std::uint32_t*>(host(places_.seen_begin)) + 2 * index * places_.seen_words;
    auto* in_completion = in_text + places_.seen_words;
    std::fill_n(in_text, 2 * places_.seen_words, 0u);
    for (const std::uint32_t id : input.prompt) in_text[id / 32] |= 1u << (id % 32);
    for (const std::uint32_t id : input.completion) {
      in_text[id / 32] |= 1u << (id % 32);
      in_completion[id / 32] |= 1u << (id % 32);
    }
  }

  const SamplerOptions options_;
  const Places places_;
  const std::unique_ptr<HostBuffer> staging_;
};

}  // namespace

std::uint64_t CudaSamplerWorkspaceBytes(const SamplerOptions& options) { return Places(options).total_bytes; }

absl::StatusOr<std::unique_ptr<Sampler>> CreateCudaSampler(const SamplerOptions& options) {
  if (options.vocab_size < 1 || options.max_rows < 1) {
    return absl::InvalidArgumentError(absl::StrCat("sampler of ", options.max_rows, " rows of ", options.vocab_size, " logits"));
  }
  const std::uint64_t needed = CudaSamplerWorkspaceBytes(options);
  if (options.workspace.size() < needed || reinterpret_cast<std::uintptr_t>(options.workspace.data()) % 256 != 0) {
    return absl::InvalidArgumentError(absl::StrCat("sampler: a workspace of ", options.workspace.size(), " bytes; ", needed,
                                                   " on a 256-byte boundary are needed"));
  }
  TANDEM_ASSIGN_OR_RETURN(std::unique_ptr<HostBuffer> staging, HostBuffer::Create(Device::kCuda, needed));
  return std::make_unique<CudaSampler>(options, std::move(staging));
}

}  // namespace tandem

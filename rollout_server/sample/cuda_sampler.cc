// The sampler on the GPU: parameters in, one kernel, tokens out, and an event that says when they are there.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>

#include "common/base/random.h"
#include "common/base/units.h"
#include "common/gpu/cuda_event.h"
#include "common/gpu/cuda_status.h"
#include "common/gpu/stream.h"
#include "kernels/sampling/sampling.h"
#include "rollout_server/sample/sampler_backends.h"

namespace tandem {
namespace {

// The workspace, and the same in page-locked memory: rows and what was drawn of each slot, then the maps of rows that are
// penalised.
struct Places {
  explicit Places(const SamplerOptions& options)
      : seen_words(SampleParams::SeenWords(options.vocab_size)),
        row_bytes(RoundUp(static_cast<std::uint64_t>(options.max_rows) * sizeof(SampleRow), kAlignment)),
        slot_bytes(row_bytes + RoundUp(static_cast<std::uint64_t>(options.max_rows) * sizeof(SampledToken), kAlignment)),
        seen_begin(Sampler::kMaxPendingDraws * slot_bytes),
        total_bytes(seen_begin + static_cast<std::uint64_t>(options.max_rows) * 2 * static_cast<std::uint64_t>(seen_words) *
                                     sizeof(std::uint32_t)) {}
  std::uint64_t rows(int slot) const { return static_cast<std::uint64_t>(slot) * slot_bytes; }
  std::uint64_t tokens(int slot) const { return rows(slot) + row_bytes; }

  static constexpr std::uint64_t kAlignment = 256;
  const std::int64_t seen_words;
  const std::uint64_t row_bytes, slot_bytes, seen_begin, total_bytes;
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
  using Events = std::array<std::unique_ptr<CudaEvent>, kMaxPendingDraws>;
  CudaSampler(const SamplerOptions& options, std::unique_ptr<HostBuffer> staging, Events drawn,
              std::unique_ptr<CudaEvent> seen_copied)
      : options_(options),
        places_(options),
        staging_(std::move(staging)),
        drawn_(std::move(drawn)),
        seen_copied_(std::move(seen_copied)) {}

  absl::StatusOr<PendingDraw> Start(const Logits& logits, std::span<const DrawInput> inputs) override {
    if (inputs.size() > static_cast<std::size_t>(options_.max_rows) || logits.vocab_size != options_.vocab_size ||
        logits.device != Device::kCuda) {
      return absl::InternalError(absl::StrCat("drawing ", inputs.size(), " rows of ", logits.vocab_size,
                                              " logits; the sampler was made for ", options_.max_rows, " of ",
                                              options_.vocab_size, " on the device"));
    }
    TANDEM_ASSIGN_OR_RETURN(const int slot, slots_.Take());
    if (const absl::Status status = Enqueue(logits, inputs, slot); !status.ok()) {
      slots_.GiveBack(slot);
      return status;
    }
    std::vector<std::uint32_t>& positions = positions_[static_cast<std::size_t>(slot)];
    positions.clear();
    for (const DrawInput& input : inputs) positions.push_back(input.position);
    return PendingDraw{.slot = slot,
                       .ids = &reinterpret_cast<const SampledToken*>(device(places_.tokens(slot)))->id,
                       .id_stride = sizeof(SampledToken) / sizeof(std::uint32_t)};
  }

  std::vector<absl::StatusOr<DrawnToken>> Collect(const PendingDraw& draw) override {
    const std::vector<std::uint32_t>& positions = positions_[static_cast<std::size_t>(draw.slot)];
    const absl::Status status = drawn_[static_cast<std::size_t>(draw.slot)]->Wait();
    slots_.GiveBack(draw.slot);
    std::vector<absl::StatusOr<DrawnToken>> drawn;
    drawn.reserve(positions.size());
    const auto* tokens = reinterpret_cast<const SampledToken*>(host(places_.tokens(draw.slot)));
    for (std::size_t i = 0; i < positions.size(); ++i) {
      drawn.push_back(status.ok() ? ToDrawn(tokens[i], positions[i]) : absl::StatusOr<DrawnToken>(status));
    }
    return drawn;
  }

 private:
  std::byte* host(std::uint64_t begin) const { return staging_->bytes().data() + begin; }
  std::byte* device(std::uint64_t begin) const { return options_.workspace.data() + begin; }

  absl::Status Enqueue(const Logits& logits, std::span<const DrawInput> inputs, int slot) {
    if (!inputs.empty()) {
      TANDEM_RETURN_IF_ERROR(CopyRows(inputs, slot, logits.stream));
      TANDEM_RETURN_IF_ERROR(Sample({.logits = logits.data,
                                     .rows = reinterpret_cast<const SampleRow*>(device(places_.rows(slot))),
                                     .seen = reinterpret_cast<const std::uint32_t*>(device(places_.seen_begin)),
                                     .tokens = reinterpret_cast<SampledToken*>(device(places_.tokens(slot))),
                                     .num_rows = static_cast<std::int64_t>(inputs.size()),
                                     .vocab_size = logits.vocab_size},
                                    Device::kCuda, logits.stream));
      TANDEM_RETURN_IF_ERROR(CudaToStatus(
          cudaMemcpyAsync(host(places_.tokens(slot)), device(places_.tokens(slot)), inputs.size() * sizeof(SampledToken),
                          cudaMemcpyDeviceToHost, static_cast<cudaStream_t>(logits.stream)),
          "drawn tokens"));
    }
    return drawn_[static_cast<std::size_t>(slot)]->Record(logits.stream);
  }

  absl::Status CopyRows(std::span<const DrawInput> inputs, int slot, void* stream) {
    auto* rows = reinterpret_cast<SampleRow*>(host(places_.rows(slot)));
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
        if (num_penalised == 0) TANDEM_RETURN_IF_ERROR(seen_copied_->Wait());  // the maps of another draw may still be read
        FillSeen(inputs[i], num_penalised);
        row.seen = num_penalised++;
      }
      rows[i] = row;
    }
    const auto copy = [&](std::uint64_t begin, std::uint64_t size_bytes) {
      return CudaToStatus(
          cudaMemcpyAsync(device(begin), host(begin), size_bytes, cudaMemcpyHostToDevice, static_cast<cudaStream_t>(stream)),
          "sampling parameters");
    };
    TANDEM_RETURN_IF_ERROR(copy(places_.rows(slot), inputs.size() * sizeof(SampleRow)));
    if (num_penalised == 0) return absl::OkStatus();
    TANDEM_RETURN_IF_ERROR(
        copy(places_.seen_begin, static_cast<std::uint64_t>(num_penalised * 2 * places_.seen_words) * sizeof(std::uint32_t)));
    return seen_copied_->Record(stream);
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
  const Events drawn_;                            // by slot: its tokens are on the host
  const std::unique_ptr<CudaEvent> seen_copied_;  // the maps that were filled last are on the device
  DrawSlots slots_;
  std::array<std::vector<std::uint32_t>, kMaxPendingDraws> positions_;  // by slot, of its rows
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
  CudaSampler::Events drawn;
  for (std::unique_ptr<CudaEvent>& event : drawn) { TANDEM_ASSIGN_OR_RETURN(event, CudaEvent::Create()); }
  TANDEM_ASSIGN_OR_RETURN(std::unique_ptr<CudaEvent> seen_copied, CudaEvent::Create());
  return std::make_unique<CudaSampler>(options, std::move(staging), std::move(drawn), std::move(seen_copied));
}

}  // namespace tandem

// What decoder_model.cc dispatches to, one file per device, and the checks that both share.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "rollout_server/model/decoder_model.h"

namespace tandem {

absl::StatusOr<std::unique_ptr<DecoderModel>> CreateCpuDecoderModel(const ModelConfig& config, const WeightLayout& layout,
                                                                    const std::byte* weights, std::span<std::byte> kv_cache,
                                                                    const DecoderModelOptions& options);
absl::StatusOr<std::unique_ptr<DecoderModel>> CreateCudaDecoderModel(const ModelConfig& config, const WeightLayout& layout,
                                                                     const std::byte* weights, std::span<std::byte> kv_cache,
                                                                     const DecoderModelOptions& options);
std::vector<WorkspacePart> CudaDecoderWorkspaceParts(const ModelConfig& config, const DecoderModelOptions& options);

// The id of a row, on the CPU.
inline std::uint32_t TokenOf(const StepBatch& batch, std::size_t row) {
  const std::uint32_t* place = batch.token_places.empty() ? nullptr : batch.token_places[row];
  return place == nullptr ? batch.token_ids[row] : *place;
}

// Nothing that a step names lies outside of model, cache and batch. Errors: INVALID_ARGUMENT.
absl::Status CheckStepBatch(const StepBatch& batch, const ModelConfig& config, std::int64_t num_blocks,
                            std::int64_t block_tokens);
absl::Status CheckBlockCopy(std::int32_t from, std::int32_t to, std::int64_t num_blocks);

}  // namespace tandem

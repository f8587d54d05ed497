// Stands in for cuda_decoder_model.cc where the build has no device code.
#include "rollout_server/model/decoder_backends.h"

namespace tandem {

absl::StatusOr<std::unique_ptr<DecoderModel>> CreateCudaDecoderModel(const ModelConfig&, const WeightLayout&, const std::byte*,
                                                                     std::span<std::byte>, const DecoderModelOptions&) {
  return BuiltWithoutCuda("decoder model");
}

std::vector<WorkspacePart> CudaDecoderWorkspaceParts(const ModelConfig&, const DecoderModelOptions&) { return {}; }

}  // namespace tandem

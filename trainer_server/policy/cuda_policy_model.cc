#include "trainer_server/policy/cuda_policy_model.h"

#include <optional>
#include <utility>

#include "common/base/check.h"
#include "common/model/kv_scale_table.h"
#include "trainer_server/policy/cuda_backend.h"
#include "trainer_server/policy/flash_attention.h"
#include "trainer_server/policy/network_policy_model.h"
#include "trainer_server/policy/policy_network.inc"

namespace tandem {

template class PolicyNetwork<CudaBackend<float>>;
template class PolicyNetwork<CudaBackend<Bf16>>;

namespace {

constexpr int kMaxHeadDim = 256;

template <typename T>
std::unique_ptr<PolicyModel> Make(const ModelConfig& config, const WeightLayout& layout, const std::byte* weights,
                                  const AdapterMemory& memory, const PolicyOptions& options, const PolicyDevice& device,
                                  AdapterLayout adapter_layout, std::unique_ptr<Stream> copy_stream) {
  NetworkWeights<T> views = WeightsAt<T>(layout, weights);
  LinearHead<T> head = HeadAt(config, views.head, options);
  head.row_tile = options.logit_chunk;
  std::optional<KvScaleTable> kv_scales;
  if (!device.kv_scales.empty()) {
    kv_scales.emplace(config, layout.digest, Device::kCuda, device.kv_scales);
    for (int layer = 0; layer < config.num_layers; ++layer) {
      views.layers[static_cast<std::size_t>(layer)].after_qkv.kv_scales = kv_scales->layer(layer);
    }
  }
  CudaBackend<T> backend(config, layout.format, head, device, std::move(copy_stream), kv_scales);
  return std::make_unique<NetworkPolicyModel<CudaBackend<T>>>(config, std::move(views), std::move(backend), Device::kCuda, memory,
                                                              options, std::move(adapter_layout));
}

}  // namespace

AttentionOptions CudaAttentionOptions(const ModelConfig& config, bool is_deterministic) {
  return {.is_deterministic = is_deterministic || !CudnnAttention::Serves(config)};
}

std::string CudaAttentionName(const ModelConfig& config, StorageFormat format, const AttentionOptions& options) {
  switch (ChooseAttention(config, format, options)) {
    case AttentionKernel::kCudnn:
      if (CudnnAttention::Serves(config)) return "cuDNN";
      [[fallthrough]];
    case AttentionKernel::kFlash:
      if (FlashAttention::Serves(config)) return "LibTorch's flash attention(deterministic)";
      [[fallthrough]];
    case AttentionKernel::kOwn:
      break;
  }
  return "own(packed, deterministic)";
}

absl::StatusOr<std::unique_ptr<PolicyModel>> CreateCudaPolicyModel(const ModelConfig& config, const WeightLayout& layout,
                                                                   const std::byte* weights, const AdapterMemory& memory,
                                                                   const PolicyOptions& options, const PolicyDevice& device,
                                                                   AdapterLayout adapter_layout) {
  TANDEM_CHECK(device.stream != nullptr && device.gemm != nullptr, "a policy on the GPU needs a stream and a Gemm");
  if (config.head_dim > kMaxHeadDim) {
    return absl::InvalidArgumentError(absl::StrCat("policy: heads of ", config.head_dim, ", at most ", kMaxHeadDim));
  }
  TANDEM_ASSIGN_OR_RETURN(std::unique_ptr<Stream> copy_stream, Stream::Create(Device::kCuda));
  if (layout.format == StorageFormat::kFp32) {
    return Make<float>(config, layout, weights, memory, options, device, std::move(adapter_layout), std::move(copy_stream));
  }
  return Make<Bf16>(config, layout, weights, memory, options, device, std::move(adapter_layout), std::move(copy_stream));
}

}  // namespace tandem

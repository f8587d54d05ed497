#include "rollout_server/model/kv_scales.h"

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "common/gpu/cuda_status.h"
#include "common/gpu/device.h"

namespace tandem {
namespace {

constexpr std::size_t kRecordBytes = 128;

// Scales and means of one layer.
std::size_t LayerFloats(int num_kv_heads, int head_dim) {
  return static_cast<std::size_t>(num_kv_heads) * (2 + static_cast<std::size_t>(head_dim));
}

}  // namespace

std::uint64_t KvScales::Bytes(const ModelConfig& config) {
  return kRecordBytes +
         static_cast<std::size_t>(config.num_layers) * LayerFloats(config.num_kv_heads, config.head_dim) * sizeof(float);
}

KvScales::KvScales(const ModelConfig& config, const std::string& digest, std::byte* memory)
    : num_layers_(config.num_layers),
      num_kv_heads_(config.num_kv_heads),
      head_dim_(config.head_dim),
      record_([&] {
        std::string record = absl::StrCat("tandem E4M3 KV scales and key means of ", digest);
        record.resize(kRecordBytes);
        return record;
      }()),
      memory_(memory) {}

float* KvScales::layer(int layer) const {
  return reinterpret_cast<float*>(memory_ + kRecordBytes) +
         static_cast<std::size_t>(layer) * LayerFloats(num_kv_heads_, head_dim_);
}

absl::Status KvScales::Find() {
  std::string record(kRecordBytes, '\0');
  TANDEM_RETURN_IF_ERROR(CopyToHost(Device::kCuda, record.data(), memory_, record.size()));
  are_set_ = record == record_ && Check("scales found").ok();
  return absl::OkStatus();
}

absl::Status KvScales::Freeze(void* stream) {
  TANDEM_RETURN_IF_ERROR(
      CudaToStatus(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "the step that measures the KV cache's scales"));
  TANDEM_RETURN_IF_ERROR(Check("scales of the first prompts"));
  TANDEM_RETURN_IF_ERROR(CopyFromHost(Device::kCuda, memory_, record_.data(), record_.size()));
  are_set_ = true;
  return absl::OkStatus();
}

absl::Status KvScales::Check(const char* what) {
  const std::size_t layer_floats = LayerFloats(num_kv_heads_, head_dim_), heads = static_cast<std::size_t>(num_kv_heads_);
  std::vector<float> floats(static_cast<std::size_t>(num_layers_) * layer_floats);
  TANDEM_RETURN_IF_ERROR(CopyToHost(Device::kCuda, floats.data(), memory_ + kRecordBytes, floats.size() * sizeof(float)));
  for (std::size_t i = 0; i < floats.size(); ++i) {
    const std::size_t layer = i / layer_floats, place = i % layer_floats;
    const bool is_scale = place < 2 * heads;
    if (std::isfinite(floats[i]) && (!is_scale || floats[i] > 0)) continue;
    return absl::InternalError(absl::StrCat("KV cache in fp8: ", what, ": layer ", layer, ", ",
                                            !is_scale       ? "a mean of the keys"
                                            : place < heads ? "the scale of the keys"
                                                            : "the scale of the values",
                                            " (number ", place, ") is ", floats[i]));
  }
  return absl::OkStatus();
}

}  // namespace tandem

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

std::size_t NumScales(int num_layers, int num_kv_heads) {
  return static_cast<std::size_t>(num_layers) * 2 * static_cast<std::size_t>(num_kv_heads);
}

}  // namespace

std::uint64_t KvScales::Bytes(const ModelConfig& config) {
  return kRecordBytes + NumScales(config.num_layers, config.num_kv_heads) * sizeof(float);
}

KvScales::KvScales(const ModelConfig& config, const std::string& digest, std::byte* memory)
    : num_layers_(config.num_layers),
      num_kv_heads_(config.num_kv_heads),
      record_([&] {
        std::string record = absl::StrCat("tandem E4M3 KV scales of ", digest);
        record.resize(kRecordBytes);
        return record;
      }()),
      memory_(memory) {}

float* KvScales::layer(int layer) const {
  return reinterpret_cast<float*>(memory_ + kRecordBytes) + std::int64_t{layer} * 2 * num_kv_heads_;
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
  std::vector<float> scales(NumScales(num_layers_, num_kv_heads_));
  TANDEM_RETURN_IF_ERROR(CopyToHost(Device::kCuda, scales.data(), memory_ + kRecordBytes, scales.size() * sizeof(float)));
  for (std::size_t i = 0; i < scales.size(); ++i) {
    if (std::isfinite(scales[i]) && scales[i] > 0) continue;
    const auto heads = static_cast<std::size_t>(num_kv_heads_);
    return absl::InternalError(absl::StrCat("KV cache in fp8: ", what, ": ", i / heads % 2 == 0 ? "keys" : "values", " of layer ",
                                            i / heads / 2, ", head ", i % heads, " have scale ", scales[i]));
  }
  return absl::OkStatus();
}

}  // namespace tandem

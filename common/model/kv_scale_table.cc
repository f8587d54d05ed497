#include "common/model/kv_scale_table.h"

#include <cmath>
#include <vector>

#include "common/base/check.h"

namespace tandem {
namespace {

constexpr std::size_t kRecordBytes = 128;

std::size_t NumScales(int num_layers, int num_kv_heads) {
  return static_cast<std::size_t>(num_layers) * 2 * static_cast<std::size_t>(num_kv_heads);
}

}  // namespace

std::uint64_t KvScaleTable::Bytes(const ModelConfig& config) {
  return kRecordBytes + NumScales(config.num_layers, config.num_kv_heads) * sizeof(float);
}

KvScaleTable::KvScaleTable(const ModelConfig& config, const std::string& digest, Device device, std::span<std::byte> memory)
    : num_layers_(config.num_layers),
      num_kv_heads_(config.num_kv_heads),
      record_([&] {
        std::string record = absl::StrCat("tandem fp8 KV scales of ", digest);
        record.resize(kRecordBytes);
        return record;
      }()),
      device_(device),
      memory_(memory.data()) {
  TANDEM_CHECK(memory.size() >= Bytes(config), memory.size(), " bytes for KV scales, ", Bytes(config), " are needed");
}

float* KvScaleTable::layer(int layer) const {
  return reinterpret_cast<float*>(memory_ + kRecordBytes) + std::int64_t{layer} * 2 * num_kv_heads_;
}

absl::StatusOr<bool> KvScaleTable::AreSet() const {
  std::string record(kRecordBytes, '\0');
  TANDEM_RETURN_IF_ERROR(CopyToHost(device_, record.data(), memory_, record.size()));
  if (record != record_) return false;
  TANDEM_ASSIGN_OR_RETURN(const std::string fault, FindFault());
  return fault.empty();
}

absl::Status KvScaleTable::Set() {
  TANDEM_ASSIGN_OR_RETURN(const std::string fault, FindFault());
  if (!fault.empty()) return absl::OutOfRangeError(absl::StrCat("KV cache in fp8: ", fault));
  return CopyFromHost(device_, memory_, record_.data(), record_.size());
}

absl::Status KvScaleTable::Withdraw() { return ZeroMemory(device_, memory_, kRecordBytes); }

absl::StatusOr<std::string> KvScaleTable::FindFault() const {
  std::vector<float> scales(NumScales(num_layers_, num_kv_heads_));
  TANDEM_RETURN_IF_ERROR(CopyToHost(device_, scales.data(), memory_ + kRecordBytes, scales.size() * sizeof(float)));
  for (std::size_t i = 0; i < scales.size(); ++i) {
    if (std::isfinite(scales[i]) && scales[i] > 0) continue;
    const auto heads = static_cast<std::size_t>(num_kv_heads_);
    return absl::StrCat(i / heads % 2 == 0 ? "keys" : "values", " of layer ", i / heads / 2, ", head ", i % heads, " have scale ",
                        scales[i]);
  }
  return std::string();
}

}  // namespace tandem

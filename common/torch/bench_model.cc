#include "common/torch/bench_model.h"

#include <new>
#include <utility>

#include "common/base/random.h"
#include "common/model/model_source.h"
#include "common/model/random_model_source.h"

namespace tandem {
BenchBytes::BenchBytes(std::uint64_t size_bytes)
    : size_(size_bytes), bytes_(new (std::align_val_t(64)) std::byte[size_bytes](), [](std::byte* bytes) {
        ::operator delete[](bytes, std::align_val_t(64));
      }) {}

void BenchBytes::FillRandom() const {
  float* values = reinterpret_cast<float*>(bytes_.get());
  for (std::uint64_t i = 0; i < size_ / sizeof(float); ++i) values[i] = static_cast<float>(0.1 * RandomUniform(1, i) - 0.05);
}

absl::StatusOr<BenchModel> BenchModel::Open(const std::string& path) {
  std::unique_ptr<ModelSource> source;
  TANDEM_ASSIGN_OR_RETURN(ModelConfig config, ConfigOfShape("smollm2-135m"));
  if (!path.empty()) {
    TANDEM_ASSIGN_OR_RETURN(source, ModelSource::Open(path));
    config = source->description().config;
  }
  WeightLayout layout = WeightLayout::Create(config, StorageFormat::kFp32);
  BenchBytes weights(layout.total_bytes);
  if (source != nullptr) {
    TANDEM_RETURN_IF_ERROR(source->LoadWeights(layout, Device::kCpu, weights.span(), [](std::uint64_t) {}));
  } else {
    weights.FillRandom();
  }
  return BenchModel{std::move(config), std::move(layout), std::move(weights)};
}

}  // namespace tandem

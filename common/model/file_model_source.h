// A model whose tensors lie in one or more files: what the readers of both formats share. Loading decodes each tensor straight
// into its place in the region; beside the region it holds a few MiB, whatever the model's size. Immutable; thread-safe.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/model/layer_facts.h"
#include "common/model/model_file.h"
#include "common/model/model_source.h"
#include "common/model/weight_codecs.h"
#include "common/model/weight_loader.h"

namespace tandem {

struct StoredTensor {
  std::string name;
  std::string type_name;             // as the file says: "BF16", "Q4_K"
  std::vector<std::uint64_t> shape;  // outermost first
  std::size_t file_index = 0;
  std::uint64_t begin_bytes = 0;  // from the start of the file
  std::uint64_t size_bytes = 0;
};

class FileModelSource final : public ModelSource {
 public:
  // Checks that the files hold just what the family needs: each tensor once, of the right shape, in a format that can be decoded.
  // Errors: INVALID_ARGUMENT (a tensor is missing or has another shape, a size is out of range), UNIMPLEMENTED (a tensor that the
  // family does not have, a format without decoder).
  static absl::StatusOr<std::unique_ptr<ModelSource>> Create(ModelDescription description, ModelFileKind kind,
                                                             std::vector<ModelFile> files, std::vector<StoredTensor> tensors);

  const ModelDescription& description() const override { return description_; }
  const std::string& digest() const override { return digest_; }
  bool holds_fp8_blocks() const override;
  absl::Status LoadWeights(const WeightLayout& layout, Device device, std::span<std::byte> region,
                           const std::function<void(std::uint64_t)>& progress) const override;
  absl::Status ReadRows(std::size_t tensor_index, std::uint64_t row_begin, std::uint64_t row_end,
                        std::span<float> values) const override;

 private:
  TensorLoad LoadOf(WeightTarget target) const;
  FileModelSource(ModelDescription description, ModelFileKind kind, std::vector<ModelFile> files)
      : description_(std::move(description)), kind_(kind), files_(std::move(files)) {}
  absl::Status CheckTensors() const;
  bool HasBlockScales(const std::string& name) const;
  void ComputeDigest();

  ModelDescription description_;
  ModelFileKind kind_;
  std::vector<ModelFile> files_;
  std::map<std::string, StoredTensor> tensors_;
  std::string digest_;
};

// What LoadWeights is for every kind of source: checks, the tables that the format needs, then each target from where `load_of`
// says. Errors: those of ModelSource::LoadWeights.
absl::Status LoadTargets(const ModelConfig& config, ModelFileKind kind, const WeightLayout& layout, Device device,
                         std::span<std::byte> region, const std::function<TensorLoad(WeightTarget)>& load_of,
                         const std::function<void(std::uint64_t)>& progress);

// What ReadRows is for every kind of source.
absl::Status ReadTargetRows(const ModelConfig& config, ModelFileKind kind, std::size_t tensor_index, std::uint64_t row_begin,
                            std::uint64_t row_end, std::span<float> values,
                            const std::function<TensorLoad(WeightTarget)>& load_of);

absl::StatusOr<std::unique_ptr<ModelSource>> OpenHuggingFaceModel(const std::string& directory);
absl::StatusOr<std::unique_ptr<ModelSource>> OpenGgufModel(const std::string& path);

}  // namespace tandem

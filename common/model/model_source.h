// A model on disk: a Hugging Face directory or a GGUF file. Opening reads and checks everything but the weights' values.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "common/base/status.h"
#include "common/gpu/device.h"
#include "common/model/model_config.h"
#include "common/model/tokenizer.h"
#include "common/model/weight_layout.h"

namespace tandem {

// What a daemon needs to know of a model besides the weights. It lies in the pool's model region, so that a daemon that comes
// back needs no file.
struct ModelDescription {
  ModelConfig config;
  TokenizerSpec tokenizer;
  StorageFormat format = StorageFormat::kFp32;
};
std::string SerializeModelDescription(const ModelDescription& description);
absl::StatusOr<ModelDescription> ParseModelDescription(std::string_view bytes);

// Heads and blocks of scales begin at multiples of so many rows.
std::uint64_t ReadRowsUnit(const ModelConfig& config);

class ModelSource {
 public:
  // `path`: a directory, a GGUF file, or "random:SHAPE" (see random_model_source.h).
  // Errors: NOT_FOUND (path), INVALID_ARGUMENT naming file, tensor, value and limit, UNIMPLEMENTED (family, tensor type).
  static absl::StatusOr<std::unique_ptr<ModelSource>> Open(const std::string& path);
  virtual ~ModelSource() = default;
  virtual const ModelDescription& description() const = 0;
  // SHA-256 over the config and the tensor table (names, types, shapes, offsets, file sizes): the model asked for, cheaply.
  virtual const std::string& digest() const = 0;
  // Every linear layer is stored as E4M3 codes with a scale for each 128 x 128 weights: kFp8Block takes both as they are.
  virtual bool holds_fp8_blocks() const = 0;
  // Reads every tensor into `region`, which lies on `device`, as `layout` says. Requires: region.size() >= layout.total_bytes.
  // Errors: INVALID_ARGUMENT (a region or layout of another size or model; a value that the format cannot hold; kFp8Block where
  // holds_fp8_blocks() is false), those of the files. After an error the region's content is unspecified. `progress` is called
  // with bytes written so far, from one thread.
  virtual absl::Status LoadWeights(const WeightLayout& layout, Device device, std::span<std::byte> region,
                                   const std::function<void(std::uint64_t)>& progress) const = 0;
  // Rows [row_begin, row_end) of one tensor as fp32, row-major: `tensor_index` counts Hugging Face's tensors in the order of
  // WeightTargets, whose rows these are whatever the file's. Requires: values.size() is rows x columns; row_begin is a multiple
  // of ReadRowsUnit(config), row_end too or the tensor's end. Errors: LoadWeights'.
  virtual absl::Status ReadRows(std::size_t tensor_index, std::uint64_t row_begin, std::uint64_t row_end,
                                std::span<float> values) const = 0;
};

// The format in which a pool on `device` holds the model. Left open it is fp32 on the CPU and bf16 on a GPU. A checkpoint in FP8
// with block scales stays as it is on a GPU where the format is left open or `wanted` is fp8. Errors: INVALID_ARGUMENT naming the
// format and what cannot be had in it.
absl::StatusOr<StorageFormat> ChooseStorageFormat(std::optional<StorageFormat> wanted, Device device, const ModelSource& source);

}  // namespace tandem

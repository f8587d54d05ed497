// A model with an adapter merged into it, W + scale B A, as a Hugging Face directory in bf16: streamed file by file, so that no
// more than some rows of one tensor are held. The weights are those of the model's files, decoded to fp32; a sum is rounded once.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "common/base/units.h"
#include "common/model/model_source.h"
#include "common/model/peft_adapter.h"

namespace tandem {

// Takes the next bytes of `file`; false ends the stream.
using FileSink = std::function<bool(const std::string& file, std::string_view piece, bool is_last)>;

struct MergedModelOptions {
  std::uint64_t shard_bytes = 4 * kGiB;  // of tensors in one file, but for a tensor that is larger
  std::size_t piece_bytes = kMiB;        // at most
};

// Writes config.json, the tokenizer's files (copied from the model's directory, or made from what a GGUF file holds), and the
// weights: model.safetensors, or shards with their index. `slot`: the adapter in host memory, laid out by `layout`; it sits on
// `source`, which was opened at `model_path`. Errors: CANCELLED (the sink ended it), those of reading.
absl::Status StreamMergedModel(const ModelSource& source, const std::string& model_path, const AdapterLayout& layout, float scale,
                               std::span<const std::byte> slot, const MergedModelOptions& options, const FileSink& sink);

}  // namespace tandem

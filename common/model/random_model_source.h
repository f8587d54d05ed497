// Models without a file, for benches: the shape of a known model, weights drawn at random, the same bits on every machine and in
// every process. A weight of a layer with n inputs is uniform with variance 1 / n; norms are 1, biases 0. The tokenizer has the
// 256 bytes, then filler: token i is "#i". Generation never ends by itself.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "common/model/model_source.h"

namespace tandem {

inline constexpr std::string_view kRandomModelPrefix = "random:";

// The sizes of "smollm2-135m", "qwen2.5-1.5b", "llama-3.1-8b", "qwen3-8b", of another number of positions where one follows:
// "qwen3-8b:409600". Errors: INVALID_ARGUMENT naming the shapes that there are, or the bound of positions.
absl::StatusOr<ModelConfig> ConfigOfShape(const std::string& shape);
// Errors: those of ConfigOfShape.
absl::StatusOr<std::unique_ptr<ModelSource>> OpenRandomModel(const std::string& shape);

}  // namespace tandem

// The facts by which model families differ, one row of data a family. Readers take names and row order from here; a field of
// config.json that would change the computation must have the value that the row says, or the model is refused.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/model/model_config.h"
#include "common/model/weight_layout.h"

namespace tandem {

enum class ModelFileKind { kHuggingFace, kGguf };

// A field of config.json whose only value that the family computes with is `value` (JSON text). A missing field has it.
struct RequiredField {
  const char* name;
  const char* value;
};

struct LayerFacts {
  const char* family;             // ModelConfig::family, model_type in config.json
  const char* architecture;       // in config.json's "architectures"
  const char* gguf_architecture;  // general.architecture
  // GGUF keeps each q and k head's rows (and so the rotary pairs) interleaved: rows 0, hd/2, 1, hd/2 + 1, ...
  bool is_gguf_rotary_interleaved;
  bool is_tied_by_default;  // tie_word_embeddings when config.json does not say
  bool has_qkv_bias;        // as in ModelConfig
  bool has_qk_norm;
  std::vector<RequiredField> required_fields;
};
// Null when this project has no such family.
const LayerFacts* FindFamily(std::string_view family);
const LayerFacts* FindArchitecture(ModelFileKind kind, std::string_view architecture);
std::string KnownArchitectures(ModelFileKind kind);  // for messages: "LlamaForCausalLM"

// Where one tensor of a file goes: `rows` x `columns` values from `begin_bytes` of the weights region on, row-major.
struct WeightTarget {
  std::string name;        // in the file
  std::uint64_t rows = 1;  // 1 for a norm and for a bias
  std::uint64_t columns = 0;
  std::uint64_t begin_bytes = 0;
  int interleaved_head_dim = 0;                 // above 0: the file's rows are interleaved within heads of so many rows
  bool is_linear = false;                       // it is a part of a LinearPlace
  StorageFormat format = StorageFormat::kFp32;  // of the values in the region
  // Where the scales of this tensor go: those of LinearPlace, of its part. kFp8Row: fp32 [rows]; kNf4: uint8 [rows, columns /
  // 64]; kFp8Block: fp32 [ceil(rows / 128), ceil(columns / 128)].
  std::uint64_t scales_begin_bytes = 0;
  std::uint64_t nested_absmax_begin_bytes = 0;  // kNf4: fp32 [ceil(rows * columns / 64 / 256)]
  std::uint64_t nested_offset_begin_bytes = 0;  // kNf4: one fp32
};
// Every tensor that the model needs, in order of begin_bytes.
std::vector<WeightTarget> WeightTargets(const ModelConfig& config, const WeightLayout& layout, ModelFileKind kind);
// True for a tensor that a file of this family may hold though nothing reads it (an old buffer, a tied head's copy).
bool IsIgnoredTensor(const ModelConfig& config, ModelFileKind kind, std::string_view name);

}  // namespace tandem

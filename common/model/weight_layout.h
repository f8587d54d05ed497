// Where each weight lies in the pool's weights region: one layout for both daemons, fused qkv and fused gate/up, row-major
// [outputs, inputs], every tensor on a 64-byte boundary (256 in the quantised formats). It is a function of (ModelConfig, format)
// alone.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/model/model_config.h"

namespace tandem {

// How linear layers are stored. In the quantised formats norms, biases, embedding and head are bf16.
enum class StorageFormat {
  kFp32,
  kBf16,
  kFp8Row,  // E4M3, one fp32 scale a row: weight = code * scale
  kNf4,     // bitsandbytes' NF4 with double quantisation: see LinearPlace
  // E4M3, one fp32 scale for each 128 x 128 weights (DeepSeek-V3, arXiv 2412.19437, section 3.3.2): codes and scales of the
  // checkpoint, as it has them.
  kFp8Block,
};
const char* StorageFormatName(StorageFormat format);  // "fp32", "bf16", "fp8", "nf4", "fp8_block"
std::optional<StorageFormat> ParseStorageFormat(std::string_view name);
inline bool IsQuantized(StorageFormat format) { return format != StorageFormat::kFp32 && format != StorageFormat::kBf16; }
// What is no linear layer is stored in this.
inline StorageFormat PlainFormat(StorageFormat format) { return IsQuantized(format) ? StorageFormat::kBf16 : format; }
// Bytes of one row of `columns` values, without its scales.
std::uint64_t RowBytes(StorageFormat format, std::uint64_t columns);
// Errors: INVALID_ARGUMENT naming the size that is no multiple of what `format` needs (NF4: 64, FP8: 16).
absl::Status CheckStorageFormat(const ModelConfig& config, StorageFormat format);

inline constexpr int kNf4BlockValues = 64;    // consecutive values of a row under one absmax
inline constexpr int kNf4NestedBlocks = 256;  // consecutive absmax of a part under one nested absmax
inline constexpr int kScaleBlock = 128;       // rows, and columns, under one scale of kFp8Block
constexpr std::int64_t NumScaleBlocks(std::int64_t size) { return (size + kScaleBlock - 1) / kScaleBlock; }

struct TensorPlace {
  std::string name;  // "layers.3.qkv"
  std::vector<std::int64_t> shape;
  std::uint64_t begin_bytes = 0;  // from the start of the weights region
  std::uint64_t size_bytes = 0;
};

// The rows of one tensor of the file within a fused linear layer: NF4 quantises each on its own, and blocks of scales begin anew
// with each.
struct LinearPart {
  std::int64_t row_begin = 0;
  std::int64_t row_end = 0;
  std::int64_t nested_begin = 0;     // kNf4: its first value in nested_absmax
  std::int64_t scale_row_begin = 0;  // kFp8Block: its first row of scales
};

// Codes (fp8: a byte; NF4: two a byte, the even value in the high nibble; else the values themselves) and what makes them
// weights. NF4, block b = column / 64 of row r in part p, in fp32:
//   absmax = nested_map[scales[r, b]] * nested_absmax[part.nested_begin + i / 256] + nested_offset[p],
//   i = (r - part.row_begin) * inputs / 64 + b;  weight = book[code] * absmax.
// FP8 in blocks, column c of row r in part p: weight = code * scales[part.scale_row_begin + (r - part.row_begin) / 128, c / 128].
struct LinearPlace : TensorPlace {
  std::vector<LinearPart> parts;  // in order of rows: q, k, v; gate, up; or one
  // kFp8Row: fp32 [outputs]; kNf4: uint8 [outputs, inputs / 64]; kFp8Block: fp32 [sum over parts of ceil(rows / 128),
  // ceil(inputs / 128)].
  std::optional<TensorPlace> scales;
  std::optional<TensorPlace> nested_absmax;  // kNf4: fp32, for each part ceil(rows * inputs / 64 / 256)
  std::optional<TensorPlace> nested_offset;  // kNf4: fp32 [parts]
};

struct LayerPlaces {
  TensorPlace input_norm;               // [d]
  LinearPlace qkv;                      // [q + 2 kv, d]: rows of q, then k, then v; q and k rows in half-split rotary order
  std::optional<TensorPlace> qkv_bias;  // [q + 2 kv]
  std::optional<TensorPlace> q_norm;    // [head_dim], of every head of q
  std::optional<TensorPlace> k_norm;    // [head_dim]
  LinearPlace o;                        // [d, q]
  TensorPlace post_norm;                // [d]
  LinearPlace gate_up;                  // [2 f, d]: rows of gate, then up
  LinearPlace down;                     // [d, f]
};

struct WeightLayout {
  StorageFormat format = StorageFormat::kFp32;
  TensorPlace embedding;                  // [V, d]
  std::optional<TensorPlace> nested_map;  // kNf4: fp32 [256], Nf4NestedMap()
  std::vector<LayerPlaces> layers;
  TensorPlace final_norm;  // [d]
  TensorPlace head;        // [V, d]; the same place as `embedding` when tied
  std::uint64_t total_bytes = 0;
  std::string digest;  // SHA-256 over every place and the config: both daemons must agree

  // Requires: CheckStorageFormat is OK.
  static WeightLayout Create(const ModelConfig& config, StorageFormat format);
  std::vector<const TensorPlace*> Tensors() const;  // each once, in order of begin_bytes
};

// Where an adapter's matrices lie in its slot: per layer, per target in LinearKind order: A [rank, inputs], B [outputs, rank],
// fp32, each on a 64-byte boundary. The trainer writes slots, the rollout server reads them; see proto AdapterSlot.
struct AdapterPlace {
  int layer = 0;
  LinearKind kind = LinearKind::kQProj;
  std::uint64_t a_begin_bytes = 0;  // from the start of the slot
  std::uint64_t b_begin_bytes = 0;
  LinearShape shape;
};
struct AdapterLayout {
  int rank = 0;
  std::vector<LinearKind> targets;  // sorted, unique
  std::vector<AdapterPlace> places;
  std::uint64_t total_bytes = 0;
  std::uint64_t num_parameters = 0;
  static AdapterLayout Create(const ModelConfig& config, int rank, std::vector<LinearKind> targets);
};

}  // namespace tandem

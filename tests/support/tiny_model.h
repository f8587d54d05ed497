// A small random Llama model as a Hugging Face directory, for tests that need a whole model: config.json, model.safetensors (or
// shards with their index), a byte-level tokenizer.json, and a ChatML template in tokenizer_config.json. Equal options give equal
// bytes.
#pragma once

#include <cstdint>
#include <string>

#include "common/base/status.h"

namespace tandem {

struct TinyModelOptions {
  std::uint64_t seed = 1;
  int num_layers = 2;
  int hidden_size = 64;
  int intermediate_size = 128;
  int num_heads = 4;
  int num_kv_heads = 2;
  int head_dim = 16;
  int vocab_size = 0;  // 0: as many as the tokenizer has (280); larger leaves rows that no token uses
  int max_positions = 1024;
  bool tie_embeddings = true;
  bool use_llama3_rope_scaling = false;
  std::string dtype = "F32";  // or "F16", "BF16"
  int num_shards = 1;
};

// Control tokens of the tokenizer, by id. Ids 3..258 are single bytes, in order; then merged tokens.
inline constexpr std::uint32_t kTinyEndOfText = 0;  // <|endoftext|>
inline constexpr std::uint32_t kTinyImStart = 1;    // <|im_start|>
inline constexpr std::uint32_t kTinyImEnd = 2;      // <|im_end|>: generation ends here
inline constexpr std::uint32_t kTinyFirstByte = 3;

// Makes `directory` when it is missing. Returns `directory`.
absl::StatusOr<std::string> WriteTinyModel(const std::string& directory, const TinyModelOptions& options);

}  // namespace tandem

// What a model is, whatever file it came from: sizes, constants and the facts by which families differ.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/base/status.h"

namespace tandem {

// Llama 3's long-context rope scaling (Llama 3.1 report, "rope_type": "llama3").
struct RopeScaling {
  double factor = 1;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  int original_max_positions = 8192;
};

struct ModelConfig {
  std::string family;  // "llama": a row of the table in layer_facts.h
  std::string name;    // for people: "SmolLM2-135M-Instruct"
  int num_layers = 0;
  int hidden_size = 0;        // d
  int intermediate_size = 0;  // f
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int vocab_size = 0;
  int max_positions = 0;
  float rms_norm_epsilon = 1e-5f;
  double rope_theta = 10000;
  std::optional<RopeScaling> rope_scaling;
  bool is_embedding_tied = false;            // the head is the embedding: one tensor in the pool
  bool has_qkv_bias = false;                 // q, k and v add a bias (Qwen 2)
  bool has_qk_norm = false;                  // RMSNorm of each head of q and of k before the rotary embedding (Qwen 3)
  std::vector<std::uint32_t> end_token_ids;  // generation ends at any of these

  int q_size() const { return num_heads * head_dim; }
  int kv_size() const { return num_kv_heads * head_dim; }
};
// Every size within the limits of this project and consistent with the others, so that no product of two sizes overflows an
// int64. Errors: INVALID_ARGUMENT naming field, value and limit.
absl::Status ValidateModelConfig(const ModelConfig& config);

// The linear layers that an adapter may sit on, in the order of slots and checkpoints.
enum class LinearKind { kQProj, kKProj, kVProj, kOProj, kGateProj, kUpProj, kDownProj };
inline constexpr int kNumLinearKinds = 7;
const char* LinearKindName(LinearKind kind);  // "q_proj"
std::optional<LinearKind> ParseLinearKind(const std::string& name);
struct LinearShape {
  int inputs = 0;
  int outputs = 0;
};
LinearShape ShapeOf(const ModelConfig& config, LinearKind kind);

}  // namespace tandem

#include "common/model/layer_facts.h"

#include "common/base/status.h"

namespace tandem {
namespace {

const std::vector<LayerFacts>& Families() {
  static const auto* const kFamilies = new std::vector<LayerFacts>{
      {.family = "llama",
       .architecture = "LlamaForCausalLM",
       .gguf_architecture = "llama",
       .is_gguf_rotary_interleaved = true,
       .is_tied_by_default = false,
       .has_qkv_bias = false,
       .has_qk_norm = false,
       .required_fields = {{"hidden_act", "\"silu\""},
                           {"attention_bias", "false"},
                           {"mlp_bias", "false"},
                           {"pretraining_tp", "1"},
                           {"partial_rotary_factor", "1.0"}}},
      {.family = "qwen2",
       .architecture = "Qwen2ForCausalLM",
       .gguf_architecture = "qwen2",
       .is_gguf_rotary_interleaved = false,
       .is_tied_by_default = false,
       .has_qkv_bias = true,
       .has_qk_norm = false,
       .required_fields = {{"hidden_act", "\"silu\""}, {"use_sliding_window", "false"}, {"partial_rotary_factor", "1.0"}}},
      {.family = "qwen3",
       .architecture = "Qwen3ForCausalLM",
       .gguf_architecture = "qwen3",
       .is_gguf_rotary_interleaved = false,
       .is_tied_by_default = false,
       .has_qkv_bias = false,
       .has_qk_norm = true,
       .required_fields = {{"hidden_act", "\"silu\""},
                           {"attention_bias", "false"},
                           {"use_sliding_window", "false"},
                           {"partial_rotary_factor", "1.0"}}},
  };
  return *kFamilies;
}

// Names of the tensors; those of a layer without its prefix.
struct TensorNames {
  const char* layer_prefix;
  const char* embedding;
  const char* final_norm;
  const char* head;
  const char* input_norm;
  const char* q;
  const char* k;
  const char* v;
  const char* q_bias;
  const char* k_bias;
  const char* v_bias;
  const char* q_norm;
  const char* k_norm;
  const char* o;
  const char* post_norm;
  const char* gate;
  const char* up;
  const char* down;
};
constexpr TensorNames kHuggingFaceNames = {.layer_prefix = "model.layers.",
                                           .embedding = "model.embed_tokens.weight",
                                           .final_norm = "model.norm.weight",
                                           .head = "lm_head.weight",
                                           .input_norm = ".input_layernorm.weight",
                                           .q = ".self_attn.q_proj.weight",
                                           .k = ".self_attn.k_proj.weight",
                                           .v = ".self_attn.v_proj.weight",
                                           .q_bias = ".self_attn.q_proj.bias",
                                           .k_bias = ".self_attn.k_proj.bias",
                                           .v_bias = ".self_attn.v_proj.bias",
                                           .q_norm = ".self_attn.q_norm.weight",
                                           .k_norm = ".self_attn.k_norm.weight",
                                           .o = ".self_attn.o_proj.weight",
                                           .post_norm = ".post_attention_layernorm.weight",
                                           .gate = ".mlp.gate_proj.weight",
                                           .up = ".mlp.up_proj.weight",
                                           .down = ".mlp.down_proj.weight"};
constexpr TensorNames kGgufNames = {.layer_prefix = "blk.",
                                    .embedding = "token_embd.weight",
                                    .final_norm = "output_norm.weight",
                                    .head = "output.weight",
                                    .input_norm = ".attn_norm.weight",
                                    .q = ".attn_q.weight",
                                    .k = ".attn_k.weight",
                                    .v = ".attn_v.weight",
                                    .q_bias = ".attn_q.bias",
                                    .k_bias = ".attn_k.bias",
                                    .v_bias = ".attn_v.bias",
                                    .q_norm = ".attn_q_norm.weight",
                                    .k_norm = ".attn_k_norm.weight",
                                    .o = ".attn_output.weight",
                                    .post_norm = ".ffn_norm.weight",
                                    .gate = ".ffn_gate.weight",
                                    .up = ".ffn_up.weight",
                                    .down = ".ffn_down.weight"};

const TensorNames& NamesOf(ModelFileKind kind) { return kind == ModelFileKind::kGguf ? kGgufNames : kHuggingFaceNames; }

const char* ArchitectureOf(const LayerFacts& facts, ModelFileKind kind) {
  return kind == ModelFileKind::kGguf ? facts.gguf_architecture : facts.architecture;
}

bool EndsWith(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

// Gives out the rows of a place that several tensors share, one after the other.
class RowTaker {
 public:
  RowTaker(const TensorPlace& place, StorageFormat format) : format_(format), position_(place.begin_bytes) {}
  RowTaker(const LinearPlace& place, StorageFormat format) : RowTaker(static_cast<const TensorPlace&>(place), format) {
    linear_ = &place;
  }

  WeightTarget Take(std::string name, int rows, int columns) {
    WeightTarget target{.name = std::move(name),
                        .rows = static_cast<std::uint64_t>(rows),
                        .columns = static_cast<std::uint64_t>(columns),
                        .begin_bytes = position_,
                        .is_linear = linear_ != nullptr,
                        .format = format_};
    position_ += target.rows * RowBytes(format_, target.columns);
    if (linear_ != nullptr) PlaceScales(&target);
    return target;
  }

 private:
  // The next part of the linear layer is the target.
  void PlaceScales(WeightTarget* target) {
    const LinearPart& part = linear_->parts[part_index_];
    if (linear_->scales.has_value()) {
      const TensorPlace& scales = *linear_->scales;
      const std::uint64_t row_bytes = scales.size_bytes / static_cast<std::uint64_t>(scales.shape[0]);
      const std::int64_t first_row = format_ == StorageFormat::kFp8Block ? part.scale_row_begin : part.row_begin;
      target->scales_begin_bytes = scales.begin_bytes + static_cast<std::uint64_t>(first_row) * row_bytes;
    }
    if (linear_->nested_absmax.has_value()) {
      target->nested_absmax_begin_bytes =
          linear_->nested_absmax->begin_bytes + static_cast<std::uint64_t>(part.nested_begin) * sizeof(float);
      target->nested_offset_begin_bytes = linear_->nested_offset->begin_bytes + part_index_ * sizeof(float);
    }
    ++part_index_;
  }

  const StorageFormat format_;
  const LinearPlace* linear_ = nullptr;
  std::size_t part_index_ = 0;
  std::uint64_t position_;
};

}  // namespace

const LayerFacts* FindFamily(std::string_view family) {
  for (const LayerFacts& facts : Families()) {
    if (family == facts.family) return &facts;
  }
  return nullptr;
}

const LayerFacts* FindArchitecture(ModelFileKind kind, std::string_view architecture) {
  for (const LayerFacts& facts : Families()) {
    if (architecture == ArchitectureOf(facts, kind)) return &facts;
  }
  return nullptr;
}

std::string KnownArchitectures(ModelFileKind kind) {
  std::string names;
  for (const LayerFacts& facts : Families()) absl::StrAppend(&names, names.empty() ? "" : ", ", ArchitectureOf(facts, kind));
  return names;
}

std::vector<WeightTarget> WeightTargets(const ModelConfig& config, const WeightLayout& layout, ModelFileKind kind) {
  const TensorNames& names = NamesOf(kind);
  const LayerFacts* const facts = FindFamily(config.family);
  const bool is_interleaved = kind == ModelFileKind::kGguf && facts != nullptr && facts->is_gguf_rotary_interleaved;
  const StorageFormat plain = PlainFormat(layout.format);
  const int hidden = config.hidden_size, q_size = config.q_size(), kv_size = config.kv_size();
  const int head_dim = config.head_dim, intermediate = config.intermediate_size;
  std::vector<WeightTarget> targets;
  const auto add = [&](std::string name, const TensorPlace& place, int rows, int columns) {
    targets.push_back(RowTaker(place, plain).Take(std::move(name), rows, columns));
  };
  const auto add_linear = [&](std::string name, const LinearPlace& place, int rows, int columns) {
    targets.push_back(RowTaker(place, layout.format).Take(std::move(name), rows, columns));
  };
  add(names.embedding, layout.embedding, config.vocab_size, hidden);
  for (std::size_t i = 0; i < layout.layers.size(); ++i) {
    const LayerPlaces& places = layout.layers[i];
    const std::string prefix = absl::StrCat(names.layer_prefix, i);
    add(prefix + names.input_norm, places.input_norm, 1, hidden);
    RowTaker qkv(places.qkv, layout.format);
    WeightTarget q = qkv.Take(prefix + names.q, q_size, hidden);
    WeightTarget k = qkv.Take(prefix + names.k, kv_size, hidden);
    if (is_interleaved) q.interleaved_head_dim = k.interleaved_head_dim = head_dim;
    targets.push_back(std::move(q));
    targets.push_back(std::move(k));
    targets.push_back(qkv.Take(prefix + names.v, kv_size, hidden));
    if (places.qkv_bias.has_value()) {
      RowTaker bias(*places.qkv_bias, plain);
      targets.push_back(bias.Take(prefix + names.q_bias, 1, q_size));
      targets.push_back(bias.Take(prefix + names.k_bias, 1, kv_size));
      targets.push_back(bias.Take(prefix + names.v_bias, 1, kv_size));
    }
    if (places.q_norm.has_value()) add(prefix + names.q_norm, *places.q_norm, 1, head_dim);
    if (places.k_norm.has_value()) add(prefix + names.k_norm, *places.k_norm, 1, head_dim);
    add_linear(prefix + names.o, places.o, hidden, q_size);
    add(prefix + names.post_norm, places.post_norm, 1, hidden);
    RowTaker gate_up(places.gate_up, layout.format);
    targets.push_back(gate_up.Take(prefix + names.gate, intermediate, hidden));
    targets.push_back(gate_up.Take(prefix + names.up, intermediate, hidden));
    add_linear(prefix + names.down, places.down, hidden, intermediate);
  }
  add(names.final_norm, layout.final_norm, 1, hidden);
  if (!config.is_embedding_tied) add(names.head, layout.head, config.vocab_size, hidden);
  return targets;
}

bool IsIgnoredTensor(const ModelConfig& config, ModelFileKind kind, std::string_view name) {
  if (kind == ModelFileKind::kGguf) return name == "rope_freqs.weight";  // read into ModelConfig::rope_scaling
  return EndsWith(name, ".rotary_emb.inv_freq") || (config.is_embedding_tied && name == kHuggingFaceNames.head);
}

}  // namespace tandem

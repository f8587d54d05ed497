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
       .required_fields = {{"hidden_act", "\"silu\""},
                           {"attention_bias", "false"},
                           {"mlp_bias", "false"},
                           {"pretraining_tp", "1"},
                           {"partial_rotary_factor", "1.0"},
                           {"quantization_config", "null"}}},
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
  RowTaker(const TensorPlace& place, std::uint64_t element_bytes) : position_(place.begin_bytes), element_bytes_(element_bytes) {}

  WeightTarget Take(std::string name, int rows, int columns) {
    WeightTarget target{.name = std::move(name),
                        .rows = static_cast<std::uint64_t>(rows),
                        .columns = static_cast<std::uint64_t>(columns),
                        .begin_bytes = position_};
    position_ += target.rows * target.columns * element_bytes_;
    return target;
  }

 private:
  std::uint64_t position_;
  const std::uint64_t element_bytes_;
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
  const std::uint64_t element_bytes = layout.format == StorageFormat::kFp32 ? 4 : 2;
  const int hidden = config.hidden_size;
  std::vector<WeightTarget> targets;
  const auto add = [&](std::string name, const TensorPlace& place, int rows, int columns) {
    targets.push_back(RowTaker(place, element_bytes).Take(std::move(name), rows, columns));
  };
  add(names.embedding, layout.embedding, config.vocab_size, hidden);
  for (std::size_t i = 0; i < layout.layers.size(); ++i) {
    const LayerPlaces& places = layout.layers[i];
    const std::string prefix = absl::StrCat(names.layer_prefix, i);
    add(prefix + names.input_norm, places.input_norm, 1, hidden);
    RowTaker qkv(places.qkv, element_bytes);
    WeightTarget q = qkv.Take(prefix + names.q, config.q_size(), hidden);
    WeightTarget k = qkv.Take(prefix + names.k, config.kv_size(), hidden);
    if (is_interleaved) q.interleaved_head_dim = k.interleaved_head_dim = config.head_dim;
    targets.push_back(std::move(q));
    targets.push_back(std::move(k));
    targets.push_back(qkv.Take(prefix + names.v, config.kv_size(), hidden));
    add(prefix + names.o, places.o, hidden, config.q_size());
    add(prefix + names.post_norm, places.post_norm, 1, hidden);
    RowTaker gate_up(places.gate_up, element_bytes);
    targets.push_back(gate_up.Take(prefix + names.gate, config.intermediate_size, hidden));
    targets.push_back(gate_up.Take(prefix + names.up, config.intermediate_size, hidden));
    add(prefix + names.down, places.down, hidden, config.intermediate_size);
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

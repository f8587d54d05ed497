#include "common/model/merged_model.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>
#include <map>
#include <utility>
#include <vector>

#include "common/model/file_model_source.h"
#include "common/model/hugging_face_files.h"
#include "common/model/layer_facts.h"
#include "common/model/safetensors.h"
#include "common/model/weight_codecs.h"
#include "nlohmann/json.hpp"

namespace tandem {
namespace {

constexpr std::uint64_t kMostRowBytes = 32 * kMiB;  // of rows in fp32 at a time
constexpr std::uint64_t kMaxTokenizerBytes = 256 * kMiB;
// What a directory may hold beside config.json that says how text becomes tokens and when generation ends.
constexpr const char* kCopiedFiles[] = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                                        "chat_template.jinja", "generation_config.json"};

struct Tensor {
  std::size_t index = 0;  // of WeightTargets
  WeightTarget target;
  const AdapterPlace* adapter = nullptr;  // null: none sits on it
  std::uint64_t size_bytes() const { return target.rows * target.columns * sizeof(std::uint16_t); }
  SafetensorsEntry entry() const {
    if (target.rows == 1) return {target.name, "BF16", {target.columns}};
    return {target.name, "BF16", {target.rows, target.columns}};
  }
};

std::vector<Tensor> TensorsOf(const ModelConfig& config, const AdapterLayout& layout) {
  std::map<std::string, const AdapterPlace*> adapters;
  for (const AdapterPlace& place : layout.places) {
    const bool is_attention = place.kind <= LinearKind::kOProj;
    adapters[absl::StrCat("model.layers.", place.layer, is_attention ? ".self_attn." : ".mlp.", LinearKindName(place.kind),
                          ".weight")] = &place;
  }
  std::vector<Tensor> tensors;
  const WeightLayout weights = WeightLayout::Create(config, StorageFormat::kFp32);
  for (WeightTarget& target : WeightTargets(config, weights, ModelFileKind::kHuggingFace)) {
    const auto found = adapters.find(target.name);
    tensors.push_back({tensors.size(), std::move(target), found == adapters.end() ? nullptr : found->second});
  }
  return tensors;
}

// Tensors of each file, in order.
std::vector<std::vector<Tensor>> Shards(std::vector<Tensor> tensors, std::uint64_t shard_bytes) {
  std::vector<std::vector<Tensor>> shards(1);
  std::uint64_t size = 0;
  for (Tensor& tensor : tensors) {
    if (size > 0 && size + tensor.size_bytes() > shard_bytes) {
      shards.emplace_back();
      size = 0;
    }
    size += tensor.size_bytes();
    shards.back().push_back(std::move(tensor));
  }
  return shards;
}

std::string ShardName(std::size_t index, std::size_t count) {
  if (count == 1) return "model.safetensors";
  return absl::StrFormat("model-%05d-of-%05d.safetensors", index + 1, count);
}

class Merger {
 public:
  Merger(const ModelSource& source, const AdapterLayout& layout, float scale, std::span<const std::byte> slot,
         const MergedModelOptions& options, const FileSink& sink)
      : source_(source), layout_(layout), scale_(scale), slot_(slot), options_(options), sink_(sink) {}

  absl::Status Write(const std::string& file, std::string_view bytes, bool is_last) {
    do {
      const std::string_view piece = bytes.substr(0, options_.piece_bytes);
      bytes.remove_prefix(piece.size());
      if (!sink_(file, piece, is_last && bytes.empty())) return absl::CancelledError("the receiver ended the export");
    } while (!bytes.empty());
    return absl::OkStatus();
  }

  absl::Status WriteShard(const std::string& file, const std::vector<Tensor>& tensors) {
    std::vector<SafetensorsEntry> entries;
    for (const Tensor& tensor : tensors) entries.push_back(tensor.entry());
    TANDEM_ASSIGN_OR_RETURN(const std::string header, SafetensorsHeader(entries, {{"format", "pt"}}));
    TANDEM_RETURN_IF_ERROR(Write(file, header, false));
    for (const Tensor& tensor : tensors) TANDEM_RETURN_IF_ERROR(WriteTensor(file, tensor, &tensor == &tensors.back()));
    return absl::OkStatus();
  }

 private:
  absl::Status WriteTensor(const std::string& file, const Tensor& tensor, bool is_last) {
    const std::uint64_t columns = tensor.target.columns, unit = ReadRowsUnit(source_.description().config);
    const std::uint64_t rows_at_a_time = std::max(kMostRowBytes / (columns * sizeof(float)) / unit, std::uint64_t{1}) * unit;
    std::vector<float> values;
    std::string rounded;
    for (std::uint64_t begin = 0; begin < tensor.target.rows; begin += rows_at_a_time) {
      const std::uint64_t end = std::min(begin + rows_at_a_time, tensor.target.rows);
      values.resize((end - begin) * columns);
      TANDEM_RETURN_IF_ERROR(source_.ReadRows(tensor.index, begin, end, values));
      if (tensor.adapter != nullptr) AddAdapter(*tensor.adapter, begin, end, values);
      rounded.resize(values.size() * sizeof(std::uint16_t));
      for (std::size_t i = 0; i < values.size(); ++i) {
        const std::uint16_t bits = FloatToBf16(values[i]);
        std::memcpy(rounded.data() + i * sizeof bits, &bits, sizeof bits);
      }
      TANDEM_RETURN_IF_ERROR(Write(file, rounded, is_last && end == tensor.target.rows));
    }
    return absl::OkStatus();
  }

  // values[r] += scale * sum over k of B[r, k] A[k].
  void AddAdapter(const AdapterPlace& place, std::uint64_t begin, std::uint64_t end, std::span<float> values) const {
    const auto rank = static_cast<std::size_t>(layout_.rank), inputs = static_cast<std::size_t>(place.shape.inputs);
    const std::vector<float> a = Floats(place.a_begin_bytes, rank * inputs);
    const std::vector<float> b = Floats(place.b_begin_bytes + begin * rank * sizeof(float), (end - begin) * rank);
    std::vector<float> sum(inputs);
    for (std::size_t row = 0; row < end - begin; ++row) {
      std::ranges::fill(sum, 0.0f);
      for (std::size_t k = 0; k < rank; ++k) {
        const float factor = b[row * rank + k];
        const float* const a_row = a.data() + k * inputs;
        for (std::size_t i = 0; i < inputs; ++i) sum[i] += factor * a_row[i];
      }
      for (std::size_t i = 0; i < inputs; ++i) values[row * inputs + i] += scale_ * sum[i];
    }
  }

  std::vector<float> Floats(std::uint64_t begin_bytes, std::size_t count) const {
    std::vector<float> floats(count);
    std::memcpy(floats.data(), slot_.data() + begin_bytes, count * sizeof(float));
    return floats;
  }

  const ModelSource& source_;
  const AdapterLayout& layout_;
  const float scale_;
  const std::span<const std::byte> slot_;
  const MergedModelOptions& options_;
  const FileSink& sink_;
};

// Of the index that names each tensor's file.
std::string IndexText(const std::vector<std::vector<Tensor>>& shards) {
  nlohmann::ordered_json map = nlohmann::ordered_json::object();
  std::uint64_t total_bytes = 0;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    for (const Tensor& tensor : shards[i]) {
      map[tensor.target.name] = ShardName(i, shards.size());
      total_bytes += tensor.size_bytes();
    }
  }
  return nlohmann::ordered_json({{"metadata", {{"total_size", total_bytes}}}, {"weight_map", map}}).dump(2) + "\n";
}

}  // namespace

absl::Status StreamMergedModel(const ModelSource& source, const std::string& model_path, const AdapterLayout& layout, float scale,
                               std::span<const std::byte> slot, const MergedModelOptions& options, const FileSink& sink) {
  const ModelDescription& description = source.description();
  if (slot.size() < layout.total_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("merging an adapter of ", slot.size(), " bytes; ", layout.total_bytes, " are needed"));
  }
  Merger merger(source, layout, scale, slot, options, sink);
  std::map<std::string, std::string> files = {{"config.json", HuggingFaceConfigText(description.config)}};
  if (std::filesystem::is_directory(model_path)) {
    for (const char* const name : kCopiedFiles) {
      absl::StatusOr<std::string> text = ReadSmallFile(absl::StrCat(model_path, "/", name), kMaxTokenizerBytes);
      if (absl::IsNotFound(text.status())) continue;
      if (!text.ok()) return text.status();
      files[name] = *std::move(text);
    }
  } else {
    files.merge(HuggingFaceTokenizerFiles(description.tokenizer));
  }
  for (const auto& [name, text] : files) TANDEM_RETURN_IF_ERROR(merger.Write(name, text, true));

  const std::vector<std::vector<Tensor>> shards = Shards(TensorsOf(description.config, layout), options.shard_bytes);
  for (std::size_t i = 0; i < shards.size(); ++i) {
    TANDEM_RETURN_IF_ERROR(merger.WriteShard(ShardName(i, shards.size()), shards[i]));
  }
  if (shards.size() == 1) return absl::OkStatus();
  return merger.Write("model.safetensors.index.json", IndexText(shards), true);
}

}  // namespace tandem

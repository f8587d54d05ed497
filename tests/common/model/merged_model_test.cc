#include "common/model/merged_model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>

#include "tests/common/model/loaded_model.h"
#include "tests/support/naive_transformer.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/tiny_model.h"

namespace tandem {
namespace {

using testing::NaiveTransformer;
using testing::TemporaryDirectory;
using testing::TinyAdapter;

constexpr float kScale = 0.5f;

// Writes what comes into `directory`; checks that pieces are small and files come one after the other, each ended once.
FileSink WriteTo(const std::string& directory, std::size_t piece_bytes, std::set<std::string>* ended) {
  return [=](const std::string& file, std::string_view piece, bool is_last) {
    EXPECT_LE(piece.size(), piece_bytes);
    EXPECT_FALSE(ended->contains(file)) << file << " goes on after its end";
    std::ofstream(directory + "/" + file, std::ios::binary | std::ios::app) << piece;
    if (is_last) ended->insert(file);
    return true;
  };
}

testing::TinyModel NaiveModel(const LoadedModel& loaded) {
  testing::TinyModel model(loaded.description.config);
  std::memcpy(model.weights->data(), loaded.region.data(), loaded.region.size());
  return model;
}

TEST(MergedModelTest, HoldsEachWeightWithItsAdapterAndGivesItsLogits) {
  const std::vector<std::uint32_t> ids = {5, 40, 7, 7, 100, 31};
  for (const bool is_sharded : {false, true}) {
    const TemporaryDirectory directory, merged_directory;
    TinyModelOptions options;
    options.dtype = "BF16";
    options.tie_embeddings = !is_sharded;
    options.use_llama3_rope_scaling = true;
    ASSERT_TRUE(WriteTinyModel(directory.path(), options).ok());
    const auto source = ModelSource::Open(directory.path());
    ASSERT_TRUE(source.ok()) << source.status();
    const ModelConfig& config = (*source)->description().config;
    const TinyAdapter adapter(config, 3, {LinearKind::kQProj, LinearKind::kOProj, LinearKind::kUpProj, LinearKind::kDownProj},
                              kScale, 7);
    std::set<std::string> ended;
    const absl::Status status = StreamMergedModel(**source, directory.path(), adapter.layout, kScale, adapter.slot->span(),
                                                  {.shard_bytes = is_sharded ? 40'000u : 1u << 30, .piece_bytes = 5000},
                                                  WriteTo(merged_directory.path(), 5000, &ended));
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(ended.contains("model.safetensors"), !is_sharded);
    EXPECT_EQ(ended.contains("model.safetensors.index.json"), is_sharded);
    EXPECT_TRUE(ended.contains("tokenizer.json") && ended.contains("tokenizer_config.json"));

    const LoadedModel base = Load(directory.path()), merged = Load(merged_directory.path());
    EXPECT_EQ(SerializeTokenizerSpec(merged.description.tokenizer), SerializeTokenizerSpec(base.description.tokenizer));
    ModelConfig renamed = merged.description.config;
    renamed.name = base.description.config.name;
    EXPECT_EQ(SerializeModelDescription({renamed, merged.description.tokenizer}), SerializeModelDescription(base.description));

    // Each weight is the sum, rounded once.
    std::size_t num_changed = 0;
    for (const AdapterPlace& place : adapter.layout.places) {
      const bool is_attention = place.kind <= LinearKind::kOProj;
      const std::string name = absl::StrCat("model.layers.", place.layer, is_attention ? ".self_attn." : ".mlp.",
                                            LinearKindName(place.kind), ".weight");
      const std::vector<float> before = ValuesInFiles(directory.path(), name),
                               after = ValuesInFiles(merged_directory.path(), name);
      ASSERT_EQ(before.size(), after.size());
      const float* const a = adapter.slot->floats(place.a_begin_bytes);
      const float* const b = adapter.slot->floats(place.b_begin_bytes);
      const auto inputs = static_cast<std::size_t>(place.shape.inputs);
      for (std::size_t i = 0; i < before.size(); ++i) {
        float sum = 0;
        for (std::size_t k = 0; k < 3; ++k) sum += b[i / inputs * 3 + k] * a[k * inputs + i % inputs];
        const float whole = before[i] + kScale * sum;
        ASSERT_NEAR(after[i], whole, std::abs(whole) / 256) << name << " " << i;
        num_changed += after[i] != before[i] ? 1 : 0;
      }
    }
    EXPECT_GT(num_changed, 1000u);
    for (const char* name : {"model.embed_tokens.weight", "model.norm.weight", "model.layers.1.self_attn.v_proj.weight"}) {
      EXPECT_EQ(ValuesInFiles(directory.path(), name), ValuesInFiles(merged_directory.path(), name));
    }

    // Logits of the merged model are those of base and adapter, but for the rounding of weights.
    const testing::TinyModel naive_base = NaiveModel(base), naive_merged = NaiveModel(merged);
    const auto adapted = NaiveTransformer(naive_base, &adapter).Logits(ids), plain = NaiveTransformer(naive_base).Logits(ids),
               whole = NaiveTransformer(naive_merged).Logits(ids);
    double largest_error = 0, largest_effect = 0;
    for (std::size_t t = 0; t < ids.size(); ++t) {
      for (std::size_t v = 0; v < whole[t].size(); ++v) {
        largest_error = std::max(largest_error, std::abs(whole[t][v] - adapted[t][v]));
        largest_effect = std::max(largest_effect, std::abs(plain[t][v] - adapted[t][v]));
      }
    }
    EXPECT_LT(largest_error, 0.02 * largest_effect);
  }
}

TEST(MergedModelTest, EndsWhenTheReceiverDoesAndRefusesAShortSlot) {
  const TemporaryDirectory directory;
  ASSERT_TRUE(WriteTinyModel(directory.path(), {}).ok());
  const auto source = ModelSource::Open(directory.path());
  ASSERT_TRUE(source.ok()) << source.status();
  const TinyAdapter adapter((*source)->description().config, 2, testing::AllLinearKinds(), 1, 7);
  int num_pieces = 0;
  const FileSink once = [&](const std::string&, std::string_view, bool) { return ++num_pieces < 3; };
  EXPECT_TRUE(
      absl::IsCancelled(StreamMergedModel(**source, directory.path(), adapter.layout, 1, adapter.slot->span(), {}, once)));
  EXPECT_EQ(num_pieces, 3);
  EXPECT_TRUE(absl::IsInvalidArgument(
      StreamMergedModel(**source, directory.path(), adapter.layout, 1, adapter.slot->span().first(8), {}, once)));
}

}  // namespace
}  // namespace tandem

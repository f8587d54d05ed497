// A GPU's passes at full size without a GPU: PolicyNetwork over a backend that computes nothing but takes every buffer that
// CudaBackend takes, out of a range of addresses without memory. What was planned is enough: no piece is lost between others.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/base/units.h"
#include "common/model/random_model_source.h"
#include "common/torch/arena_allocator.h"
#include "common/torch/run_torch.h"
#include "kernels/base/elements.h"
#include "trainer_server/policy/policy_memory.h"
#include "trainer_server/policy/policy_network.inc"

namespace tandem {
namespace {

constexpr std::int64_t kIndexArrays = 14, kElementBytes = 2;

class BufferTaker {
 public:
  using Element = Bf16;
  using Sum = float;
  template <typename U>
  using Buffer = tandem::Buffer<U>;
  static constexpr std::int64_t kTileRows = kCudaTileRows;
  struct Plan {
    std::int64_t num_rows = 0, num_head_rows = 0;
    Buffer<std::int32_t> indices;
    Buffer<float> cosines, sines;
  };
  class LayerInputs {
   public:
    LayerInputs(const KeptLayers& kept, std::int64_t input_bytes)
        : ring_(kept.num_slots * static_cast<std::int64_t>(kept.slot_bytes)),
          keeps_attention_(kept.keeps_attention),
          input_bytes_(input_bytes) {}
    bool keeps_attention() const { return keeps_attention_; }
    KeptLayer<Bf16, float> Place(int) const {
      KeptLayer<Bf16, float> kept{reinterpret_cast<Bf16*>(ring_.data())};
      if (keeps_attention_) kept.attention = reinterpret_cast<Bf16*>(ring_.data() + input_bytes_);
      return kept;
    }
    void Keep(int) {}
    KeptLayer<Bf16, float> Fetch(int layer) const { return Place(layer); }
    void Release(int) {}

   private:
    const Buffer<std::byte> ring_;
    const bool keeps_attention_;
    const std::int64_t input_bytes_;
  };
  using AfterQkv = NetworkWeights<Bf16>::AfterQkv;

  BufferTaker(ModelConfig config, StorageFormat format, std::uint64_t spare_bytes)
      : config_(std::move(config)), format_(format), spare_bytes_(spare_bytes) {}

  void Enter(const char*) {}
  std::unique_ptr<Plan> MakePlan(const MicroBatch& batch) {
    auto plan = std::make_unique<Plan>();
    plan->num_rows = static_cast<std::int64_t>(batch.token_ids.size());
    plan->num_head_rows = static_cast<std::int64_t>(batch.head_rows.size());
    plan->indices = Buffer<std::int32_t>(kIndexArrays * plan->num_rows);
    plan->cosines = Buffer<float>(plan->num_rows * config_.head_dim / 2);
    plan->sines = Buffer<float>(plan->num_rows * config_.head_dim / 2);
    return plan;
  }
  std::unique_ptr<LayerInputs> KeepLayerInputs(const PolicyPass& pass) {
    const PolicyMemory memory = PlanPolicyMemory(config_, format_, {}, pass);
    const KeptLayers kept = ChooseKeptLayers(memory, config_.num_layers, spare_bytes_, std::uint64_t{1} << 40);
    return std::make_unique<LayerInputs>(kept, static_cast<std::int64_t>(memory.layer_input_bytes));
  }
  void Round(const float*, Bf16*, std::int64_t) {}
  void Widen(const Bf16*, float*, std::int64_t) {}
  void Copy(Bf16*, const Bf16*, std::int64_t) {}
  void Zero(float*, std::int64_t) {}
  Matrix<const Bf16> ToElements(Matrix<const float>, Matrix<Bf16> scratch) { return scratch; }
  void Embed(Plan*, const Bf16*, float*) {}
  void Norm(const float*, const Bf16*, Bf16*, std::int64_t) {}
  void NormBackward(const float*, const Bf16*, const Bf16*, float*, std::int64_t) {}
  Matrix<const Bf16> Values(const LinearWeight<Bf16>&, std::int64_t outputs, std::int64_t inputs, Bf16* scratch) {
    return {scratch, outputs, inputs};
  }
  template <typename C>
  void Multiply(Matrix<const Bf16>, Matrix<const Bf16>, Matrix<C>, double = 1, double = 0) {}
  void AddProduct(Matrix<const Bf16>, Matrix<const Bf16>, Matrix<float>, double) {}
  void Swiglu(const float*, Bf16*, std::int64_t) {}
  void SwigluBackward(Bf16*, const Bf16*, Bf16*, std::int64_t) {}
  void FinishQkv(Plan*, const AfterQkv&, std::int64_t, std::int64_t, const float*, Bf16*, Bf16*) {}
  void FinishQkvBackward(Plan*, const AfterQkv&, const Bf16*, Bf16*) {}
  void AttentionForward(Plan* plan, const Bf16*, Bf16*, float*) {
    const Buffer<std::byte> scratch(PlanAttentionScratch(config_, format_, {}, plan->num_rows).forward_bytes);
  }
  void AttentionBackward(Plan* plan, const Bf16*, const Bf16*, const float*, const Bf16*, Bf16*) {
    const Buffer<std::byte> scratch(PlanAttentionScratch(config_, format_, {}, plan->num_rows).backward_bytes);
  }
  void Dropout(Bf16*, std::int64_t, std::int64_t, std::int64_t, std::uint64_t, double) {}
  void Add(Bf16*, const Bf16*, std::int64_t) {}
  void NormHeadRows(Plan*, const float*, const Bf16*, Bf16*) {}
  LinearLogprobs HeadForward(Plan* plan, const Bf16*, Bf16*) {
    TakeHeadTile(plan->num_head_rows);
    const auto rows = static_cast<std::size_t>(plan->num_head_rows);
    return {.logprobs = std::vector<double>(rows), .lse = std::vector<double>(rows), .entropies = std::vector<double>(rows)};
  }
  void HeadBackward(Plan* plan, const Bf16*, const LinearLogprobs&, std::span<const double>, std::span<const double>, Bf16*) {
    TakeHeadTile(plan->num_head_rows);
  }
  void AddHeadGradient(Plan* plan, const float*, const Bf16*, Bf16*, std::span<const double>, float*) {
    const Buffer<Bf16> summed(plan->num_head_rows * config_.hidden_size);
  }

 private:
  void TakeHeadTile(std::int64_t num_head_rows) {
    const HeadTile tile = ChooseHeadTile(config_, kElementBytes, 0, num_head_rows);
    const Buffer<float> products(tile.rows * tile.columns), pulled(tile.rows * config_.hidden_size);
    const Buffer<Bf16> separate(tile.rows * tile.columns);
    const Buffer<double> results(3 * num_head_rows);
  }

  ModelConfig config_;
  StorageFormat format_;
  std::uint64_t spare_bytes_;
};

// Addresses without memory: nothing may touch them.
class Addresses {
 public:
  explicit Addresses(std::uint64_t size_bytes)
      : size_(size_bytes), data_(mmap(nullptr, size_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~Addresses() { munmap(data_, size_); }
  std::span<std::byte> first(std::uint64_t size_bytes) const { return {static_cast<std::byte*>(data_), size_bytes}; }

 private:
  const std::uint64_t size_;
  void* const data_;
};

// One completion on a prompt; all rows scored where `scores_prompt` says so.
MicroBatch LongBatch(std::int64_t prompt, std::int64_t completion, bool scores_prompt) {
  MicroBatch batch;
  const std::int64_t rows = prompt + completion;
  batch.token_ids.assign(static_cast<std::size_t>(rows), 1);
  batch.completions = {
      {0, 0, static_cast<std::int32_t>(prompt), static_cast<std::int32_t>(prompt), static_cast<std::int32_t>(rows)}};
  batch.head_rows.assign(static_cast<std::size_t>(scores_prompt ? rows - 1 : completion), 0);
  return batch;
}

struct Case {
  std::string shape;
  StorageFormat format;
  std::int64_t prompt, completion;
  bool scores_prompt;
};

TEST(GpuPasses, RunInWhatIsPlannedAtFullSize) {
  const std::vector<Case> cases = {{"llama-3.1-8b", StorageFormat::kBf16, 512, 20480, false},
                                   {"llama-3.1-8b", StorageFormat::kNf4, 512, 20480, false},
                                   {"llama-3.1-8b:409600", StorageFormat::kBf16, 310000, 1024, true},
                                   {"qwen3-8b:409600", StorageFormat::kNf4, 337000, 1024, true},
                                   {"qwen3-8b:409600", StorageFormat::kNf4, 337000, 1024, false},
                                   {"qwen2.5-1.5b", StorageFormat::kNf4, 128, 1024, false},
                                   {"smollm2-135m", StorageFormat::kBf16, 100, 16, false}};
  const Addresses addresses(std::uint64_t{256} << 30);
  for (const Case& each : cases) {
    const absl::StatusOr<ModelConfig> config = ConfigOfShape(each.shape);
    ASSERT_TRUE(config.ok()) << config.status();
    const MicroBatch batch = LongBatch(each.prompt, each.completion, each.scores_prompt);
    const PolicyPass pass{.rank = 16,
                          .rows = static_cast<std::int64_t>(batch.token_ids.size()),
                          .head_rows = static_cast<std::int64_t>(batch.head_rows.size()),
                          .num_segments = 2};
    const PolicyMemory memory = PlanPolicyMemory(*config, each.format, {}, pass);
    NetworkWeights<Bf16> weights;
    weights.layers.resize(static_cast<std::size_t>(config->num_layers));
    const std::int64_t d = config->hidden_size, qkv = config->q_size() + 2 * config->kv_size();
    if (IsQuantized(each.format)) weights.layer_codes = d * qkv + config->q_size() * d + 3 * d * config->intermediate_size;
    LoraSet<Bf16, float> lora{.rank = pass.rank, .scale = 1, .layers = {}};
    lora.layers.resize(weights.layers.size());
    for (const std::int64_t layers : {std::int64_t{2}, std::int64_t{config->num_layers / 2}, std::int64_t{config->num_layers}}) {
      for (const bool has_entropy_bonus : {false, true}) {
        const std::uint64_t spare =
            static_cast<std::uint64_t>(layers) * (memory.layer_input_bytes + (layers > 2 ? memory.layer_attention_bytes : 0));
        SCOPED_TRACE(absl::StrCat(each.shape, " ", StorageFormatName(each.format), ", ", each.prompt, " + ", each.completion,
                                  ", room for ", layers, " layers, entropy bonus ", has_entropy_bonus));
        PolicyNetwork<BufferTaker> network(*config, weights, BufferTaker(*config, each.format, spare));
        const ArenaScope scope(addresses.first(RoundUp(memory.working_bytes + spare, 256)), "activations");
        for (int step = 1; step <= 2; ++step) {
          const absl::Status status = RunTorch("pass", [&] {
            network.Score(batch, &lora);
            network.Forward(batch, lora, {}, has_entropy_bonus);
            const std::vector<double> gradients(batch.head_rows.size());
            network.Backward(gradients, has_entropy_bonus ? gradients : std::vector<double>());
            return absl::OkStatus();
          });
          EXPECT_TRUE(status.ok()) << status;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tandem

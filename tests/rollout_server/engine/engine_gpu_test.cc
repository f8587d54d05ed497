// The engine with the GPU's model and sampler: steps put behind each other, and a device whose context is lost.
#include "common/base/clock.h"
#include "rollout_server/engine/engine.h"

#include <cstdio>
#include <cstdlib>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/embedding/embedding.h"
#include "tests/rollout_server/support/fake_model.h"
#include "tests/rollout_server/support/recording_sink.h"
#include "tests/support/device_bytes.h"
#include "tests/support/naive_transformer.h"
#include "tests/support/quantized_weights.h"

namespace tandem {
namespace {

using testing::Completion;
using testing::DeviceBytes;
using testing::FakeTokenizer;
using testing::RecordingSink;

constexpr int kVocabSize = 264, kBlockTokens = 16, kNumBlocks = 200, kMaxSequences = 64;

ModelConfig SmallConfig() {
  ModelConfig config = testing::TinyConfig(/*is_embedding_tied=*/false);
  config.hidden_size = 128;
  config.intermediate_size = 192;
  config.num_heads = 6;
  config.num_kv_heads = 2;
  config.head_dim = 64;
  config.vocab_size = kVocabSize;
  config.max_positions = 1024;
  return config;
}

// Leaves an illegal access behind its n-th step, as a faulty kernel would.
class StrayModel final : public DecoderModel {
 public:
  StrayModel(std::unique_ptr<DecoderModel> model, int stray_step) : model_(std::move(model)), stray_step_(stray_step) {}
  absl::StatusOr<Logits> Run(const StepBatch& batch) override {
    TANDEM_ASSIGN_OR_RETURN(const Logits logits, model_->Run(batch));
    if (++num_steps_ == stray_step_) {
      TANDEM_RETURN_IF_ERROR(Embedding({.dtype = DType::kFp32,
                                        .table = logits.data,
                                        .token_ids = reinterpret_cast<const std::uint32_t*>(std::uintptr_t{64}),
                                        .output = const_cast<float*>(logits.data),
                                        .num_rows = 1,
                                        .width = 1},
                                       Device::kCuda, logits.stream));
    }
    return logits;
  }
  absl::Status CopyBlock(std::int32_t from, std::int32_t to) override { return model_->CopyBlock(from, to); }
  absl::Status Fence() override { return model_->Fence(); }

 private:
  const std::unique_ptr<DecoderModel> model_;
  const int stray_step_;
  int num_steps_ = 0;
};

class GpuEngine {
 public:
  // `stray_step` 0: none.
  explicit GpuEngine(bool runs_ahead, int stray_step = 0)
      : model_(SmallConfig()),
        layout_(WeightLayout::Create(model_.config, StorageFormat::kBf16)),
        weights_(layout_.total_bytes),
        cache_(kNumBlocks * DecoderModel::BlockBytes(model_.config, kBlockTokens, DType::kBf16)) {
    const testing::EncodedWeights encoded(model_.layout, model_.weights->data(), layout_);
    EXPECT_EQ(weights_.Upload(encoded.bytes().data(), layout_.total_bytes), absl::OkStatus());
    DecoderModelOptions options;
    options.device = Device::kCuda;
    options.weight_format = layout_.format;
    options.kv_dtype = DType::kBf16;
    options.block_tokens = kBlockTokens;
    options.num_blocks = kNumBlocks;
    options.max_batch_tokens = 512;
    options.max_sequences = options.max_logit_rows = kMaxSequences;
    workspace_ = std::make_unique<DeviceBytes>(DecoderModel::WorkspaceBytes(model_.config, options));
    options.workspace = workspace_->span();
    auto decoder = DecoderModel::Create(model_.config, layout_, weights_.data(), cache_.span(), options);
    EXPECT_TRUE(decoder.ok()) << decoder.status();
    decoder_ = std::make_unique<StrayModel>(*std::move(decoder), stray_step);
    SamplerOptions sampler_options = {.device = Device::kCuda, .vocab_size = kVocabSize, .max_rows = kMaxSequences};
    sampler_memory_ = std::make_unique<DeviceBytes>(Sampler::WorkspaceBytes(sampler_options));
    sampler_options.workspace = sampler_memory_->span();
    sampler_ = *Sampler::Create(sampler_options);
    EngineOptions engine_options;
    engine_options.num_blocks = kNumBlocks;
    engine_options.block_tokens = kBlockTokens;
    engine_options.max_batch_tokens = 512;
    engine_options.max_sequences = kMaxSequences;
    engine_options.vocab_size = kVocabSize;
    engine_options.device = Device::kCuda;
    engine_options.runs_ahead = runs_ahead;
    engine_ =
        *Engine::Create(engine_options, decoder_.get(), sampler_.get(), FakeTokenizer::Numbered(kVocabSize), metrics_.get());
  }
  Engine* operator->() const { return engine_.get(); }
  std::shared_ptr<RecordingSink> Submit(BatchRequest batch) {
    auto sink = std::make_shared<RecordingSink>();
    EXPECT_EQ(engine_->Submit(std::move(batch), sink), absl::OkStatus());
    return sink;
  }

 private:
  const testing::TinyModel model_;
  const WeightLayout layout_;
  DeviceBytes weights_, cache_;
  std::unique_ptr<DeviceBytes> workspace_, sampler_memory_;
  std::unique_ptr<DecoderModel> decoder_;
  std::unique_ptr<Sampler> sampler_;
  const std::unique_ptr<Metrics> metrics_ = *Metrics::Create("");
  std::unique_ptr<Engine> engine_;
};

// Prompts of 5 to 40 tokens, groups of 3, completions of 20 to 45 tokens.
BatchRequest Unit(std::vector<std::uint32_t> stop_token_ids = {}) {
  BatchRequest unit;
  unit.mode = v1::SCHEDULE_MODE_UNIT;
  for (std::uint32_t i = 0; i < 6; ++i) {
    GroupRequest group;
    group.group_index = i;
    group.group_size = 3;
    group.sampling.max_tokens = 20 + 5 * i;
    group.sampling.seed = 7 + i;
    group.sampling.temperature = i % 3 == 2 ? 0 : 0.8;
    group.sampling.top_p = i % 2 == 0 ? 1 : 0.95;
    group.sampling.stop_token_ids = stop_token_ids;
    std::vector<std::uint32_t> prompt(5 + 7 * i);
    for (std::uint32_t t = 0; t < prompt.size(); ++t) prompt[t] = (t * 31 + i * 17) % kVocabSize;
    group.prompt = std::make_shared<const std::vector<std::uint32_t>>(std::move(prompt));
    group.prompt_kind = "ids";
    unit.groups.push_back(std::move(group));
  }
  return unit;
}

class EngineGpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!HasCudaDevice()) GTEST_SKIP() << "no CUDA device";
  }
};

TEST_F(EngineGpuTest, AheadGivesTheBitsOfStepsInTurn) {
  GpuEngine in_turn(/*runs_ahead=*/false), ahead(/*runs_ahead=*/true);
  const auto expected = in_turn.Submit(Unit());
  ASSERT_EQ(expected->Await(), absl::OkStatus());
  ASSERT_EQ(expected->completions().size(), 18u);
  for (int repeat = 0; repeat < 3; ++repeat) {
    const auto actual = ahead.Submit(Unit());
    ASSERT_EQ(actual->Await(), absl::OkStatus());
    EXPECT_EQ(actual->completions(), expected->completions()) << repeat;
  }
}

TEST_F(EngineGpuTest, NothingFollowsAStopToken) {
  const std::vector<std::uint32_t> stops = {3, 50, 99, 120, 150, 180, 201, 222, 250};
  GpuEngine engine(/*runs_ahead=*/true);
  const auto sink = engine.Submit(Unit(stops));
  ASSERT_EQ(sink->Await(), absl::OkStatus());
  int num_stopped = 0;
  for (const auto& [key, completion] : sink->completions()) {
    const auto stop = std::find_first_of(completion.ids.begin(), completion.ids.end(), stops.begin(), stops.end());
    const bool is_stopped = completion.reason == v1::FINISH_REASON_STOP;
    num_stopped += is_stopped;
    EXPECT_EQ(completion.ids.end() - stop, is_stopped ? 1 : 0) << "group " << key.first << ", member " << key.second;
    EXPECT_EQ(completion.reported_tokens, completion.ids.size());
  }
  EXPECT_GT(num_stopped, 2);
  EXPECT_LT(num_stopped, 18);
}

// Ends the process with 0 if the engine behaves when a kernel of the fifth step has made the context useless.
[[noreturn]] void LoseTheDevice(bool runs_ahead) {
  const auto expect = [](bool is_right, const std::string& what) {
    std::fprintf(stderr, "%s: %s\n", is_right ? "right" : "WRONG", what.c_str());
    if (!is_right) std::_Exit(1);
  };
  GpuEngine engine(runs_ahead, /*stray_step=*/5);
  const auto sink = engine.Submit(Unit());
  for (int tries = 0; engine->error().ok() && tries < 3000; ++tries) absl::SleepFor(absl::Milliseconds(10));
  expect(!engine->error().ok() && !ContextHealth(Device::kCuda).ok(), absl::StrCat("error ", engine->error().ToString()));
  expect(!sink->has_ended(), "the batch has not ended: its stream breaks with the process");
  for (const auto& [key, completion] : sink->completions()) {
    expect(!completion.reason.has_value(), absl::StrCat("completion ", key.first, " ", key.second, " has not ended"));
  }
  const absl::Status yielded = engine->YieldElastic(v1::STREAM_MODE_PAUSE, MonotonicTime::Now() + absl::Seconds(10));
  expect(absl::IsUnavailable(yielded), absl::StrCat("a yield gives ", yielded.ToString()));
  engine->Stop();
  expect(absl::IsUnavailable(sink->Await()), absl::StrCat("the batch ends with ", sink->Await().ToString()));
  std::_Exit(0);
}

TEST_F(EngineGpuTest, ALostDeviceIsUnavailableAndFailsNoSequence) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a process of its own, which may lose its context
  for (const bool runs_ahead : {false, true}) {
    EXPECT_EXIT(LoseTheDevice(runs_ahead), ::testing::ExitedWithCode(0), "right: the batch ends with UNAVAILABLE") << runs_ahead;
  }
}

}  // namespace
}  // namespace tandem

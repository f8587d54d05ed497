// The real model against PyTorch's numbers: log-probs of prompts and greedy tokens, one GRPO step from log-probs to AdamW.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/model/model_source.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "rollout_server/model/decoder_model.h"
#include "tests/support/naive_transformer.h"
#include "trainer_server/advantage/advantage.h"
#include "trainer_server/batch/pack_micro_batches.h"
#include "trainer_server/loss/loss.h"
#include "trainer_server/optim/adamw.h"
#include "trainer_server/policy/policy_model.h"

namespace tandem {
namespace {

using Json = nlohmann::json;
using Ids = std::vector<std::uint32_t>;
using testing::AlignedBytes;
using testing::NaiveTransformer;

struct SmolLm2 {
  ModelConfig config;
  WeightLayout layout;
  std::unique_ptr<AlignedBytes> weights;
};

// Loaded once for all tests.
const SmolLm2& Model() {
  static const SmolLm2* const model = [] {
    auto source = ModelSource::Open(TANDEM_MODELS_DIR "/SmolLM2-135M-Instruct.Q4_1.gguf");
    EXPECT_TRUE(source.ok()) << source.status();
    auto* loaded = new SmolLm2{.config = (*source)->description().config, .layout = {}, .weights = nullptr};
    loaded->layout = WeightLayout::Create(loaded->config, StorageFormat::kFp32);
    loaded->weights = std::make_unique<AlignedBytes>(loaded->layout.total_bytes);
    const absl::Status status =
        (*source)->LoadWeights(loaded->layout, Device::kCpu, loaded->weights->span(), [](std::uint64_t) {});
    EXPECT_TRUE(status.ok()) << status;
    return loaded;
  }();
  return *model;
}

Json Golden(const std::string& name) { return Json::parse(std::ifstream(std::string(TANDEM_GOLDEN_DIR) + "/smollm2/" + name)); }

// One sequence in a cache of its own.
class Sequence {
 public:
  explicit Sequence(const std::vector<AdapterView>& adapters = {})
      : adapters_(adapters), cache_(kBlocks * DecoderModel::BlockBytes(Model().config, kBlockTokens, DType::kFp32)) {
    auto decoder = DecoderModel::Create(Model().config, Model().layout, Model().weights->data(), cache_.span(),
                                        {.block_tokens = kBlockTokens, .num_blocks = kBlocks});
    EXPECT_TRUE(decoder.ok()) << decoder.status();
    decoder_ = *std::move(decoder);
    for (int block = 0; block < kBlocks; ++block) blocks_.push_back(block);
  }

  // Logits of every row.
  std::vector<std::vector<double>> Feed(const Ids& ids) {
    StepBatch batch;
    batch.token_ids = ids;
    for (std::size_t i = 0; i < ids.size(); ++i, ++length_) {
      batch.logit_rows.push_back(static_cast<std::int32_t>(i));
      batch.positions.push_back(length_);
      batch.slot_mapping.push_back(length_);
    }
    batch.cu_query_lens = {0, static_cast<std::int32_t>(ids.size())};
    batch.context_lens = {length_};
    batch.block_tables = {blocks_};
    batch.adapters = adapters_;
    batch.adapter_of = {adapters_.empty() ? -1 : 0};
    const auto logits = decoder_->Run(batch);
    EXPECT_TRUE(logits.ok()) << logits.status();
    std::vector<std::vector<double>> rows;
    for (std::int64_t i = 0; i < logits->num_rows; ++i) rows.emplace_back(logits->row(i).begin(), logits->row(i).end());
    return rows;
  }

 private:
  static constexpr int kBlockTokens = 16, kBlocks = 40;
  const std::vector<AdapterView> adapters_;
  AlignedBytes cache_;
  std::unique_ptr<DecoderModel> decoder_;
  std::vector<std::int32_t> blocks_;
  std::int32_t length_ = 0;
};

TEST(SmolLm2Decoder, LogprobsAndGreedyTokensEqualPyTorchs) {
  const Json golden = Golden("logprobs.json");
  ASSERT_EQ(golden.at("cases").size(), 5u);
  for (const Json& item : golden.at("cases")) {
    SCOPED_TRACE(item.at("name").get<std::string>());
    const Ids prompt = item.at("prompt_ids"), greedy = item.at("greedy_ids");
    const Json& exact = item.at("fp64");
    Sequence sequence;
    auto logits = sequence.Feed(prompt);
    for (std::size_t t = 1; t < prompt.size(); ++t) {
      EXPECT_NEAR(NaiveTransformer::LogProb(logits[t - 1], prompt[t]), exact.at("prompt_logprobs")[t - 1].get<double>(), 1e-3)
          << "prompt token " << t;
    }
    const std::vector<double>& last = logits.back();
    EXPECT_NEAR(*std::max_element(last.begin(), last.end()), exact.at("last_prompt_position").at("logits_max").get<double>(),
                1e-3);
    for (std::size_t t = 0; t < greedy.size(); ++t) {
      const std::vector<double>& row = logits.back();
      const auto likeliest = static_cast<std::uint32_t>(std::max_element(row.begin(), row.end()) - row.begin());
      if (item.at("greedy_margin")[t].get<double>() >= 0.01) { EXPECT_EQ(likeliest, greedy[t]) << "greedy token " << t; }
      EXPECT_NEAR(NaiveTransformer::LogProb(row, greedy[t]), exact.at("greedy_logprobs")[t].get<double>(), 1e-3)
          << "greedy token " << t;
      logits = sequence.Feed({greedy[t]});
    }
  }
}

// ------------------------------------------------------------------------------------------------------------------------ grpo

constexpr int kRank = 8;
constexpr float kScale = 16.f / 8.f;

// The adapters of the golden file: A[i, j] = 0.01 sin(1.7 i + 0.3 j), B zero or 0.05 cos(0.9 i + 0.5 j).
void FillGoldenAdapter(const AdapterLayout& layout, const std::string& b_kind, const AlignedBytes& masters) {
  std::fill(masters.span().begin(), masters.span().end(), std::byte{0});
  for (const AdapterPlace& place : layout.places) {
    float *a = masters.floats(place.a_begin_bytes), *b = masters.floats(place.b_begin_bytes);
    for (int i = 0; i < kRank; ++i) {
      for (int j = 0; j < place.shape.inputs; ++j)
        a[i * place.shape.inputs + j] = static_cast<float>(0.01 * std::sin(1.7 * i + 0.3 * j));
    }
    if (b_kind != "cosine") continue;
    for (int i = 0; i < place.shape.outputs; ++i) {
      for (int j = 0; j < kRank; ++j) b[i * kRank + j] = static_cast<float>(0.05 * std::cos(0.9 * i + 0.5 * j));
    }
  }
}

struct GoldenGroup {
  Ids prompt;
  std::vector<Ids> completions;
  std::vector<std::vector<std::uint8_t>> masks;
  std::vector<double> rewards;
  std::vector<MicroBatch> batches;

  explicit GoldenGroup(const Json& golden) : prompt(golden.at("prompt_ids")), rewards(golden.at("rewards")) {
    for (const Json& ids : golden.at("completion_ids")) {
      completions.push_back(ids.get<Ids>());
      masks.emplace_back(completions.back().size(), std::uint8_t{1});
    }
    GroupToPack group{prompt, {}};
    for (std::size_t i = 0; i < completions.size(); ++i)
      group.completions.push_back({static_cast<std::int32_t>(i), completions[i], masks[i]});
    auto packed = PackMicroBatches({&group, 1}, 4096);
    EXPECT_TRUE(packed.ok()) << packed.status();
    batches = *std::move(packed);
  }

  std::vector<std::vector<double>> Split(const std::vector<double>& rows) const {
    std::vector<std::vector<double>> split;
    auto next = rows.begin();
    for (const Ids& ids : completions) {
      split.emplace_back(next, next + static_cast<std::ptrdiff_t>(ids.size()));
      next += static_cast<std::ptrdiff_t>(ids.size());
    }
    return split;
  }
};

LossOptions OptionsOf(const Json& item) {
  LossOptions options;
  const std::string aggregation = item.at("aggregation");
  options.aggregation = aggregation == "constant"     ? Aggregation::kConstant
                        : aggregation == "token_mean" ? Aggregation::kTokenMean
                                                      : Aggregation::kSequenceMean;
  options.max_completion_length = item.value("l_max", 1.0);
  options.epsilon_low = item.at("epsilon_low");
  options.epsilon_high = item.at("epsilon_high");
  options.beta = item.at("beta");
  return options;
}

// Norm and sums over all layers, by matrix: "q_proj.a".
struct Sums {
  double sum = 0, squares = 0;
};
std::map<std::string, Sums> ByMatrix(const AdapterLayout& layout, const float* values, const float* minus = nullptr) {
  std::map<std::string, Sums> sums;
  for (const AdapterPlace& place : layout.places) {
    const auto add = [&](const std::string& part, std::uint64_t begin_bytes, int columns) {
      Sums& total = sums[LinearKindName(place.kind) + part];
      for (std::uint64_t i = begin_bytes / 4; i < begin_bytes / 4 + static_cast<std::uint64_t>(kRank * columns); ++i) {
        const double value = minus == nullptr ? values[i] : static_cast<double>(values[i]) - static_cast<double>(minus[i]);
        total.sum += value;
        total.squares += value * value;
      }
    };
    add(".a", place.a_begin_bytes, place.shape.inputs);
    add(".b", place.b_begin_bytes, place.shape.outputs);
  }
  return sums;
}

void ExpectRelative(double value, double expected, double tolerance, double floor, const std::string& what) {
  EXPECT_NEAR(value, expected, tolerance * std::abs(expected) + floor) << what;
}

TEST(SmolLm2Policy, OneGrpoStepEqualsPyTorchs) {
  const Json golden = Golden("grpo.json");
  const GoldenGroup group(golden);
  ASSERT_EQ(golden.at("cases").size(), 4u);
  std::vector<LinearKind> all = testing::AllLinearKinds();
  const AdapterLayout layout = AdapterLayout::Create(Model().config, kRank, all);
  AlignedBytes masters(layout.total_bytes), gradients(layout.total_bytes), first(layout.total_bytes), second(layout.total_bytes);
  auto created = PolicyModel::Create(Model().config, Model().layout, Model().weights->data(), {masters.span(), gradients.span()},
                                     {.rank = kRank, .scale = kScale, .targets = all});
  ASSERT_TRUE(created.ok()) << created.status();
  PolicyModel& policy = **created;
  const MicroBatch& batch = group.batches.front();

  for (const Json& item : golden.at("cases")) {
    SCOPED_TRACE(item.at("name").get<std::string>());
    const Json& exact = item.at("fp64");
    FillGoldenAdapter(layout, item.at("b"), masters);
    ASSERT_TRUE(policy.ZeroGradients().ok());

    const auto base = policy.Score(batch, PolicyKind::kReference);
    const auto forward = policy.Forward(batch, false, 0);
    ASSERT_TRUE(base.ok() && forward.ok()) << base.status() << forward.status();
    const auto policy_logprobs = group.Split(forward->logprobs), base_logprobs = group.Split(base->logprobs);
    for (std::size_t i = 0; i < group.completions.size(); ++i) {
      for (std::size_t t = 0; t < group.completions[i].size(); ++t) {
        EXPECT_NEAR(policy_logprobs[i][t], exact.at("policy_logprobs")[i][t].get<double>(), 1e-3);
        EXPECT_NEAR(base_logprobs[i][t], exact.at("base_logprobs")[i][t].get<double>(), 1e-3);
      }
    }

    std::vector<AdvantageSequence> to_rate(group.completions.size());
    for (std::size_t i = 0; i < to_rate.size(); ++i) to_rate[i].rewards = {group.rewards[i]};
    AdvantageOptions advantage_options;
    advantage_options.scale = item.at("scale") == "group" ? AdvantageScale::kGroup : AdvantageScale::kNone;
    const auto rated = ComputeAdvantages(advantage_options, to_rate, static_cast<int>(to_rate.size()));
    ASSERT_TRUE(rated.ok()) << rated.status();
    std::vector<LossSequence> sequences(group.completions.size());
    std::vector<std::vector<double>> old;
    if (item.at("old") == "given") old = item.at("old_logprobs").get<std::vector<std::vector<double>>>();
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      ExpectRelative(rated->advantages[i].front(), exact.at("advantages")[i], 1e-6, 0, "advantage");
      sequences[i].policy_logprobs = policy_logprobs[i];
      if (!old.empty()) sequences[i].old_logprobs = old[i];
      sequences[i].ref_logprobs = base_logprobs[i];
      sequences[i].loss_mask = group.masks[i];
      sequences[i].advantages = rated->advantages[i];
    }
    const LossOptions options = OptionsOf(item);
    const auto loss = EvaluateLoss(options, ComputeStepTotals(options, sequences, 1), sequences);
    ASSERT_TRUE(loss.ok()) << loss.status();
    ExpectRelative(loss->loss, exact.at("loss"), 1e-3, 1e-6, "loss");

    std::vector<double> grad_logprobs;
    for (const auto& row : loss->grad_logprobs) grad_logprobs.insert(grad_logprobs.end(), row.begin(), row.end());
    const absl::Status backward = policy.Backward(grad_logprobs, {});
    ASSERT_TRUE(backward.ok()) << backward;
    for (const auto& [name, sums] : ByMatrix(layout, gradients.floats())) {
      ExpectRelative(std::sqrt(sums.squares), exact.at("grad_norm_by_type").at(name), 1e-3, 1e-9, "gradient norm of " + name);
    }
    for (const auto& [name, samples] : exact.at("grad_samples").items()) {
      for (const AdapterPlace& place : layout.places) {
        const std::string prefix = "layer" + std::to_string(place.layer) + "." + LinearKindName(place.kind);
        for (const auto& [part, begin, columns] : {std::tuple{".a", place.a_begin_bytes, place.shape.inputs},
                                                   std::tuple{".b", place.b_begin_bytes, place.shape.outputs}}) {
          if (name != prefix + part) continue;
          double rms = 0;  // of the matrix: an element that nearly cancels is right to a share of it
          for (int i = 0; i < kRank * columns; ++i)
            rms += std::pow(static_cast<double>(gradients.floats(begin)[i]), 2) / (kRank * columns);
          for (std::size_t i = 0; i < samples.size(); ++i) {
            ExpectRelative(gradients.floats(begin)[i], samples[i], 1e-3, 2e-3 * std::sqrt(rms) + 1e-12, name);
          }
        }
      }
    }

    const Json& adamw = golden.at("adamw");
    const AdamWOptions optimizer{.beta1 = adamw.at("beta1"),
                                 .beta2 = adamw.at("beta2"),
                                 .epsilon = adamw.at("eps"),
                                 .weight_decay = adamw.at("weight_decay"),
                                 .max_grad_norm = adamw.at("max_grad_norm")};
    const std::size_t size = layout.total_bytes / sizeof(float);
    const std::vector<float> before(masters.floats(), masters.floats() + size);
    std::fill(first.span().begin(), first.span().end(), std::byte{0});
    std::fill(second.span().begin(), second.span().end(), std::byte{0});
    const auto report = AdamWStep(optimizer, adamw.at("lr"), 1, {masters.floats(), size}, {gradients.floats(), size},
                                  {first.floats(), size}, {second.floats(), size});
    ASSERT_TRUE(report.ok()) << report.status();
    ExpectRelative(report->grad_norm, exact.at("grad_norm"), 1e-3, 0, "gradient norm");
    // In fp32 as here: weight decay alone moves A by less than its rounding where its gradient is zero.
    const auto moved = ByMatrix(layout, masters.floats(), before.data());
    for (const auto& [name, sums] : ByMatrix(layout, masters.floats())) {
      const Json& after = item.at("fp32").at("after_step").at(name);
      ExpectRelative(sums.sum, after.at("sum"), 1e-3, 1e-3, "sum of " + name);  // signed: it cancels
      ExpectRelative(sums.squares, after.at("sum_of_squares"), 1e-3, 0, "squares of " + name);
      ExpectRelative(std::sqrt(moved.at(name).squares), after.at("moved_l2"), 1e-3, 0, "movement of " + name);
    }
    const auto scored = policy.Score(batch, PolicyKind::kPolicy);
    ASSERT_TRUE(scored.ok());
    const auto after = group.Split(scored->logprobs);
    for (std::size_t i = 0; i < after.size(); ++i) {
      double sum = 0;
      for (const double logprob : after[i]) sum += logprob;
      ExpectRelative(sum, exact.at("policy_logprob_sums_after_step")[i], 1e-3, 0, "log-prob sum after the step");
    }
  }
}

TEST(SmolLm2Policy, ATokensRolloutLogprobEqualsTheTrainers) {
  const GoldenGroup group(Golden("grpo.json"));
  const AdapterLayout layout = AdapterLayout::Create(Model().config, kRank, testing::AllLinearKinds());
  AlignedBytes masters(layout.total_bytes), gradients(layout.total_bytes);
  FillGoldenAdapter(layout, "cosine", masters);
  auto policy = PolicyModel::Create(Model().config, Model().layout, Model().weights->data(), {masters.span(), gradients.span()},
                                    {.rank = kRank, .scale = kScale, .targets = testing::AllLinearKinds()});
  ASSERT_TRUE(policy.ok()) << policy.status();
  const auto scores = (*policy)->Score(group.batches.front(), PolicyKind::kPolicy);
  ASSERT_TRUE(scores.ok()) << scores.status();
  const auto logprobs = group.Split(scores->logprobs);
  for (std::size_t i = 0; i < group.completions.size(); ++i) {
    Sequence sequence({{masters.data(), &layout, kScale}});
    auto logits = sequence.Feed(group.prompt);
    for (std::size_t t = 0; t < group.completions[i].size(); ++t) {
      EXPECT_NEAR(NaiveTransformer::LogProb(logits.back(), group.completions[i][t]), logprobs[i][t], 1e-4);
      logits = sequence.Feed({group.completions[i][t]});
    }
  }
}

}  // namespace
}  // namespace tandem

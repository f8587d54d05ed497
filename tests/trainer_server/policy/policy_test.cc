#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "common/model/kv_scale_table.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "rollout_server/model/decoder_model.h"
#include "tests/support/naive_transformer.h"
#include "tests/trainer_server/support/packed_groups.h"
#include "trainer_server/policy/cpu_backend.h"
#include "trainer_server/policy/policy_model.h"
#include "trainer_server/policy/policy_network.h"

namespace tandem {
namespace {

using testing::AlignedBytes;
using testing::AllLayers;
using testing::Group;
using ::testing::HasSubstr;
using testing::Ids;
using testing::NaiveTransformer;
using testing::Pack;
using testing::RandomIds;
using testing::RelativeError;
using testing::RowGradients;
using testing::TinyAdapter;
using testing::TinyModel;
using testing::TwoGroups;

// A policy with its memory. The adapter starts with the values of `start` unless that is null.
struct Policy {
  AdapterLayout layout;
  AlignedBytes masters, gradients;
  std::unique_ptr<PolicyModel> model;

  Policy(const TinyModel& base, const PolicyOptions& options, const TinyAdapter* start = nullptr)
      : layout(AdapterLayout::Create(base.config, options.rank, options.targets)),
        masters(layout.total_bytes),
        gradients(layout.total_bytes) {
    auto created =
        PolicyModel::Create(base.config, base.layout, base.weights->data(), {masters.span(), gradients.span()}, options);
    EXPECT_TRUE(created.ok()) << created.status();
    model = *std::move(created);
    if (start == nullptr) {
      EXPECT_TRUE(model->InitializeAdapters(7).ok());
    } else {
      std::memcpy(masters.data(), start->slot->data(), layout.total_bytes);
    }
  }
  std::vector<double> Gradients() const {
    const float* values = gradients.floats();
    return {values, values + layout.total_bytes / sizeof(float)};
  }
  HeadScores Score(const MicroBatch& batch, PolicyKind kind = PolicyKind::kPolicy) {
    auto scores = model->Score(batch, kind);
    EXPECT_TRUE(scores.ok()) << scores.status();
    return *std::move(scores);
  }
};

std::vector<double> GradientOf(Policy& policy, const std::vector<MicroBatch>& batches, bool with_entropy = true) {
  EXPECT_TRUE(policy.model->ZeroGradients().ok());
  for (const MicroBatch& batch : batches) {
    EXPECT_TRUE(policy.model->Forward(batch, with_entropy, 0).ok());
    const std::vector<double> entropies = with_entropy ? RowGradients(batch, 2) : std::vector<double>();
    EXPECT_TRUE(policy.model->Backward(RowGradients(batch, 1), entropies).ok());
  }
  return policy.Gradients();
}

TEST(Policy, ScoresEqualTheNaiveTransformer) {
  for (const ModelConfig& config : testing::FamilyConfigs()) {
    SCOPED_TRACE(config.family);
    const TinyModel base(config);
    const TinyAdapter adapter(base.config, 4, testing::AllLinearKinds(), 0.5f, 3);
    PolicyOptions options = AllLayers();
    options.temperature = 0.7;
    Policy policy(base, options, &adapter);
    const auto groups = TwoGroups();
    const HeadScores scores = policy.Score(Pack(groups).front());
    std::size_t row = 0;
    for (const Group& group : groups) {
      for (const Ids& completion : group.completions) {
        Ids whole = group.prompt;
        whole.insert(whole.end(), completion.begin(), completion.end());
        auto logits = NaiveTransformer(base, &adapter).Logits(whole);
        for (std::size_t t = 0; t < completion.size(); ++t, ++row) {
          auto& z = logits[group.prompt.size() + t - 1];
          for (double& value : z) value /= 0.7;
          EXPECT_NEAR(scores.logprobs[row], NaiveTransformer::LogProb(z, completion[t]), 1e-4);
          double entropy = 0;
          for (std::uint32_t j = 0; j < z.size(); ++j) {
            const double logprob = NaiveTransformer::LogProb(z, j);
            entropy -= std::exp(logprob) * logprob;
          }
          EXPECT_NEAR(scores.entropies[row], entropy, 1e-4);
        }
      }
    }
    EXPECT_EQ(row, scores.logprobs.size());
  }
}

// A token's rollout log-prob equals the trainer's: the decoder's logits, fed token by token, against one packed pass.
TEST(Policy, ATokensRolloutLogprobEqualsTheTrainers) {
  const TinyModel base;
  const TinyAdapter adapter(base.config, 4, testing::AllLinearKinds(), 0.5f, 3);
  Policy policy(base, AllLayers(), &adapter);
  const auto groups = TwoGroups();
  const HeadScores scores = policy.Score(Pack(groups).front());
  std::size_t row = 0;
  for (const Group& group : groups) {
    for (const Ids& completion : group.completions) {
      AlignedBytes cache(16 * DecoderModel::BlockBytes(base.config, 16, DType::kFp32));
      const auto decoder = DecoderModel::Create(base.config, base.layout, base.weights->data(), cache.span(),
                                                {.block_tokens = 16, .num_blocks = 16});
      ASSERT_TRUE(decoder.ok());
      Ids next = group.prompt;
      std::int32_t length = 0;
      for (const std::uint32_t token : completion) {
        StepBatch batch;
        batch.token_ids = next;
        for (std::size_t i = 0; i < next.size(); ++i, ++length) {
          batch.positions.push_back(length);
          batch.slot_mapping.push_back(length);
        }
        batch.cu_query_lens = {0, static_cast<std::int32_t>(next.size())};
        batch.context_lens = {length};
        batch.block_tables = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}};
        batch.logit_rows = {static_cast<std::int32_t>(next.size()) - 1};
        batch.adapter_of = {0};
        batch.adapters = {{adapter.slot->data(), &adapter.layout, adapter.scale}};
        const auto logits = (*decoder)->Run(batch);
        ASSERT_TRUE(logits.ok()) << logits.status();
        const std::vector<double> z(logits->row(0).begin(), logits->row(0).end());
        EXPECT_NEAR(NaiveTransformer::LogProb(z, token), scores.logprobs[row++], 1e-4);
        next = {token};
      }
    }
  }
}

TEST(Policy, ForwardGivesTheBitsOfScore) {
  const TinyModel base;
  const TinyAdapter adapter(base.config, 4, testing::AllLinearKinds(), 0.5f, 3);
  Policy policy(base, AllLayers(), &adapter);
  const MicroBatch batch = Pack(TwoGroups()).front();
  const HeadScores scores = policy.Score(batch);
  for (const bool with_entropy : {false, true}) {
    const auto forward = policy.model->Forward(batch, with_entropy, 0);
    ASSERT_TRUE(forward.ok());
    EXPECT_EQ(forward->logprobs, scores.logprobs);
    EXPECT_EQ(forward->entropies, scores.entropies);
  }
}

// CASES C15: scoring never drops; before the first update the ratio is exactly 1 and the KL to the reference exactly 0.
TEST(Policy, ScoringRunsWithoutDropout) {
  const TinyModel base;
  PolicyOptions options = AllLayers();
  options.dropout = 0.5;
  Policy fresh(base, options);
  const MicroBatch batch = Pack(TwoGroups()).front();
  EXPECT_EQ(fresh.Score(batch).logprobs, fresh.Score(batch, PolicyKind::kReference).logprobs);
  const auto forward = fresh.model->Forward(batch, false, 5);
  ASSERT_TRUE(forward.ok());
  EXPECT_EQ(forward->logprobs, fresh.Score(batch).logprobs);

  // With B trained, dropout moves the forward pass by its stream and leaves the scores alone.
  const TinyAdapter adapter(base.config, 4, testing::AllLinearKinds(), 0.5f, 3);
  Policy trained(base, options, &adapter), without(base, AllLayers(), &adapter);
  EXPECT_EQ(trained.Score(batch).logprobs, without.Score(batch).logprobs);
  const auto first = trained.model->Forward(batch, false, 5), other = trained.model->Forward(batch, false, 6),
             again = trained.model->Forward(batch, false, 5);
  ASSERT_TRUE(first.ok() && other.ok() && again.ok());
  EXPECT_EQ(first->logprobs, again->logprobs);
  EXPECT_NE(first->logprobs, other->logprobs);
  EXPECT_NE(first->logprobs, trained.Score(batch).logprobs);
}

TEST(Policy, TheStartingAdapterIsTheReference) {
  const TinyModel base;
  const TinyAdapter start(base.config, 3, {LinearKind::kQProj, LinearKind::kDownProj}, 0.5f, 3),
      now(base.config, 4, testing::AllLinearKinds(), 1.f, 4);
  Policy policy(base, AllLayers(4, 1.f), &now),
      as_policy(base, {.rank = 3, .scale = 0.5f, .targets = {LinearKind::kQProj, LinearKind::kDownProj}}, &start);
  const MicroBatch batch = Pack(TwoGroups()).front();
  ASSERT_TRUE(policy.model->SetReference(start.slot->span(), start.layout, start.scale).ok());
  EXPECT_EQ(policy.Score(batch, PolicyKind::kReference).logprobs, as_policy.Score(batch).logprobs);
  EXPECT_NE(policy.Score(batch).logprobs, as_policy.Score(batch).logprobs);
  EXPECT_EQ(policy.model->SetReference(start.slot->span().first(64), start.layout, 1.f).code(),
            absl::StatusCode::kInvalidArgument);
}

// CASES C16: head and embedding are one tensor in the pool.
TEST(Policy, ATiedEmbeddingRowWrittenInThePoolChangesThatTokensLogprobAtOnce) {
  const TinyModel base;
  Policy policy(base, AllLayers());
  const MicroBatch batch = Pack({{{1, 2, 3}, {{77}}}}).front();
  const double before = policy.Score(batch).logprobs[0];
  float* row = base.Weight(base.layout.embedding) + 77 * 64;
  for (int i = 0; i < 64; ++i) row[i] += 1;
  const double after = policy.Score(batch).logprobs[0];
  EXPECT_GT(std::abs(after - before), 1e-3);
  EXPECT_NEAR(after, NaiveTransformer::LogProb(NaiveTransformer(base).Logits(Ids{1, 2, 3}).back(), 77), 1e-4);
}

// CASES C17: x, A and B of ones, rank 8, alpha 16: 64 is added to each output.
TEST(Policy, AdapterScaleIsAlphaOverRank) {
  const testing::OnesModel ones;
  Policy policy(*ones.model, {.rank = 8, .scale = 16.f / 8.f, .targets = {LinearKind::kOProj}}, ones.adapter.get());
  const MicroBatch batch = Pack({{{0}, {{0}}}, {{0}, {{1}}}}).front();
  const HeadScores scores = policy.Score(batch);
  // Logits are (2 + added, added, added, added) / rms: their difference tells what was added.
  const double added = 64, rms = std::sqrt(((2 + added) * (2 + added) + 3 * added * added) / 4);
  EXPECT_NEAR((scores.logprobs[0] - scores.logprobs[1]) / (2 / rms), 1, 1e-3);
}

// CASES C19, C18: one step cut into 1, 2, 4 or 7 micro-batches gives one gradient.
TEST(Policy, GradientsDoNotDependOnTheCutIntoMicroBatches) {
  const TinyModel base;
  const TinyAdapter adapter(base.config, 4, testing::AllLinearKinds(), 0.5f, 3);
  Policy policy(base, AllLayers(), &adapter);
  std::vector<Group> groups;
  for (std::uint64_t g = 0; g < 7; ++g) {
    groups.push_back({RandomIds(10 + g, 6 + g), {}});
    for (std::uint64_t c = 0; c < 4; ++c)
      groups.back().completions.push_back(RandomIds(100 + 10 * g + c, 1 + (3 * g + 5 * c) % 11));
  }
  const std::vector<MicroBatch> whole = Pack(groups);
  ASSERT_EQ(whole.size(), 1u);
  const std::vector<double> expected = GradientOf(policy, whole);
  std::vector<std::size_t> cuts;
  for (const std::int64_t max_tokens : {33, 45, 70, 140, 250}) {
    const std::vector<MicroBatch> batches = Pack(groups, max_tokens);
    cuts.push_back(batches.size());
    EXPECT_LT(RelativeError(GradientOf(policy, batches), expected), 1e-6) << batches.size() << " micro-batches";
  }
  EXPECT_THAT(cuts, ::testing::IsSupersetOf({2u, 4u, 7u}));
}

// CASES C25: a sequence alone, first, between and last in a pack, beside a long one, with rows after the end.
TEST(Policy, NeighboursInThePackDoNotMatter) {
  const TinyModel base;
  const TinyAdapter adapter(base.config, 4, testing::AllLinearKinds(), 0.5f, 3);
  Policy policy(base, AllLayers(), &adapter);
  const Group mine{RandomIds(1, 9), {RandomIds(2, 5)}}, small{RandomIds(3, 4), {RandomIds(4, 7), RandomIds(5, 1)}},
      large{RandomIds(6, 1100), {RandomIds(7, 30)}};
  const std::vector<double> alone = policy.Score(Pack({mine}).front()).logprobs;
  const auto check = [&](MicroBatch batch, std::size_t first, const char* where) {
    const std::vector<double> scores = policy.Score(batch).logprobs;
    for (std::size_t t = 0; t < alone.size(); ++t) EXPECT_NEAR(scores[first + t], alone[t], 1e-5) << where;
    ASSERT_TRUE(policy.model->ZeroGradients().ok());
    ASSERT_TRUE(policy.model->Forward(batch, false, 0).ok());
    ASSERT_TRUE(policy.model->Backward(std::vector<double>(batch.head_rows.size(), 0.5), {}).ok());
    for (const double gradient : policy.Gradients()) ASSERT_TRUE(std::isfinite(gradient)) << where;
  };
  check(Pack({mine, small}).front(), 0, "first");
  check(Pack({small, mine, small}).front(), 8, "between");
  check(Pack({small, mine}).front(), 8, "last");
  check(Pack({large, mine}).front(), 30, "beside a long one");
  for (const int extra : {1, 17, 64}) {
    MicroBatch batch = Pack({small, mine}).front();
    batch.token_ids.resize(batch.token_ids.size() + static_cast<std::size_t>(extra), 3);
    batch.positions.resize(batch.token_ids.size(), 0);
    check(batch, 8, "rows after the end");
  }
}

TEST(Policy, RowsThatNobodyTrainsHaveNoGradient) {
  const TinyModel base;
  Policy policy(base, AllLayers());
  const MicroBatch batch = Pack(TwoGroups()).front();
  ASSERT_TRUE(policy.model->Forward(batch, false, 0).ok());
  ASSERT_TRUE(policy.model->Backward(std::vector<double>(batch.head_rows.size(), 0.0), {}).ok());
  for (const double gradient : policy.Gradients()) EXPECT_EQ(gradient, 0);
}

TEST(Policy, RepeatsBitForBit) {
  const TinyModel base;
  const TinyAdapter adapter(base.config, 4, testing::AllLinearKinds(), 0.5f, 3);
  PolicyOptions options = AllLayers();
  options.dropout = 0.25;
  Policy first(base, options, &adapter), second(base, options, &adapter);
  const std::vector<MicroBatch> batches = Pack(TwoGroups(), 200);
  EXPECT_EQ(GradientOf(first, batches), GradientOf(second, batches));
  EXPECT_EQ(GradientOf(first, batches, false), GradientOf(first, batches, false));
}

TEST(Policy, InitialisesAUniformlyAndBWithZero) {
  const TinyModel base;
  Policy policy(base, AllLayers(8));
  double largest = 0;
  for (const AdapterPlace& place : policy.layout.places) {
    const double bound = 1 / std::sqrt(static_cast<double>(place.shape.inputs));
    for (int i = 0; i < 8 * place.shape.inputs; ++i) {
      const double a = policy.masters.floats(place.a_begin_bytes)[i];
      EXPECT_LE(std::abs(a), bound);
      largest = std::max(largest, std::abs(a) / bound);
    }
    for (int i = 0; i < 8 * place.shape.outputs; ++i) EXPECT_EQ(policy.masters.floats(place.b_begin_bytes)[i], 0.f);
  }
  EXPECT_GT(largest, 0.99);
  Policy again(base, AllLayers(8));
  EXPECT_EQ(std::memcmp(policy.masters.data(), again.masters.data(), policy.layout.total_bytes), 0);
}

TEST(Policy, RefusesWhatItCannotRun) {
  const TinyModel base;
  Policy policy(base, AllLayers());
  const MicroBatch good = Pack(TwoGroups()).front();
  EXPECT_EQ(policy.model->Backward({}, {}).code(), absl::StatusCode::kFailedPrecondition);
  const auto expect_refused = [&](const auto& change, const std::string& words) {
    MicroBatch batch = good;
    change(&batch);
    EXPECT_THAT(std::string(policy.model->Score(batch, PolicyKind::kPolicy).status().message()), HasSubstr(words));
    EXPECT_EQ(policy.model->Forward(batch, false, 0).status().code(), absl::StatusCode::kInvalidArgument);
  };
  expect_refused([](MicroBatch* b) { b->token_ids[2] = 128; }, "token id 128 of row 2");
  expect_refused([](MicroBatch* b) { b->positions[0] = 2048; }, "position 2048");
  expect_refused([](MicroBatch* b) { b->head_rows[0] = 10000; }, "head row 10000");
  expect_refused([](MicroBatch* b) { b->head_targets[0] = -1; }, "target -1");
  expect_refused([](MicroBatch* b) { b->completions[0].end = 10000; }, "completion rows [9, 10000)");
  ASSERT_TRUE(policy.model->Forward(good, false, 0).ok());
  EXPECT_THAT(std::string(policy.model->Backward(std::vector<double>(3), {}).message()),
              HasSubstr("3 log-prob and 0 entropy gradients"));
  const std::vector<double> row_values(good.head_rows.size());
  EXPECT_EQ(policy.model->Backward(row_values, row_values).code(), absl::StatusCode::kFailedPrecondition);

  AlignedBytes small(64);
  EXPECT_EQ(PolicyModel::Create(base.config, base.layout, base.weights->data(), {small.span(), small.span()}, AllLayers())
                .status()
                .code(),
            absl::StatusCode::kInvalidArgument);
  PolicyOptions options = AllLayers();
  options.dropout = 1;
  EXPECT_EQ(PolicyModel::Create(base.config, base.layout, base.weights->data(), {policy.masters.span(), policy.gradients.span()},
                                options)
                .status()
                .code(),
            absl::StatusCode::kInvalidArgument);

  AlignedBytes kv_scales(KvScaleTable::Bytes(base.config));
  const auto beside_a_cache = [&] {
    return PolicyModel::Create(base.config, base.layout, base.weights->data(), {policy.masters.span(), policy.gradients.span()},
                               AllLayers(), {.device = Device::kCpu, .kv_scales = kv_scales.span()})
        .status();
  };
  EXPECT_EQ(beside_a_cache(), absl::OkStatus());
  KvScaleTable table(base.config, base.layout.digest, Device::kCpu, kv_scales.span());
  for (int layer = 0; layer < base.config.num_layers; ++layer) {
    std::fill_n(table.layer(layer), 2 * base.config.num_kv_heads, 1.f);
  }
  ASSERT_EQ(table.Set(), absl::OkStatus());
  EXPECT_EQ(beside_a_cache().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(beside_a_cache().message()), HasSubstr("KV cache is in fp8"));
}

// ------------------------------------------------------------------------------------------------- float64, finite differences

// The tiny model and an adapter in double.
struct DoublePolicy {
  std::vector<double> weights, adapter, gradients;
  LoraSet<double> lora;
  std::unique_ptr<PolicyNetwork<CpuBackend<double>>> network;

  DoublePolicy(const TinyModel& base, const TinyAdapter& start, double temperature) {
    const auto widen = [](const AlignedBytes& bytes) {
      return std::vector<double>(bytes.floats(), bytes.floats() + bytes.span().size() / sizeof(float));
    };
    weights = widen(*base.weights);
    adapter = widen(*start.slot);
    gradients.resize(adapter.size());
    const auto at = [&](const TensorPlace& place) { return weights.data() + place.begin_bytes / sizeof(float); };
    NetworkWeights<double> views;
    views.embedding = at(base.layout.embedding);
    for (const LayerPlaces& p : base.layout.layers) {
      const auto optional = [&](const std::optional<TensorPlace>& place) { return place.has_value() ? at(*place) : nullptr; };
      views.layers.push_back({.input_norm = at(p.input_norm),
                              .qkv = at(p.qkv),
                              .after_qkv = {optional(p.qkv_bias), optional(p.q_norm), optional(p.k_norm)},
                              .o = at(p.o),
                              .post_norm = at(p.post_norm),
                              .gate_up = at(p.gate_up),
                              .down = at(p.down)});
    }
    views.final_norm = at(base.layout.final_norm);
    views.head = at(base.layout.head);
    lora.rank = start.layout.rank;
    lora.scale = static_cast<double>(start.scale);
    lora.layers.resize(base.layout.layers.size());
    for (const AdapterPlace& place : start.layout.places) {
      const std::uint64_t a = place.a_begin_bytes / sizeof(float), b = place.b_begin_bytes / sizeof(float);
      lora.layers[static_cast<std::size_t>(place.layer)][static_cast<std::size_t>(place.kind)] = {&adapter[a], &adapter[b],
                                                                                                  &gradients[a], &gradients[b]};
    }
    LinearHead<double> head;
    head.weight = views.head;
    head.vocab_size = base.config.vocab_size;
    head.width = base.config.hidden_size;
    head.temperature = temperature;
    network = std::make_unique<PolicyNetwork<CpuBackend<double>>>(base.config, views, CpuBackend<double>(base.config, head));
  }
};

void CheckFiniteDifferences(const LoraDropout& dropout, bool with_entropy, const ModelConfig& config = testing::TinyConfig()) {
  const TinyModel base(config);
  const TinyAdapter start(base.config, 2, testing::AllLinearKinds(), 0.5f, 3);
  DoublePolicy policy(base, start, 0.8);
  const MicroBatch batch = Pack(TwoGroups()).front();
  const std::vector<double> g = RowGradients(batch, 1), e = with_entropy ? RowGradients(batch, 2) : std::vector<double>();
  const auto objective = [&] {
    const LinearLogprobs out = policy.network->Forward(batch, policy.lora, dropout, with_entropy);
    double sum = 0;
    for (std::size_t n = 0; n < g.size(); ++n) sum += g[n] * out.logprobs[n] + (with_entropy ? e[n] * out.entropies[n] : 0);
    return sum;
  };
  objective();
  policy.network->Backward(g, e);
  double largest = 0;
  for (const double gradient : policy.gradients) largest = std::max(largest, std::abs(gradient));
  ASSERT_GT(largest, 0.01);
  int checked = 0;
  for (const AdapterPlace& place : start.layout.places) {
    for (const auto& [begin, size] : {std::pair{place.a_begin_bytes / 4, 2 * place.shape.inputs},
                                      std::pair{place.b_begin_bytes / 4, 2 * place.shape.outputs}}) {
      for (int i = place.layer; i < size; i += 101) {
        const std::size_t at = begin + static_cast<std::size_t>(i);
        const double h = 1e-5, kept = policy.adapter[at];
        policy.adapter[at] = kept + h;
        const double above = objective();
        policy.adapter[at] = kept - h;
        const double below = objective();
        policy.adapter[at] = kept;
        EXPECT_NEAR((above - below) / (2 * h), policy.gradients[at], 1e-7 * largest + 1e-7 * std::abs(policy.gradients[at]))
            << LinearKindName(place.kind) << " layer " << place.layer << " element " << i;
        ++checked;
      }
    }
  }
  EXPECT_GT(checked, 50);
}

TEST(PolicyInDouble, GradientsEqualFiniteDifferences) { CheckFiniteDifferences({}, false); }
TEST(PolicyInDouble, GradientsWithEntropyBonusEqualFiniteDifferences) { CheckFiniteDifferences({}, true); }
TEST(PolicyInDouble, GradientsUnderDropoutEqualFiniteDifferences) {
  CheckFiniteDifferences({.probability = 0.3, .stream = 9}, false);
}

TEST(PolicyInDouble, GradientsThroughBiasAndHeadNormsEqualFiniteDifferences) {
  ModelConfig config = testing::TinyConfig();
  config.has_qkv_bias = config.has_qk_norm = true;
  CheckFiniteDifferences({}, false, config);
}

TEST(PolicyInDouble, TheFloatPolicyHasTheSameGradient) {
  for (const ModelConfig& config : testing::FamilyConfigs()) {
    SCOPED_TRACE(config.family);
    const TinyModel base(config);
    const TinyAdapter start(base.config, 4, testing::AllLinearKinds(), 0.5f, 3);
    Policy policy(base, AllLayers(), &start);
    DoublePolicy exact(base, start, 1);
    const MicroBatch batch = Pack(TwoGroups()).front();
    exact.network->Forward(batch, exact.lora, {}, true);
    exact.network->Backward(RowGradients(batch, 1), RowGradients(batch, 2));
    EXPECT_LT(RelativeError(GradientOf(policy, {batch}), exact.gradients), 2e-6);
  }
}

}  // namespace
}  // namespace tandem

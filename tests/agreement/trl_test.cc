// Does Tandem compute what TRL computes? For each case of tests/golden/trl (tools/compare_with_trl.py): the GRPOConfig becomes a
// job as `tandem import-trl` makes it (RLOO's cases bring the job's fields); the trainer's own advantages, loss and policy then
// give TRL's numbers within 1e-5 of the largest of them.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "client/trl_config.h"
#include "common/model/safetensors.h"
#include "gmock/gmock.h"
#include "google/protobuf/text_format.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/support/family_golden.h"
#include "trainer_server/advantage/advantage.h"
#include "trainer_server/batch/pack_micro_batches.h"
#include "trainer_server/loss/loss.h"
#include "trainer_server/loss/loss_config.h"
#include "trainer_server/policy/policy_model.h"

namespace tandem {
namespace {

using testing::AlignedBytes;
using Json = nlohmann::json;

constexpr double kTolerance = 1e-5;
// Weights that are a product over a sequence gather the rounding of all its log-probs: VESPO's phi, a power of it, and RLOO's
// ratio, for which TRL subtracts sums in fp32.
constexpr double kProductTolerance = 5e-5;

// One completion's arrays, as StepDriver keeps them.
struct Sequence {
  std::vector<std::uint32_t> prompt, completion;
  bool is_truncated = false;
  std::vector<std::uint8_t> loss_mask;
  std::vector<double> rollout_logprobs, old_logprobs, ref_logprobs, policy_logprobs, entropies, advantages;
};

struct Step {
  std::vector<Sequence> sequences;
  std::vector<MicroBatch> micro_batches;
};

class TrlTest : public ::testing::Test {
 protected:
  TrlTest() : golden_(testing::LoadFamilyGolden("qwen3")) {
    std::ifstream file(TANDEM_GOLDEN_DIR "/trl/cases.json");
    document_ = Json::parse(file);
    auto tensors = SafetensorsFile::Open(TANDEM_GOLDEN_DIR "/trl/tensors.safetensors");
    EXPECT_TRUE(tensors.ok()) << tensors.status();
    tensors_.emplace(*std::move(tensors));
    const int rank = document_["rank"];
    layout_ = AdapterLayout::Create(golden_.config, rank, testing::AllLinearKinds());
    masters_ = std::make_unique<AlignedBytes>(layout_.total_bytes);
    gradients_ = std::make_unique<AlignedBytes>(layout_.total_bytes);
  }

  std::vector<float> Tensor(const std::string& name) {
    const SafetensorsTensor* tensor = tensors_->Find(name);
    EXPECT_NE(tensor, nullptr) << name;
    std::vector<float> values(tensor->size_bytes / sizeof(float));
    EXPECT_TRUE(tensors_->file().ReadAt(tensor->begin_bytes, std::as_writable_bytes(std::span(values))).ok());
    EXPECT_EQ(values.size(), layout_.num_parameters);
    return values;
  }
  // Visits the adapter's elements in the tensors' order: layers, their linears, A then B.
  template <typename Visit>
  void VisitFactors(const Visit& visit) const {
    const auto rank = static_cast<std::size_t>(layout_.rank);
    for (const AdapterPlace& place : layout_.places) {
      visit(place.a_begin_bytes, rank * static_cast<std::size_t>(place.shape.inputs));
      visit(place.b_begin_bytes, rank * static_cast<std::size_t>(place.shape.outputs));
    }
  }
  void SetAdapter(const std::string& name) {
    const std::vector<float> values = Tensor(name);
    std::size_t begin = 0;
    VisitFactors([&](std::uint64_t place, std::size_t count) {
      std::memcpy(masters_->data() + place, values.data() + begin, count * sizeof(float));
      begin += count;
    });
  }
  std::vector<double> Gradient() const {
    std::vector<double> values;
    VisitFactors([&](std::uint64_t place, std::size_t count) {
      const float* const first = gradients_->floats() + place / sizeof(float);
      values.insert(values.end(), first, first + count);
    });
    return values;
  }
  std::unique_ptr<PolicyModel> MakePolicy(double temperature) {
    PolicyOptions options{.rank = layout_.rank, .scale = document_["alpha"], .targets = layout_.targets};
    options.scale /= static_cast<float>(layout_.rank);
    options.temperature = temperature;
    auto policy = PolicyModel::Create(golden_.config, golden_.layout, golden_.weights->data(),
                                      {masters_->span(), gradients_->span()}, options);
    EXPECT_TRUE(policy.ok()) << policy.status();
    return *std::move(policy);
  }

  // In micro-batches of so many completions, where a case accumulates them.
  Step MakeStep(const LossOptions& loss, std::size_t completions_each) {
    Step step;
    for (std::size_t i = 0; i < document_["rollouts"].size(); ++i) {
      const Json& rollout = document_["rollouts"][i];
      Sequence sequence;
      rollout["prompt"].get_to(sequence.prompt);
      rollout["completion"].get_to(sequence.completion);
      rollout["is_truncated"].get_to(sequence.is_truncated);
      document_["rollout_logprobs"][i].get_to(sequence.rollout_logprobs);
      sequence.loss_mask = LossMaskFromLength(loss, sequence.completion.size(), sequence.is_truncated);
      step.sequences.push_back(std::move(sequence));
    }
    for (std::size_t begin = 0; begin < step.sequences.size(); begin += completions_each) {
      std::vector<GroupToPack> groups;
      for (std::size_t i = begin; i < begin + completions_each; ++i) {
        const Sequence& sequence = step.sequences[i];
        const bool is_same_group = i > begin && step.sequences[i - 1].prompt == sequence.prompt;
        if (!is_same_group) groups.push_back({sequence.prompt, {}});
        if (std::ranges::count(sequence.loss_mask, 1) == 0) continue;
        groups.back().completions.push_back({static_cast<std::int32_t>(i), sequence.completion, sequence.loss_mask});
      }
      const auto packed = PackMicroBatches(groups, 1 << 20);
      EXPECT_TRUE(packed.ok() && packed->size() == 1) << packed.status();
      step.micro_batches.push_back(packed->front());
    }
    return step;
  }
  // Scatters a pass's head rows to the arrays of their sequences.
  template <typename Visit>
  static void VisitRows(Step* step, const MicroBatch& batch, const Visit& visit) {
    std::size_t row = 0;
    for (const PackedCompletion& completion : batch.completions) {
      Sequence& sequence = step->sequences[static_cast<std::size_t>(completion.sequence_index)];
      for (std::size_t t = 0; t < sequence.loss_mask.size(); ++t) {
        if (sequence.loss_mask[t] != 0) visit(&sequence, t, row++);
      }
    }
  }
  static void Score(PolicyModel* policy, PolicyKind kind, Step* step, std::vector<double> Sequence::*values) {
    for (Sequence& sequence : step->sequences) (sequence.*values).assign(sequence.completion.size(), 0);
    for (const MicroBatch& batch : step->micro_batches) {
      const auto scores = policy->Score(batch, kind);
      ASSERT_TRUE(scores.ok()) << scores.status();
      VisitRows(step, batch, [&](Sequence* sequence, std::size_t t, std::size_t row) {
        (sequence->*values)[t] = scores->logprobs[row];
        if (kind == PolicyKind::kPolicy) sequence->entropies[t] = scores->entropies[row];
      });
    }
  }
  static LossSequence ForLoss(const LossOptions& options, const Sequence& sequence) {
    // The off-policy mask looks at the sampler's log-probs only where they are corrected by, as TRL's does.
    const bool uses_rollout = options.rollout_correction != RolloutCorrectionMode::kNone;
    return {.policy_logprobs = sequence.policy_logprobs,
            .old_logprobs = sequence.old_logprobs,
            .ref_logprobs = sequence.ref_logprobs,
            .rollout_logprobs = uses_rollout ? std::span<const double>(sequence.rollout_logprobs) : std::span<const double>(),
            .entropies = sequence.entropies,
            .loss_mask = sequence.loss_mask,
            .kept_mass = {},
            .advantages = sequence.advantages,
            .is_truncated = sequence.is_truncated};
  }
  void ComputeStepAdvantages(const Json& test_case, const AdvantageOptions& options, Step* step) {
    std::vector<AdvantageSequence> inputs(step->sequences.size());
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const Sequence& sequence = step->sequences[i];
      inputs[i].old_logprobs = sequence.old_logprobs;
      inputs[i].ref_logprobs = sequence.ref_logprobs;
      inputs[i].loss_mask = sequence.loss_mask;
      for (const Json& column : test_case["rewards"]) {
        inputs[i].rewards.push_back(column[i].is_null() ? std::nullopt : std::optional<double>(column[i].get<double>()));
      }
    }
    const auto advantages = ComputeAdvantages(options, inputs, document_["group_size"].get<int>());
    ASSERT_TRUE(advantages.ok()) << advantages.status();
    for (std::size_t i = 0; i < inputs.size(); ++i) step->sequences[i].advantages = advantages->advantages[i];
  }

  const testing::FamilyGolden golden_;
  Json document_;
  std::optional<SafetensorsFile> tensors_;
  AdapterLayout layout_;
  std::unique_ptr<AlignedBytes> masters_, gradients_;
};

// Adds to `worst` the largest difference, of the largest value.
void ExpectNear(const std::vector<double>& found, const std::vector<double>& expected, const std::string& what, double tolerance,
                std::map<std::string, double>* worst) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  double largest = 0, error = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_TRUE(std::isfinite(found[i])) << what << " " << i;
    largest = std::max(largest, std::abs(expected[i]));
    error = std::max(error, std::abs(found[i] - expected[i]));
  }
  EXPECT_LE(error, tolerance * largest) << what << ": " << error / largest << " of the largest value " << largest;
  (*worst)[what] = std::max((*worst)[what], error / largest);
}

TEST_F(TrlTest, AdvantagesLossAndGradientAreThoseOfEachLossTypeAndOption) {
  ASSERT_GE(document_["cases"].size(), 35u);
  std::map<std::string, double> worst;
  for (const Json& test_case : document_["cases"]) {
    const std::string name = test_case["name"];
    SCOPED_TRACE(name);
    v1::JobSpec job;
    if (test_case.contains("job")) {
      ASSERT_TRUE(google::protobuf::TextFormat::ParseFromString(test_case["job"].get<std::string>(), &job));
    } else {
      const auto imported = ImportTrlConfig(test_case["config"].dump(), "case");
      ASSERT_TRUE(imported.ok()) << imported.status();
      job = imported->job;
    }
    std::vector<std::string> faults;
    const LossOptions loss = LossOptionsFromConfig(job.loss(), job.rollout().sampling().max_tokens(), &faults);
    AdvantageOptions advantage = AdvantageOptionsFromConfig(job.advantage(), job.loss().preset(), &faults);
    CheckRecipe(loss, advantage, &faults);
    ASSERT_THAT(faults, ::testing::IsEmpty());
    test_case["config"]["reward_weights"].get_to(advantage.weights);

    Step step = MakeStep(loss, test_case["config"]["per_device_train_batch_size"]);
    const auto policy = MakePolicy(job.rollout().sampling().temperature());
    for (Sequence& sequence : step.sequences) {
      sequence.entropies.assign(sequence.completion.size(), 0);
      sequence.policy_logprobs.assign(sequence.completion.size(), 0);
    }
    SetAdapter("adapter/old");
    ASSERT_NO_FATAL_FAILURE(Score(policy.get(), PolicyKind::kPolicy, &step, &Sequence::old_logprobs));
    if (loss.beta != 0 || advantage.kl_in_reward != 0) {
      ASSERT_NO_FATAL_FAILURE(Score(policy.get(), PolicyKind::kReference, &step, &Sequence::ref_logprobs));
    }
    ASSERT_NO_FATAL_FAILURE(ComputeStepAdvantages(test_case, advantage, &step));
    std::vector<double> advantages;
    for (const Sequence& sequence : step.sequences) advantages.push_back(sequence.advantages.at(0));
    ExpectNear(advantages, test_case["advantages"].get<std::vector<double>>(), "advantages", kTolerance, &worst);

    SetAdapter("adapter/policy");
    // Entropies of the policy, before the update: the top-entropy mask's threshold is the step's.
    ASSERT_NO_FATAL_FAILURE(Score(policy.get(), PolicyKind::kPolicy, &step, &Sequence::policy_logprobs));
    std::vector<LossSequence> all;
    for (const Sequence& sequence : step.sequences) all.push_back(ForLoss(loss, sequence));
    const StepTotals totals = ComputeStepTotals(loss, all, static_cast<int>(step.micro_batches.size()));

    const bool is_product = loss.surrogate == Surrogate::kVespo || loss.ratio_level == RatioLevel::kSequenceProduct;
    const double tolerance = is_product ? kProductTolerance : kTolerance;
    ASSERT_TRUE(policy->ZeroGradients().ok());
    double total_loss = 0;
    const bool has_entropy_bonus = loss.entropy_coefficient != 0;
    for (const MicroBatch& batch : step.micro_batches) {
      const auto scores = policy->Forward(batch, has_entropy_bonus, 0);
      ASSERT_TRUE(scores.ok()) << scores.status();
      VisitRows(&step, batch, [&](Sequence* sequence, std::size_t t, std::size_t row) {
        sequence->policy_logprobs[t] = scores->logprobs[row];
      });
      std::vector<LossSequence> members;
      for (const PackedCompletion& completion : batch.completions) {
        members.push_back(ForLoss(loss, step.sequences[static_cast<std::size_t>(completion.sequence_index)]));
      }
      const auto result = EvaluateLoss(loss, totals, members);
      ASSERT_TRUE(result.ok()) << result.status();
      total_loss += result->loss;
      std::vector<double> grad_logprobs(batch.head_rows.size()), grad_entropies(has_entropy_bonus ? batch.head_rows.size() : 0);
      std::size_t row = 0;
      for (std::size_t member = 0; member < members.size(); ++member) {
        for (std::size_t t = 0; t < members[member].loss_mask.size(); ++t) {
          if (members[member].loss_mask[t] == 0) continue;
          grad_logprobs[row] = result->grad_logprobs[member][t];
          if (has_entropy_bonus) grad_entropies[row] = result->grad_entropies[member][t];
          ++row;
        }
      }
      ASSERT_TRUE(policy->Backward(grad_logprobs, grad_entropies).ok());
    }
    // A loss is a sum of terms of either sign: measured against the size of an advantage.
    ExpectNear({total_loss, 1}, {test_case["loss"].get<double>(), 1}, "loss", tolerance, &worst);
    const std::vector<float> expected = Tensor("gradient/" + name);
    ExpectNear(Gradient(), {expected.begin(), expected.end()}, "gradient", tolerance, &worst);
  }
  for (const auto& [what, error] : worst) {
    std::printf("%s: at most %.1e from TRL's in %zu cases\n", what.c_str(), error, document_["cases"].size());
  }
}

}  // namespace
}  // namespace tandem

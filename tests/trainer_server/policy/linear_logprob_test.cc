#include "trainer_server/policy/linear_logprob.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>
#include <tuple>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/support/naive_transformer.h"

namespace tandem {
namespace {

using Json = nlohmann::json;

const Json& GoldenCases() {
  static const Json cases =
      Json::parse(std::ifstream(std::string(TANDEM_GOLDEN_DIR) + "/grpo_cases.json")).at("linear_logprob_cases");
  return cases;
}

template <typename T>
std::vector<T> Flat(const Json& rows) {
  std::vector<T> values;
  for (const Json& row : rows) {
    if (row.is_array()) {
      for (const Json& value : row) values.push_back(value.get<T>());
    } else {
      values.push_back(row.get<T>());
    }
  }
  return values;
}

template <typename T>
void ExpectNear(const std::vector<T>& values, const Json& expected, double tolerance, const std::string& what) {
  const std::vector<double> wanted = Flat<double>(expected);
  ASSERT_EQ(values.size(), wanted.size()) << what;
  double largest = 1e-3;
  for (const double value : wanted) largest = std::max(largest, std::abs(value));
  for (std::size_t i = 0; i < wanted.size(); ++i)
    EXPECT_NEAR(static_cast<double>(values[i]), wanted[i], tolerance * largest) << what << " " << i;
}

template <typename T>
void CheckGoldenCases(double tolerance) {
  ASSERT_EQ(GoldenCases().size(), 7u);
  for (const auto& [row_tile, vocab_tile] : {std::tuple{1, 1}, std::tuple{2, 3}, std::tuple{100, 100}}) {
    for (const Json& golden : GoldenCases()) {
      SCOPED_TRACE(golden.at("name").get<std::string>() + ", tile " + std::to_string(row_tile) + " x " +
                   std::to_string(vocab_tile));
      const Json &inputs = golden.at("inputs"), &expected = golden.at("expected");
      const std::vector<T> hidden = Flat<T>(inputs.at("hidden")), weight = Flat<T>(inputs.at("weight"));
      const std::vector<std::int64_t> targets = Flat<std::int64_t>(inputs.at("targets"));
      LinearHead<T> head;
      head.weight = weight.data();
      head.vocab_size = static_cast<std::int64_t>(inputs.at("weight").size());
      head.width = static_cast<std::int64_t>(hidden.size() / targets.size());
      head.temperature = inputs.at("temperature");
      head.logit_scale = inputs.at("logit_scale");
      head.softcap = inputs.at("softcap").is_null() ? 0 : inputs.at("softcap").get<double>();
      head.row_tile = row_tile;
      head.vocab_tile = vocab_tile;

      std::vector<T> unit(hidden.size()), grad_hidden(hidden.size()), grad_weight(weight.size());
      const LinearLogprobs forward = LinearLogprobForward<T>(head, hidden.data(), targets, unit.data());
      ExpectNear(forward.logprobs, expected.at("logprobs"), tolerance, "logprob");
      ExpectNear(forward.lse, expected.at("lse"), tolerance, "lse");
      ExpectNear(forward.entropies, expected.at("entropies"), tolerance, "entropy");
      ExpectNear(unit, expected.at("unit_grad_hidden"), tolerance, "unit gradient");

      LinearLogprobBackward<T>(head, hidden.data(), targets, forward, Flat<double>(inputs.at("grad_logprobs")),
                               Flat<double>(inputs.at("grad_entropies")), grad_hidden.data(), grad_weight.data());
      ExpectNear(grad_hidden, expected.at("grad_hidden"), tolerance, "hidden gradient");
      ExpectNear(grad_weight, expected.at("grad_weight"), tolerance, "weight gradient");
      double objective = 0;
      for (std::size_t n = 0; n < targets.size(); ++n) {
        objective += inputs.at("grad_logprobs")[n].get<double>() * forward.logprobs[n] +
                     inputs.at("grad_entropies")[n].get<double>() * forward.entropies[n];
      }
      EXPECT_NEAR(objective, expected.at("objective").get<double>(), tolerance * 10);

      const LinearLogprobs alone = LinearLogprobForward<T>(head, hidden.data(), targets, nullptr);
      EXPECT_EQ(alone.logprobs, forward.logprobs);
    }
  }
}

TEST(LinearLogprob, GoldenCasesInDouble) { CheckGoldenCases<double>(1e-10); }
TEST(LinearLogprob, GoldenCasesInFloat) { CheckGoldenCases<float>(1e-5); }

struct RandomHead {
  testing::AlignedBytes hidden_bytes, weight_bytes;
  LinearHead<float> head;
  std::vector<std::int64_t> targets;

  RandomHead(std::int64_t rows, std::int64_t vocab, std::int64_t width)
      : hidden_bytes(static_cast<std::uint64_t>(rows * width) * 4), weight_bytes(static_cast<std::uint64_t>(vocab * width) * 4) {
    testing::FillRandom({hidden_bytes.floats(), static_cast<std::size_t>(rows * width)}, 1, 2);
    testing::FillRandom({weight_bytes.floats(), static_cast<std::size_t>(vocab * width)}, 2, 1);
    head.weight = weight_bytes.floats();
    head.vocab_size = vocab;
    head.width = width;
    for (std::int64_t n = 0; n < rows; ++n)
      targets.push_back(
          static_cast<std::int64_t>(RandomBelow(3, static_cast<std::uint64_t>(n), static_cast<std::uint64_t>(vocab))));
  }
};

// CASES C21: the tiled head against logits in full, in double.
TEST(LinearLogprob, EqualsLogitsInFull) {
  RandomHead random(37, 5000, 48);
  random.head.row_tile = 16;
  random.head.vocab_tile = 512;
  random.head.temperature = 0.7;
  const std::size_t width = 48;
  std::vector<float> unit(37 * width);
  const LinearLogprobs forward =
      LinearLogprobForward<float>(random.head, random.hidden_bytes.floats(), random.targets, unit.data());
  for (std::size_t n = 0; n < 37; ++n) {
    const float* h = random.hidden_bytes.floats() + n * width;
    std::vector<double> z(5000);
    double sum = 0, entropy = 0;
    for (std::size_t j = 0; j < z.size(); ++j) {
      for (std::size_t i = 0; i < width; ++i)
        z[j] += static_cast<double>(h[i]) * static_cast<double>(random.head.weight[j * width + i]) / 0.7;
      sum += std::exp(z[j]);
    }
    const double lse = std::log(sum);
    std::vector<double> gradient(width);
    for (std::size_t j = 0; j < z.size(); ++j) {
      const double p = std::exp(z[j] - lse);
      entropy -= p * (z[j] - lse);
      const double slope = ((static_cast<std::int64_t>(j) == random.targets[n] ? 1 : 0) - p) / 0.7;
      for (std::size_t i = 0; i < width; ++i) gradient[i] += slope * static_cast<double>(random.head.weight[j * width + i]);
    }
    EXPECT_NEAR(forward.logprobs[n], z[static_cast<std::size_t>(random.targets[n])] - lse, 1e-5);
    EXPECT_NEAR(forward.entropies[n], entropy, 1e-5);
    for (std::size_t i = 0; i < width; ++i) EXPECT_NEAR(unit[n * width + i], gradient[i], 1e-5) << n << " " << i;
  }
}

TEST(LinearLogprob, AConfidentTokenKeepsTheDirectionOfItsGradient) {
  // One column far above the rest: p = 1 - 1e-13, so [j = y] - p would be rounded to nothing in fp32.
  testing::AlignedBytes weight(4 * 4 * 4), hidden(4 * 4);
  for (int j = 0; j < 4; ++j) weight.floats()[j * 4 + j] = 1;
  hidden.floats()[0] = 30;
  LinearHead<float> head;
  head.weight = weight.floats();
  head.vocab_size = head.width = 4;
  const std::vector<std::int64_t> targets = {0};
  std::vector<float> unit(4);
  LinearLogprobForward<float>(head, hidden.floats(), targets, unit.data());
  const double rest = std::exp(-30.0);
  EXPECT_NEAR(unit[0] / (3 * rest), 1, 1e-5);
  for (int i = 1; i < 4; ++i) EXPECT_NEAR(unit[static_cast<std::size_t>(i)] / -rest, 1, 1e-5);
}

}  // namespace
}  // namespace tandem

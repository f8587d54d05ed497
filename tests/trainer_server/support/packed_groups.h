// Packed groups of random tokens, and row gradients that do not depend on how they are packed.
#pragma once

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "common/base/random.h"
#include "gtest/gtest.h"
#include "tests/support/naive_transformer.h"
#include "trainer_server/batch/pack_micro_batches.h"
#include "trainer_server/policy/policy_model.h"

namespace tandem::testing {

using Ids = std::vector<std::uint32_t>;

inline Ids RandomIds(std::uint64_t seed, std::size_t count) {
  Ids ids(count);
  for (std::size_t i = 0; i < count; ++i) ids[i] = static_cast<std::uint32_t>(RandomBelow(seed, i, 128));
  return ids;
}

struct Group {
  Ids prompt;
  std::vector<Ids> completions;
};

inline std::vector<MicroBatch> Pack(const std::vector<Group>& groups, std::int64_t max_tokens = 1 << 20) {
  static const std::vector<std::uint8_t> kMask(1 << 16, 1);
  std::vector<GroupToPack> to_pack;
  std::int32_t sequence = 0;
  for (const Group& group : groups) {
    to_pack.push_back({group.prompt, {}});
    for (const Ids& ids : group.completions) {
      to_pack.back().completions.push_back({sequence++, ids, {kMask.data(), ids.size()}});
    }
  }
  auto packed = PackMicroBatches(to_pack, max_tokens);
  EXPECT_TRUE(packed.ok()) << packed.status();
  return *std::move(packed);
}

// Two groups, one with completions longer than an attention tile.
inline std::vector<Group> TwoGroups() {
  return {{RandomIds(1, 9), {RandomIds(2, 5), RandomIds(3, 1), RandomIds(4, 12)}},
          {RandomIds(5, 70), {RandomIds(6, 90), RandomIds(7, 3)}}};
}

inline PolicyOptions AllLayers(int rank = 4, float scale = 0.5f) {
  return {.rank = rank, .scale = scale, .targets = AllLinearKinds()};
}

// Gradients for head rows that do not depend on how rows are packed: a function of (sequence, target position in the sequence).
inline std::vector<double> RowGradients(const MicroBatch& batch, std::uint64_t seed) {
  std::vector<double> values;
  for (const PackedCompletion& completion : batch.completions) {
    for (std::int32_t t = 0; t < completion.end - completion.begin; ++t) {
      values.push_back(2 * RandomUniform(DeriveSeed(seed, static_cast<std::uint64_t>(completion.sequence_index)),
                                         static_cast<std::uint64_t>(t)) -
                       1);
    }
  }
  return values;
}

inline double RelativeError(const std::vector<double>& a, const std::vector<double>& b) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(difference / norm);
}

}  // namespace tandem::testing

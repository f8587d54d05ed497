// Every instruction set's float loops against the double ones, which the policy's finite differences prove right.
#include "common/torch/vector_ops.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "common/base/random.h"
#include "gtest/gtest.h"

namespace tandem {

namespace vector_baseline {
const VectorOps<float>& FloatOps();
const VectorOps<double>& DoubleOps();
}  // namespace vector_baseline
#if defined(__x86_64__)
namespace vector_avx2 {
const VectorOps<float>& FloatOps();
}
namespace vector_avx512 {
const VectorOps<float>& FloatOps();
}
#endif

namespace {

struct Set {
  std::string name;
  const VectorOps<float>* ops;
};

std::vector<Set> Sets() {
  std::vector<Set> sets = {{"baseline", &vector_baseline::FloatOps()}, {"chosen", &vector_ops<float>()}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) sets.push_back({"avx2", &vector_avx2::FloatOps()});
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    sets.push_back({"avx512", &vector_avx512::FloatOps()});
  }
#endif
  return sets;
}

const VectorOps<double>& Exact() { return vector_baseline::DoubleOps(); }

// The same values as float and double.
struct Values {
  std::vector<float> f;
  std::vector<double> d;
  Values(std::size_t size, std::uint64_t seed, double amplitude) : f(size), d(size) {
    for (std::size_t i = 0; i < size; ++i) d[i] = f[i] = static_cast<float>((2 * RandomUniform(seed, i) - 1) * amplitude);
  }
  void ExpectNear(double tolerance, const std::string& what) const {
    for (std::size_t i = 0; i < f.size(); ++i) ASSERT_NEAR(f[i], d[i], tolerance) << what << " " << i;
  }
};

TEST(VectorOps, RowLoopsEqualDoubleOverWholeAndOddWidths) {
  for (const Set& set : Sets()) {
    for (const std::int64_t width : {1, 3, 16, 37, 64, 576}) {
      SCOPED_TRACE(set.name + " width " + std::to_string(width));
      const std::size_t size = static_cast<std::size_t>(3 * width);
      const Values x(size, 1, 3), weight(static_cast<std::size_t>(width), 2, 1), grad(size, 3, 1);
      Values y(size, 4, 0), grad_x(size, 5, 1);
      set.ops->rms_norm(x.f.data(), weight.f.data(), y.f.data(), 3, width, 1e-5f);
      Exact().rms_norm(x.d.data(), weight.d.data(), y.d.data(), 3, width, 1e-5);
      y.ExpectNear(1e-6, "rms_norm");
      set.ops->rms_norm_backward(x.f.data(), weight.f.data(), grad.f.data(), grad_x.f.data(), 3, width, 1e-5f);
      Exact().rms_norm_backward(x.d.data(), weight.d.data(), grad.d.data(), grad_x.d.data(), 3, width, 1e-5);
      grad_x.ExpectNear(1e-5, "rms_norm_backward");

      Values gate_up(2 * size, 6, 20);
      set.ops->swiglu(gate_up.f.data(), y.f.data(), 3, width);
      Exact().swiglu(gate_up.d.data(), y.d.data(), 3, width);
      y.ExpectNear(1e-4, "swiglu");
      set.ops->swiglu_backward(gate_up.f.data(), grad.f.data(), 3, width);
      Exact().swiglu_backward(gate_up.d.data(), grad.d.data(), 3, width);
      gate_up.ExpectNear(1e-4, "swiglu_backward");

      Values z(size, 7, 8);
      HeadTransform<float> transform{.scale = 0.5f, .softcap = 6.f, .logit_scale = 0.5f, .temperature = 1.f};
      HeadTransform<double> exact{.scale = 0.5, .softcap = 6, .logit_scale = 0.5, .temperature = 1};
      const std::int64_t count = 3 * width;
      const float top = set.ops->head_logits(z.f.data(), count, transform);
      ASSERT_NEAR(top, Exact().head_logits(z.d.data(), count, exact), 1e-5);
      double sums[4] = {};
      set.ops->exp_sums(z.f.data(), count, top, &sums[0], &sums[1]);
      Exact().exp_sums(z.d.data(), count, static_cast<double>(top), &sums[2], &sums[3]);
      EXPECT_NEAR(sums[0] / sums[2], 1, 2e-6);
      EXPECT_NEAR(sums[1], sums[3], 2e-6 * std::abs(sums[3]) + 1e-6);
      set.ops->head_gradient(z.f.data(), count, top, 0.7f, -0.3f, transform);
      Exact().head_gradient(z.d.data(), count, static_cast<double>(top), 0.7, -0.3, exact);
      z.ExpectNear(1e-5, "head_gradient");
    }
  }
}

TEST(VectorOps, RotatesThereAndBack) {
  for (const Set& set : Sets()) {
    for (const std::int64_t head_dim : {2, 16, 34, 64, 128}) {
      Values x(static_cast<std::size_t>(3 * head_dim), 1, 2);
      std::vector<float> c, s;
      std::vector<double> cd, sd;
      for (std::int64_t i = 0; i < head_dim / 2; ++i) {
        c.push_back(static_cast<float>(std::cos(0.3 * static_cast<double>(i + 1))));
        s.push_back(static_cast<float>(std::sin(0.3 * static_cast<double>(i + 1))));
        cd.push_back(c.back());
        sd.push_back(s.back());
      }
      const std::vector<float> before = x.f;
      set.ops->rotate(x.f.data(), 3, head_dim, c.data(), s.data(), 1);
      Exact().rotate(x.d.data(), 3, head_dim, cd.data(), sd.data(), 1);
      x.ExpectNear(1e-6, set.name);
      set.ops->rotate(x.f.data(), 3, head_dim, c.data(), s.data(), -1);
      for (std::size_t i = 0; i < before.size(); ++i) EXPECT_NEAR(x.f[i], before[i], 1e-6);
    }
  }
}

TEST(VectorOps, ExponentialsOfExtremesAreZeroOrNan) {
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const Set& set : Sets()) {
    std::vector<float> z(33, -infinity);
    z[5] = z[32] = 0;
    z[7] = -87.f;
    z[9] = -200.f;
    double sum = 0, shifted = 0;
    set.ops->exp_sums(z.data(), 33, 0, &sum, &shifted);
    EXPECT_NEAR(sum, 2, 1e-12) << set.name;
    EXPECT_NEAR(shifted, 0, 1e-30) << set.name;
    z[11] = nan;
    sum = shifted = 0;
    set.ops->exp_sums(z.data(), 33, 0, &sum, &shifted);
    EXPECT_TRUE(std::isnan(sum)) << set.name;
  }
}

template <typename T>
struct AttentionCase {
  static constexpr int kRows = 7, kKeys = 50, kWidth = 64;
  std::vector<T> queries, grad_output, keys, values, keys_t, values_t, output, lse, delta, scores, grad_scores, grad_queries,
      grad_keys, grad_values;
  std::vector<std::int32_t> limits = {1, 2, 17, 33, 49, 50, 16};
  KvBlock<T> blocks[2];
  AttentionTile<T> tile;

  explicit AttentionCase(int head_dim) {
    const auto random = [](std::uint64_t seed, int count) {
      const Values made(static_cast<std::size_t>(count), seed, 1.5);
      if constexpr (std::is_same_v<T, float>) {
        return made.f;
      } else {
        return made.d;
      }
    };
    queries = random(1, kRows * head_dim);
    grad_output = random(2, kRows * head_dim);
    keys = random(3, kKeys * head_dim);
    values = random(4, kKeys * head_dim);
    const T nan = std::numeric_limits<T>::quiet_NaN();  // columns beyond the keys may hold anything
    keys_t.assign(static_cast<std::size_t>(head_dim * kWidth), nan);
    values_t.assign(keys_t.size(), nan);
    for (int key = 0; key < kKeys; ++key) {
      for (int i = 0; i < head_dim; ++i) {
        keys_t[static_cast<std::size_t>(i * kWidth + key)] = keys[static_cast<std::size_t>(key * head_dim + i)];
        values_t[static_cast<std::size_t>(i * kWidth + key)] = values[static_cast<std::size_t>(key * head_dim + i)];
      }
    }
    const std::size_t tile_size = queries.size(), score_size = kAttentionTileRows * kAttentionTileKeys;
    output.resize(tile_size);
    grad_queries.resize(tile_size);
    lse.resize(kRows);
    delta.resize(kRows);
    scores.resize(score_size);
    grad_scores.resize(score_size);
    grad_keys.resize(keys.size());
    grad_values.resize(keys.size());
    for (int b = 0; b < 2; ++b) {  // 32 keys, then 18 of 32 columns
      const int first = 32 * b;
      blocks[b] = {.keys_t = keys_t.data() + first,
                   .key_t_stride = kWidth,
                   .values = values.data() + first * head_dim,
                   .row_stride = head_dim,
                   .width = 32,
                   .count = b == 0 ? 32 : 18,
                   .keys = keys.data() + first * head_dim,
                   .values_t = values_t.data() + first,
                   .grad_keys = grad_keys.data() + first * head_dim,
                   .grad_values = grad_values.data() + first * head_dim,
                   .grad_stride = head_dim};
    }
    tile.queries = queries.data();
    tile.limits = limits.data();
    tile.rows = kRows;
    tile.head_dim = head_dim;
    tile.blocks = blocks;
    tile.num_blocks = 2;
    tile.scores = scores.data();
    tile.output = output.data();
    tile.lse = lse.data();
  }

  void Run(const VectorOps<T>& ops) {
    ops.attention_forward(tile);
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < tile.head_dim; ++i) {
        const std::size_t at = static_cast<std::size_t>(r * tile.head_dim + i);
        delta[static_cast<std::size_t>(r)] += output[at] * grad_output[at];
      }
    }
    tile.grad_output = grad_output.data();
    tile.delta = delta.data();
    tile.grad_scores = grad_scores.data();
    tile.grad_queries = grad_queries.data();
    ops.attention_backward(tile);
  }
};

TEST(VectorOps, AttentionEqualsDoubleAndIgnoresWhatLiesBeyondTheKeys) {
  for (const Set& set : Sets()) {
    for (const int head_dim : {2, 10, 16, 64, 80}) {
      SCOPED_TRACE(set.name + " head_dim " + std::to_string(head_dim));
      AttentionCase<float> fast(head_dim);
      AttentionCase<double> exact(head_dim);
      fast.Run(*set.ops);
      exact.Run(Exact());
      const auto expect_near = [&](const std::vector<float>& a, const std::vector<double>& b, const char* what) {
        for (std::size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 3e-4) << what << " " << i;
      };
      expect_near(fast.output, exact.output, "output");
      expect_near(fast.lse, exact.lse, "lse");
      expect_near(fast.grad_queries, exact.grad_queries, "grad_queries");
      expect_near(fast.grad_keys, exact.grad_keys, "grad_keys");
      expect_near(fast.grad_values, exact.grad_values, "grad_values");
      for (std::size_t i = 0; i < static_cast<std::size_t>(head_dim); ++i)
        EXPECT_EQ(fast.output[i], fast.values[i]);  // one key: its value
    }
  }
}

}  // namespace
}  // namespace tandem

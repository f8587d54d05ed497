#include "rollout_server/sample/softmax.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace tandem {
namespace {

// Note [Lanes of the softmax]
// Sixteen lanes whatever the machine: one register of AVX-512, two of AVX2, four of SSE. The same operations on the same lanes in
// the same order, without fused multiply-add (the file is compiled with -ffp-contract=off), so every machine gives the same bits.
constexpr std::size_t kLanes = 16;
using Floats = float __attribute__((vector_size(4 * kLanes)));
using Ints = std::int32_t __attribute__((vector_size(4 * kLanes)));
static_assert(kSoftmaxTile % kLanes == 0);

#define TANDEM_INLINE inline __attribute__((always_inline))

TANDEM_INLINE void Load(const float* from, Floats* value) { std::memcpy(value, from, sizeof(*value)); }
TANDEM_INLINE void Store(const Floats& value, float* to) { std::memcpy(to, &value, sizeof(value)); }

// exp(x) for x <= 0, relative error below 3e-7: x = n ln 2 + r, a polynomial of degree 6 in r (Cephes, expf), times 2^n.
TANDEM_INLINE void Exp(const Floats& x, Floats* result) {
  const Ints is_in_range = x >= -87.0f;
  const Ints kept_bits = reinterpret_cast<Ints>(x) & is_in_range;  // 0 where it underflows
  const Floats kept = reinterpret_cast<Floats>(kept_bits);
  const Floats magic = Floats{} + 12582912.0f;  // 1.5 x 2^23: adding it rounds to an integer, found in the low bits
  const Floats shifted = kept * 1.44269504088896341f + magic;
  const Floats n = shifted - magic;
  const Floats r = (kept - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Ints exponent = (reinterpret_cast<Ints>(shifted) - reinterpret_cast<Ints>(magic)) << 23;
  const Ints scaled = (reinterpret_cast<Ints>(p) + exponent) & is_in_range;
  *result = reinterpret_cast<Floats>(scaled);
}

TANDEM_INLINE double ExponentiateLanes(std::span<const float> row, float maximum, float inverse_temperature, float* exponentials,
                                       double* tile_sums) {
  double total = 0;
  for (std::size_t begin = 0; begin < row.size(); begin += kSoftmaxTile) {
    const std::size_t end = std::min(begin + kSoftmaxTile, row.size());
    Floats lanes = {};
    for (std::size_t i = begin; i < end; i += kLanes) {
      const std::size_t size = std::min(kLanes, end - i);
      Floats x;
      if (size == kLanes) {
        Load(row.data() + i, &x);
      } else {
        x = Floats{} - __builtin_inff();
        std::memcpy(&x, row.data() + i, size * sizeof(float));
      }
      Floats e;
      Exp((x - maximum) * inverse_temperature, &e);
      if (size == kLanes) {
        Store(e, exponentials + i);
      } else {
        std::memcpy(exponentials + i, &e, size * sizeof(float));
      }
      lanes += e;
    }
    double sum = 0;
    for (std::size_t lane = 0; lane < kLanes; ++lane) sum += double{lanes[lane]};
    *tile_sums++ = sum;
    total += sum;
  }
  return total;
}

TANDEM_INLINE RowMaximum FindMaximumLanes(std::span<const float> row) {
  RowMaximum result{.value = row.empty() ? 0 : row[0]};
  std::size_t i = 0;
  Floats largest = Floats{} + result.value;
  Ints nan = {};
  for (; i + kLanes <= row.size(); i += kLanes) {
    Floats x;
    Load(row.data() + i, &x);
    nan |= x != x;
    largest = x > largest ? x : largest;
  }
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    result.value = std::max(result.value, largest[lane]);
    result.has_nan |= nan[lane] != 0;
  }
  for (; i < row.size(); ++i) {
    result.value = std::max(result.value, row[i]);
    result.has_nan |= row[i] != row[i];
  }
  return result;
}

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512dq"))) RowMaximum FindMaximumAvx512(std::span<const float> row) {
  return FindMaximumLanes(row);
}
__attribute__((target("avx2"))) RowMaximum FindMaximumAvx2(std::span<const float> row) { return FindMaximumLanes(row); }
__attribute__((target("avx512f,avx512dq"))) double ExponentiateAvx512(std::span<const float> row, float maximum, float scale,
                                                                      float* exponentials, double* tile_sums) {
  return ExponentiateLanes(row, maximum, scale, exponentials, tile_sums);
}
__attribute__((target("avx2"))) double ExponentiateAvx2(std::span<const float> row, float maximum, float scale,
                                                        float* exponentials, double* tile_sums) {
  return ExponentiateLanes(row, maximum, scale, exponentials, tile_sums);
}
bool HasAvx512() { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq"); }
bool HasAvx2() { return __builtin_cpu_supports("avx2"); }
#endif

}  // namespace

RowMaximum FindMaximum(std::span<const float> row) {
#if defined(__x86_64__)
  if (HasAvx512()) return FindMaximumAvx512(row);
  if (HasAvx2()) return FindMaximumAvx2(row);
#endif
  return FindMaximumLanes(row);
}

double Exponentiate(std::span<const float> row, float maximum, float inverse_temperature, std::span<float> exponentials,
                    std::vector<double>* tile_sums) {
  tile_sums->resize((row.size() + kSoftmaxTile - 1) / kSoftmaxTile);
#if defined(__x86_64__)
  if (HasAvx512()) return ExponentiateAvx512(row, maximum, inverse_temperature, exponentials.data(), tile_sums->data());
  if (HasAvx2()) return ExponentiateAvx2(row, maximum, inverse_temperature, exponentials.data(), tile_sums->data());
#endif
  return ExponentiateLanes(row, maximum, inverse_temperature, exponentials.data(), tile_sums->data());
}

}  // namespace tandem

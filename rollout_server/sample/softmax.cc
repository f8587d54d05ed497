#include "rollout_server/sample/softmax.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

namespace tandem {
namespace {

// Four lanes: what every x86-64 and ARM has, so that the bits do not depend on the machine's widest registers.
using Floats = float __attribute__((vector_size(16)));
using Ints = std::int32_t __attribute__((vector_size(16)));
constexpr std::size_t kLanes = 4;

inline Floats Load(const float* from) {
  Floats value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}
inline void Store(Floats value, float* to) { std::memcpy(to, &value, sizeof(value)); }
inline Floats Spread(float value) { return Floats{value, value, value, value}; }

// exp(x) for x <= 0, relative error below 2e-7: x = n ln 2 + r, a polynomial of degree 6 in r (Cephes, expf), times 2^n.
inline Floats Exp(Floats x) {
  const Ints is_in_range = x >= Spread(-87.0f);
  const Floats kept = std::bit_cast<Floats>(std::bit_cast<Ints>(x) & is_in_range);  // 0 where it underflows
  const Floats magic = Spread(12582912.0f);  // 1.5 x 2^23: adding it rounds to an integer, found in the low bits
  const Floats shifted = kept * Spread(1.44269504088896341f) + magic;
  const Floats n = shifted - magic;
  const Floats r = (kept - n * Spread(0.693359375f)) + n * Spread(2.12194440e-4f);
  Floats p = Spread(1.9875691500e-4f);
  p = p * r + Spread(1.3981999507e-3f);
  p = p * r + Spread(8.3334519073e-3f);
  p = p * r + Spread(4.1665795894e-2f);
  p = p * r + Spread(1.6666665459e-1f);
  p = p * r + Spread(5.0000001201e-1f);
  p = p * (r * r) + r + Spread(1.0f);
  const Ints exponent = (std::bit_cast<Ints>(shifted) - std::bit_cast<Ints>(magic)) << 23;
  const Ints scaled = std::bit_cast<Ints>(p) + exponent;
  return std::bit_cast<Floats>(scaled & is_in_range);
}

}  // namespace

RowMaximum FindMaximum(std::span<const float> row) {
  RowMaximum result{.value = row.empty() ? 0 : row[0]};
  std::size_t i = 0;
  if (row.size() >= kLanes) {
    Floats largest = Load(row.data());
    Ints nan = Ints{};
    for (; i + kLanes <= row.size(); i += kLanes) {
      const Floats value = Load(row.data() + i);
      nan |= value != value;
      largest = value > largest ? value : largest;
    }
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      result.value = std::max(result.value, largest[lane]);
      result.has_nan |= nan[lane] != 0;
    }
  }
  for (; i < row.size(); ++i) {
    result.value = std::max(result.value, row[i]);
    result.has_nan |= row[i] != row[i];
  }
  return result;
}

double Exponentiate(std::span<const float> row, float maximum, float inverse_temperature, std::span<float> exponentials,
                    std::vector<double>* tile_sums) {
  tile_sums->clear();
  double total = 0;
  const Floats shift = Spread(maximum);
  const Floats scale = Spread(inverse_temperature);
  for (std::size_t begin = 0; begin < row.size(); begin += kSoftmaxTile) {
    const std::size_t end = std::min(begin + kSoftmaxTile, row.size());
    Floats sums[2] = {Floats{}, Floats{}};
    std::size_t i = begin;
    for (; i + 2 * kLanes <= end; i += 2 * kLanes) {
      const Floats first = Exp((Load(row.data() + i) - shift) * scale);
      const Floats second = Exp((Load(row.data() + i + kLanes) - shift) * scale);
      Store(first, exponentials.data() + i);
      Store(second, exponentials.data() + i + kLanes);
      sums[0] += first;
      sums[1] += second;
    }
    const Floats lanes = sums[0] + sums[1];
    double sum = double{lanes[0]} + double{lanes[1]} + double{lanes[2]} + double{lanes[3]};
    for (; i < end; ++i) {
      exponentials[i] = Exp(Spread((row[i] - maximum) * inverse_temperature))[0];
      sum += double{exponentials[i]};
    }
    tile_sums->push_back(sum);
    total += sum;
  }
  return total;
}

}  // namespace tandem

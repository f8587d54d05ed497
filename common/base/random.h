// Counter-based random numbers: the value is a pure function of (seed, counter), so a draw can be repeated after a restart
// and never depends on what else was drawn. SplitMix64 finaliser (Steele, Lea, Flood 2014) over a mixed key.
#pragma once

#include <cstdint>

namespace tandem {

constexpr std::uint64_t MixBits(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// A seed for a part of a seeded whole: DeriveSeed(DeriveSeed(job_seed, step), member).
constexpr std::uint64_t DeriveSeed(std::uint64_t seed, std::uint64_t part) {
  return MixBits(MixBits(seed) ^ (part * 0xd1342543de82ef95ULL));
}

constexpr std::uint64_t RandomBits(std::uint64_t seed, std::uint64_t counter) {
  return MixBits(MixBits(seed) + MixBits(~counter));
}

// Uniform in [0, 1), 53 bits.
constexpr double RandomUniform(std::uint64_t seed, std::uint64_t counter) {
  return static_cast<double>(RandomBits(seed, counter) >> 11) * 0x1.0p-53;
}

// Uniform in [0, bound). Requires: bound > 0. The bias is below bound / 2^64.
constexpr std::uint64_t RandomBelow(std::uint64_t seed, std::uint64_t counter, std::uint64_t bound) {
  return static_cast<std::uint64_t>((static_cast<unsigned __int128>(RandomBits(seed, counter)) * bound) >> 64);
}

}  // namespace tandem

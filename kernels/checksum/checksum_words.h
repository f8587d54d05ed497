// The words of a checksum, on the host and on the device: nvcc takes constexpr functions for both (--expt-relaxed-constexpr).
#pragma once

#include <cstdint>

namespace tandem::internal {

inline constexpr std::uint64_t kChecksumFactors[2] = {0x9e3779b97f4a7c15ULL, 0xd1342543de82ef95ULL};

// Of word number i: what is multiplied by a factor and mixed.
constexpr std::uint64_t PlaceChecksumWord(std::uint64_t word, std::uint64_t i) { return (word + 1) * (2 * i + 1); }

// The finaliser of MurmurHash3 (Appleby, public domain): fmix64.
constexpr std::uint64_t MixChecksumWord(std::uint64_t x) {
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdULL;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ULL;
  return x ^ (x >> 33);
}

}  // namespace tandem::internal

// Random numbers of 32 bits for random-operation tests: the same seed gives the same operations on every machine.
#pragma once

#include <cstdint>
#include <random>

namespace tandem::testing {

class SeededRandom {
 public:
  explicit SeededRandom(std::uint32_t seed) : engine_(seed) {}
  std::uint32_t operator()() { return static_cast<std::uint32_t>(engine_()); }

 private:
  std::mt19937 engine_;
};

}  // namespace tandem::testing

#include "kernels/checksum/checksum.h"

#include <cstring>

#include "kernels/checksum/checksum_words.h"
#include "kernels/cuda_launchers.h"

namespace tandem {
namespace {

void ChecksumSums(const void* data, std::size_t size_bytes, std::uint64_t (&sums)[2]) {
  constexpr std::size_t kLanes = 4;  // multiplications that do not wait for each other
  const auto* const bytes = static_cast<const std::byte*>(data);
  const std::size_t num_words = size_bytes / sizeof(std::uint64_t), whole = num_words / kLanes * kLanes;
  const auto word = [bytes](std::size_t i, std::size_t word_bytes) {
    std::uint64_t value = 0;
    std::memcpy(&value, bytes + i * sizeof(value), word_bytes);
    return value;
  };
  std::uint64_t first[kLanes] = {}, second[kLanes] = {};
  for (std::size_t i = 0; i < whole; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const std::uint64_t placed = internal::PlaceChecksumWord(word(i + lane, sizeof(std::uint64_t)), i + lane);
      first[lane] += internal::MixChecksumWord(placed * internal::kChecksumFactors[0]);
      second[lane] += internal::MixChecksumWord(placed * internal::kChecksumFactors[1]);
    }
  }
  for (std::size_t i = whole; i * sizeof(std::uint64_t) < size_bytes; ++i) {
    const std::uint64_t placed =
        internal::PlaceChecksumWord(word(i, i < num_words ? sizeof(std::uint64_t) : size_bytes % sizeof(std::uint64_t)), i);
    first[0] += internal::MixChecksumWord(placed * internal::kChecksumFactors[0]);
    second[0] += internal::MixChecksumWord(placed * internal::kChecksumFactors[1]);
  }
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    sums[0] += first[lane];
    sums[1] += second[lane];
  }
}

}  // namespace

absl::StatusOr<std::string> MemoryChecksum(Device device, const void* data, std::size_t size_bytes) {
  std::uint64_t sums[2] = {};
  if (device == Device::kCuda) {
    TANDEM_RETURN_IF_ERROR(internal::ChecksumSumsCuda(data, size_bytes, sums));
  } else {
    ChecksumSums(data, size_bytes, sums);
  }
  std::string digits;
  for (int i = 0; i < 2; ++i) {
    const std::uint64_t sum = internal::MixChecksumWord(sums[i] + size_bytes * internal::kChecksumFactors[i]);
    absl::StrAppend(&digits, absl::Hex(sum, absl::kZeroPad16));
  }
  return digits;
}

}  // namespace tandem

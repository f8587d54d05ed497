// Splits a range of offsets [begin, end) into pieces: best fit, split and coalesced, every piece 256-byte aligned and owned by
// name. Pure arithmetic: it touches no memory, so it also serves ranges that lie on a device. The same calls give the same
// offsets. Thread-compatible.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "common/base/status.h"

namespace tandem {

class ElasticArena {
 public:
  static constexpr std::uint64_t kAlignmentBytes = 256;

  // `name` of the range, for errors: "elastic". Requires: both bounds are multiples of kAlignmentBytes, begin <= end.
  ElasticArena(std::string name, std::uint64_t begin_bytes, std::uint64_t end_bytes);

  // The offset of a piece of at least `size_bytes`; a size of 0 takes one alignment unit. Errors: RESOURCE_EXHAUSTED naming
  // owner, size, free bytes, the largest free piece and the greatest owners.
  absl::StatusOr<std::uint64_t> Allocate(std::uint64_t size_bytes, std::string_view owner);
  // Requires: `offset_bytes` came from Allocate and was not freed since.
  void Free(std::uint64_t offset_bytes);

  // By owner, those of 0 bytes left out. Rounded sizes: with free_bytes() they add up to the range.
  const std::map<std::string, std::uint64_t, std::less<>>& used_by_owner() const { return owners_; }
  std::uint64_t size_of(std::uint64_t offset_bytes) const;  // rounded. Requires: a piece in use
  std::uint64_t capacity_bytes() const { return end_ - begin_; }
  std::uint64_t used_bytes() const { return used_; }
  std::uint64_t free_bytes() const { return capacity_bytes() - used_; }
  std::uint64_t largest_free_bytes() const { return free_by_size_.empty() ? 0 : free_by_size_.rbegin()->first; }
  std::uint64_t num_pieces() const { return pieces_.size() - free_by_size_.size(); }
  // The most bytes ever used at a time, since the last ResetPeak.
  std::uint64_t peak_bytes() const { return peak_; }
  void ResetPeak() { peak_ = used_; }

 private:
  struct Piece {
    std::uint64_t size = 0;
    std::string owner;
    bool is_free = true;
  };
  using Pieces = std::map<std::uint64_t, Piece>;  // by offset, without gaps; no two free neighbours

  void InsertFree(Pieces::iterator it) { free_by_size_.emplace(it->second.size, it->first); }
  void EraseFree(Pieces::iterator it) { free_by_size_.erase({it->second.size, it->first}); }

  const std::string name_;
  const std::uint64_t begin_;
  const std::uint64_t end_;
  Pieces pieces_;
  std::set<std::pair<std::uint64_t, std::uint64_t>> free_by_size_;  // (size, offset): the first that fits is the best, lowest fit
  std::map<std::string, std::uint64_t, std::less<>> owners_;
  std::uint64_t used_ = 0;
  std::uint64_t peak_ = 0;
};

}  // namespace tandem

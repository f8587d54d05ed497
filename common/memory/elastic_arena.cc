#include "common/memory/elastic_arena.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "common/base/check.h"
#include "common/base/units.h"

namespace tandem {
namespace {

constexpr std::size_t kOwnersInError = 4;

std::string GreatestOwners(const std::map<std::string, std::uint64_t, std::less<>>& owners) {
  std::vector<std::pair<std::uint64_t, std::string_view>> by_size;
  for (const auto& [owner, bytes] : owners) by_size.emplace_back(bytes, owner);
  std::sort(by_size.rbegin(), by_size.rend());
  std::string text;
  for (std::size_t i = 0; i < std::min(by_size.size(), kOwnersInError); ++i)
    absl::StrAppend(&text, i == 0 ? "; held by " : ", ", ToAbsl(by_size[i].second), " ", FormatBytes(by_size[i].first));
  return text;
}

}  // namespace

ElasticArena::ElasticArena(std::string name, std::uint64_t begin_bytes, std::uint64_t end_bytes)
    : name_(std::move(name)), begin_(begin_bytes), end_(end_bytes) {
  TANDEM_CHECK(begin_ <= end_ && begin_ % kAlignmentBytes == 0 && end_ % kAlignmentBytes == 0, "[", begin_, ", ", end_, ")");
  if (begin_ < end_) InsertFree(pieces_.emplace(begin_, Piece{.size = end_ - begin_, .owner = "", .is_free = true}).first);
}

absl::StatusOr<std::uint64_t> ElasticArena::Allocate(std::uint64_t size_bytes, std::string_view owner) {
  const auto fit = size_bytes > capacity_bytes()
                       ? free_by_size_.end()
                       : free_by_size_.lower_bound({RoundUp(std::max<std::uint64_t>(size_bytes, 1), kAlignmentBytes), 0});
  if (fit == free_by_size_.end())
    return absl::ResourceExhaustedError(absl::StrCat(name_, ": ", ToAbsl(owner), " asks for ", size_bytes, " bytes (",
                                                     FormatBytes(size_bytes), "); free ", FormatBytes(free_bytes()), " of ",
                                                     FormatBytes(capacity_bytes()), ", largest free piece ",
                                                     FormatBytes(largest_free_bytes()), GreatestOwners(owners_)));
  const std::uint64_t size = RoundUp(std::max<std::uint64_t>(size_bytes, 1), kAlignmentBytes);
  const auto it = pieces_.find(fit->second);
  EraseFree(it);
  if (const std::uint64_t rest = it->second.size - size; rest > 0)
    InsertFree(pieces_.emplace(it->first + size, Piece{.size = rest, .owner = "", .is_free = true}).first);
  it->second = Piece{.size = size, .owner = std::string(owner), .is_free = false};
  owners_[it->second.owner] += size;
  used_ += size;
  peak_ = std::max(peak_, used_);
  return it->first;
}

void ElasticArena::Free(std::uint64_t offset_bytes) {
  auto it = pieces_.find(offset_bytes);
  TANDEM_CHECK(it != pieces_.end() && !it->second.is_free, name_, ": no piece in use at ", offset_bytes);
  used_ -= it->second.size;
  const auto owner = owners_.find(it->second.owner);
  owner->second -= it->second.size;
  if (owner->second == 0) owners_.erase(owner);
  it->second.is_free = true;
  it->second.owner.clear();
  if (const auto next = std::next(it); next != pieces_.end() && next->second.is_free) {
    EraseFree(next);
    it->second.size += next->second.size;
    pieces_.erase(next);
  }
  if (it != pieces_.begin()) {
    if (const auto previous = std::prev(it); previous->second.is_free) {
      EraseFree(previous);
      previous->second.size += it->second.size;
      pieces_.erase(it);
      it = previous;
    }
  }
  InsertFree(it);
}

std::uint64_t ElasticArena::size_of(std::uint64_t offset_bytes) const {
  const auto it = pieces_.find(offset_bytes);
  TANDEM_CHECK(it != pieces_.end() && !it->second.is_free, name_, ": no piece in use at ", offset_bytes);
  return it->second.size;
}

}  // namespace tandem

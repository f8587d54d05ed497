// The second half of a byte-level tokenizer: one piece of text into token ids by ranked merges of neighbours (Sennrich, Haddow,
// Birch 2016, arXiv 1508.07909, over bytes instead of characters). Immutable after Create; thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "common/base/status.h"
#include "common/model/tokenizer.h"

namespace tandem {

// GPT-2's byte alphabet: each byte as one printable character (Radford et al. 2019). Printable Latin-1 stands for itself, the
// other 68 bytes are U+0100 and up in order: " " is "Ġ" (U+0120).
std::string ByteLetters(std::string_view bytes);
// The way back; nullopt when a character is none of the alphabet's.
std::optional<std::string> BytesOfLetters(std::string_view letters);

class BytePairMerges {
 public:
  // `ids`: the tokens that text may become, by their spelling in the byte alphabet. Bytes without a token vanish.
  // Errors: INVALID_ARGUMENT naming the merge whose part or result is no token.
  static absl::StatusOr<BytePairMerges> Create(const absl::flat_hash_map<std::string_view, TokenId>& ids,
                                               const std::vector<std::pair<std::string, std::string>>& merges);

  // Scratch of Encode, kept by the caller between calls.
  class Workspace {
   private:
    friend class BytePairMerges;
    struct Symbol {
      TokenId id = 0;
      std::int32_t previous = -1;  // -1: none
      std::int32_t next = -1;
      bool is_merged_away = false;
    };
    struct Candidate {
      std::uint32_t rank = 0;
      std::int32_t left = 0;                          // index of the left symbol
      std::uint64_t pair = 0;                         // the pair's ids when it was found: a stale candidate is told by them
      bool operator<(const Candidate& other) const {  // a heap's top is its greatest: least rank, then leftmost
        return rank != other.rank ? rank > other.rank : left > other.left;
      }
    };
    std::vector<Symbol> symbols_;
    std::vector<Candidate> heap_;
  };

  // Appends the ids of `piece`: the pair of least rank is merged first, the leftmost among equals. Time n log n in its bytes.
  void Encode(std::string_view piece, Workspace* workspace, std::vector<TokenId>* ids) const;

 private:
  struct Merge {
    std::uint32_t rank = 0;
    TokenId result = 0;
  };
  static std::uint64_t PairKey(TokenId left, TokenId right) { return (std::uint64_t{left} << 32) | right; }
  void PushCandidate(std::int32_t left, Workspace* workspace) const;

  std::array<std::optional<TokenId>, 256> byte_ids_;
  absl::flat_hash_map<std::uint64_t, Merge> merges_;
};

}  // namespace tandem

// Keys of cached blocks. A block's K and V depend on every token up to its end and on everything that computed them, so its key
// is a chain: key(i) = SHA-256(key(i - 1), tokens of block i), begun by the namespace. Equal keys mean equal content (CASES C43).
// Pure.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace tandem {

struct CacheNamespace {
  std::string model_digest = {};
  std::string job = {};             // empty: the base model
  std::uint64_t activation_id = 0;  // of the adapter; never used twice in a process, so equal names and versions do not meet
  std::uint64_t weight_version = 0;
  std::uint64_t lease_epoch = 0;  // what a phase switch overwrote is never found again
  std::string prompt_kind = {};   // how the prompt became tokens
};

// The chain's beginning.
std::string RootKey(const CacheNamespace& name);
std::string ChainKey(const std::string& previous_key, std::span<const std::uint32_t> block_tokens);

}  // namespace tandem

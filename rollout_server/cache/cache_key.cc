#include "rollout_server/cache/cache_key.h"

#include "common/base/hash.h"

namespace tandem {
namespace {

// Lengths go first, so that no two lists of fields give the same bytes.
void Add(Sha256* hash, const std::string& text) {
  const std::uint64_t size = text.size();
  hash->Update(&size, sizeof(size));
  hash->Update(text);
}

void Add(Sha256* hash, std::uint64_t value) { hash->Update(&value, sizeof(value)); }

}  // namespace

std::string RootKey(const CacheNamespace& name) {
  Sha256 hash;
  Add(&hash, name.model_digest);
  Add(&hash, name.job);
  Add(&hash, name.activation_id);
  Add(&hash, name.weight_version);
  Add(&hash, name.lease_epoch);
  Add(&hash, name.prompt_kind);
  return hash.Finish();
}

std::string ChainKey(const std::string& previous_key, std::span<const std::uint32_t> block_tokens) {
  Sha256 hash;
  Add(&hash, previous_key);
  hash.Update(block_tokens.data(), block_tokens.size_bytes());
  return hash.Finish();
}

}  // namespace tandem

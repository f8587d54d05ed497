// The KV cache's blocks: who holds which, and which full blocks can be found again by their content. Holds no K or V; only
// numbers. A block has a reference for every table (or kept prompt) that names it. A published block without references stays
// findable until its room is needed: the least recently used goes first. Confined to the engine thread.
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace tandem {

// Units run in steps of their own and count their own blocks; see schedule/scheduler.h.
enum class Lane { kUnit, kShared };

class BlockAllocator {
 public:
  explicit BlockAllocator(int num_blocks);

  // A block with one reference, counted for `lane`; evicts the least recently used unreferenced block when no other is free.
  // nullopt when every block is referenced.
  std::optional<std::int32_t> Allocate(Lane lane);
  void Retain(std::int32_t block);   // Requires: referenced
  void Release(std::int32_t block);  // Requires: referenced
  int ref_count(std::int32_t block) const { return blocks_[block].ref_count; }

  // Makes a full block findable under `key`. Nothing happens when the key is taken or the block has one already.
  void Publish(std::int32_t block, const std::string& key);
  // The block published under `key`, with one more reference.
  std::optional<std::int32_t> Find(const std::string& key, Lane lane);
  // Nothing published is found any more: its content is gone, or another daemon may overwrite it.
  void ForgetAll();

  int num_blocks() const { return static_cast<int>(blocks_.size()); }
  int num_used(Lane lane) const { return lane == Lane::kUnit ? num_used_unit_ : num_used_shared_; }
  int num_free() const { return num_blocks() - num_used_unit_ - num_used_shared_; }  // including unreferenced published ones
  // The most blocks used at a time since the last ResetPeak.
  int peak_used() const { return peak_used_; }
  void ResetPeak() { peak_used_ = num_used_unit_ + num_used_shared_; }

 private:
  struct Block {
    int ref_count = 0;
    Lane lane = Lane::kShared;
    std::string key;                              // empty: not published
    std::list<std::int32_t>::iterator lru_place;  // valid while published and unreferenced
  };
  int& used(Lane lane) { return lane == Lane::kUnit ? num_used_unit_ : num_used_shared_; }
  void Use(Lane lane, Block* block);

  std::vector<Block> blocks_;
  std::vector<std::int32_t> free_;  // last out first
  std::list<std::int32_t> lru_;     // published, unreferenced; oldest use first
  std::unordered_map<std::string, std::int32_t> published_;
  int num_used_unit_ = 0;
  int num_used_shared_ = 0;
  int peak_used_ = 0;
};

}  // namespace tandem

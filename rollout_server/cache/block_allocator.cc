#include "rollout_server/cache/block_allocator.h"

#include <algorithm>
#include <functional>

#include "common/base/check.h"

namespace tandem {

BlockAllocator::BlockAllocator(int num_blocks) : blocks_(num_blocks) {
  free_.reserve(num_blocks);
  for (int block = num_blocks - 1; block >= 0; --block) free_.push_back(block);
}

std::optional<std::int32_t> BlockAllocator::Allocate(Lane lane) {
  std::int32_t index = 0;
  if (!free_.empty()) {
    index = free_.back();
    free_.pop_back();
  } else if (!lru_.empty()) {
    index = lru_.front();
    lru_.pop_front();
    published_.erase(blocks_[index].key);
    blocks_[index].key.clear();
  } else {
    return std::nullopt;
  }
  Block& block = blocks_[index];
  block.ref_count = 1;
  Use(lane, &block);
  return index;
}

void BlockAllocator::Use(Lane lane, Block* block) {
  block->lane = lane;
  ++used(lane);
  peak_used_ = std::max(peak_used_, num_used_unit_ + num_used_shared_);
}

void BlockAllocator::Retain(std::int32_t index) {
  TANDEM_CHECK(blocks_[index].ref_count > 0, "retain of free block ", index);
  ++blocks_[index].ref_count;
}

void BlockAllocator::Release(std::int32_t index) {
  Block& block = blocks_[index];
  TANDEM_CHECK(block.ref_count > 0, "release of free block ", index);
  if (--block.ref_count > 0) return;
  --used(block.lane);
  if (block.key.empty()) {
    free_.push_back(index);
  } else {
    block.lru_place = lru_.insert(lru_.end(), index);
  }
}

void BlockAllocator::Publish(std::int32_t index, const std::string& key) {
  Block& block = blocks_[index];
  TANDEM_CHECK(block.ref_count > 0, "publish of free block ", index);
  if (!block.key.empty() || !published_.emplace(key, index).second) return;
  block.key = key;
}

std::optional<std::int32_t> BlockAllocator::Find(const std::string& key, Lane lane) {
  const auto found = published_.find(key);
  if (found == published_.end()) return std::nullopt;
  Block& block = blocks_[found->second];
  if (block.ref_count++ == 0) {
    lru_.erase(block.lru_place);
    Use(lane, &block);
  }
  return found->second;
}

void BlockAllocator::ForgetAll() {
  // Over what is published, not over all blocks: a large pool has a million, mostly never used.
  std::vector<std::int32_t> forgotten;
  forgotten.reserve(published_.size());
  for (const auto& [key, index] : published_) forgotten.push_back(index);
  std::sort(forgotten.begin(), forgotten.end(), std::greater<>());  // the order of the map is nobody's business
  for (const std::int32_t index : forgotten) {
    Block& block = blocks_[index];
    block.key.clear();
    if (block.ref_count == 0) free_.push_back(index);
  }
  lru_.clear();
  published_.clear();
}

}  // namespace tandem

// A DecoderModel without arithmetic that still needs a correct cache: the "K and V" of a token is a hash of the one before it
// (read through the block table), the token and the adapter. Its logits are a function of the last hash, so they are right only
// if every block of the context is. Checks the batch's shapes as it goes. Used from one thread at a time, except for the gate.
#pragma once

#include <bit>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "common/base/mutex.h"
#include "common/base/random.h"
#include "common/model/tokenizer.h"
#include "rollout_server/model/decoder_backends.h"

namespace tandem::testing {

inline std::uint64_t NextHash(std::uint64_t previous, std::uint32_t token, float adapter_scale) {
  return MixBits(MixBits(previous ^ (std::uint64_t{token} + 1)) ^ std::bit_cast<std::uint32_t>(adapter_scale));
}

inline std::vector<float> LogitsOf(std::uint64_t hash, int vocab_size) {
  std::vector<float> logits(vocab_size);
  for (int i = 0; i < vocab_size; ++i) logits[i] = static_cast<float>(4 * RandomUniform(hash, i));
  return logits;
}

// Lets runs through one by one. Thread-safe.
class Gate {
 public:
  void Grant(int runs) {
    MutexLock lock(&mutex_);
    permits_ = runs < 0 ? std::numeric_limits<int>::max() : permits_ + runs;
    changed_.SignalAll();
  }
  void Open() { Grant(-1); }
  // Model: waits for a permit.
  void Enter() {
    MutexLock lock(&mutex_);
    ++num_entered_;
    changed_.SignalAll();
    while (permits_ == 0) changed_.WaitFor(&mutex_, absl::Seconds(1));
    if (permits_ != std::numeric_limits<int>::max()) --permits_;
  }
  // Test: returns once the n-th run (from 1) stands at the gate or is past it; false after a minute.
  bool AwaitEntry(int n) {
    MutexLock lock(&mutex_);
    for (int tries = 0; num_entered_ < n && tries < 600; ++tries) changed_.WaitFor(&mutex_, absl::Milliseconds(100));
    return num_entered_ >= n;
  }
  int num_entered() const {
    MutexLock lock(&mutex_);
    return num_entered_;
  }

 private:
  mutable Mutex mutex_;
  CondVar changed_;
  int permits_ ABSL_GUARDED_BY(mutex_) = 0;
  int num_entered_ ABSL_GUARDED_BY(mutex_) = 0;
};

class FakeModel final : public DecoderModel {
 public:
  FakeModel(int num_blocks, int block_tokens, int vocab_size)
      : block_tokens_(block_tokens), vocab_size_(vocab_size), cache_(static_cast<std::size_t>(num_blocks) * block_tokens) {}

  absl::StatusOr<Logits> Run(const StepBatch& batch) override {
    if (gate != nullptr) gate->Enter();
    ++num_runs;
    if (fail_next) {
      fail_next = false;
      return absl::InternalError("the fake model was told to fail");
    }
    if (!fails_with.ok()) return fails_with;
    logits_.clear();
    if (!batch.adapters.empty()) contexts_under_adapters.push_back(batch.context_lens);
    std::vector<std::uint64_t> hashes(batch.token_ids.size());
    const std::size_t num_sequences = batch.context_lens.size();
    if (batch.cu_query_lens.size() != num_sequences + 1 || batch.block_tables.size() != num_sequences) return Wrong("shapes");
    for (std::size_t s = 0; s < num_sequences; ++s) {
      const std::vector<std::int32_t>& table = batch.block_tables[s];
      const int begin = batch.cu_query_lens[s];
      const int end = batch.cu_query_lens[s + 1];
      const int context = batch.context_lens[s];
      if (begin >= end || static_cast<int>(table.size()) != (context + block_tokens_ - 1) / block_tokens_)
        return Wrong("block table");
      const int adapter = batch.adapter_of[s];
      const float scale = adapter < 0 ? 0 : batch.adapters[adapter].scale;
      for (int i = begin; i < end; ++i) {
        const int position = batch.positions[i];
        if (position != context - (end - i)) return Wrong("position");
        const std::int64_t slot = Slot(table, position);
        if (slot != batch.slot_mapping[i]) return Wrong("slot mapping");
        if (!written_.insert({num_runs, slot}).second) return Wrong("a slot written twice in one step");
        const std::uint64_t previous = position == 0 ? 0 : cache_[Slot(table, position - 1)];
        hashes[i] = cache_[slot] = NextHash(previous, TokenOf(batch, static_cast<std::size_t>(i)), scale);
      }
    }
    written_.clear();
    for (std::int32_t row : batch.logit_rows) {
      std::vector<float> logits = LogitsOf(hashes[row], vocab_size_);
      if (nan_after_token.has_value() && TokenOf(batch, static_cast<std::size_t>(row)) == *nan_after_token) {
        logits[vocab_size_ / 2] = std::numeric_limits<float>::quiet_NaN();
      }
      logits_.insert(logits_.end(), logits.begin(), logits.end());
    }
    return Logits{
        .data = logits_.data(), .num_rows = static_cast<std::int64_t>(batch.logit_rows.size()), .vocab_size = vocab_size_};
  }

  absl::Status CopyBlock(std::int32_t from, std::int32_t to) override {
    ++num_copies;
    for (int i = 0; i < block_tokens_; ++i) cache_[to * block_tokens_ + i] = cache_[from * block_tokens_ + i];
    return absl::OkStatus();
  }

  absl::Status Fence() override { return absl::OkStatus(); }

  Gate* gate = nullptr;
  bool fail_next = false;
  absl::Status fails_with;  // each step, unless OK
  std::optional<std::uint32_t> nan_after_token;
  int num_runs = 0;
  int num_copies = 0;
  std::vector<std::vector<std::int32_t>> contexts_under_adapters;  // of each step that names an adapter

 private:
  std::int64_t Slot(const std::vector<std::int32_t>& table, int position) const {
    return std::int64_t{table[position / block_tokens_]} * block_tokens_ + position % block_tokens_;
  }
  static absl::Status Wrong(const char* what) { return absl::InternalError(std::string("wrong batch: ") + what); }

  const int block_tokens_;
  const int vocab_size_;
  std::vector<std::uint64_t> cache_;
  std::vector<float> logits_;
  std::set<std::pair<int, std::int64_t>> written_;
};

// Token i is its i-th text; none is special.
class FakeTokenizer final : public Tokenizer {
 public:
  explicit FakeTokenizer(std::vector<std::string> tokens) { spec_.tokens = std::move(tokens); }
  // "a0 ", "a1 ", ...
  static std::shared_ptr<const Tokenizer> Numbered(int vocab_size) {
    std::vector<std::string> tokens;
    for (int i = 0; i < vocab_size; ++i) tokens.push_back("a" + std::to_string(i) + " ");
    return std::make_shared<FakeTokenizer>(std::move(tokens));
  }
  std::vector<TokenId> Encode(std::string_view text, ControlTokens /*control*/) const override {
    return std::vector<TokenId>(text.size(), 1);
  }
  std::vector<TokenId> EncodeMarked(std::string_view text, std::span<const TextRange> /*control_ranges*/) const override {
    return Encode(text, ControlTokens::kLiteral);
  }
  std::string Decode(std::span<const TokenId> ids, bool /*skip_special*/) const override {
    std::string text;
    for (TokenId id : ids) text += spec_.tokens[id];
    return text;
  }
  std::string_view TokenBytes(TokenId id, bool /*skip_special*/) const override { return spec_.tokens[id]; }
  const TokenizerSpec& spec() const override { return spec_; }
  std::size_t vocab_size() const override { return spec_.tokens.size(); }

 private:
  TokenizerSpec spec_;
};

}  // namespace tandem::testing

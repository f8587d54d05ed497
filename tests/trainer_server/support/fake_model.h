// Stand-ins for what the trainer's rooms are given: a tokenizer of bytes, a policy of one weight a token, a pool without a peer.
#pragma once

#include <unistd.h>
#include <atomic>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/base/mutex.h"
#include "common/base/random.h"
#include "common/model/prompt_encoder.h"
#include "common/sharing/pool_member.h"
#include "common/sharing/standing_allocator.h"
#include "gtest/gtest.h"
#include "trainer_server/plan/memory_plan.h"
#include "trainer_server/policy/policy_model.h"

namespace tandem {

inline constexpr TokenId kEndToken = 256;

// A directory of this process's own, gone when it ends.
inline std::string FreshDirectory(const std::string& name) {
  struct Cleaner {
    ~Cleaner() {
      std::error_code ignored;
      std::filesystem::remove_all(root, ignored);
    }
    const std::string root = absl::StrCat(::testing::TempDir(), "/trainer_test_", ::getpid());
  };
  static const Cleaner cleaner;
  const std::string path = cleaner.root + "/" + name;
  std::filesystem::remove_all(path);
  std::filesystem::create_directories(path);
  return path;
}
inline void WriteText(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }
inline std::string ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// A small model: two layers of 16, a vocabulary of the bytes and an end token.
inline ModelConfig SmallModel() {
  ModelConfig config;
  config.family = "llama";
  config.name = "small";
  config.num_layers = 1;
  config.hidden_size = 16;
  config.intermediate_size = 32;
  config.num_heads = 2;
  config.num_kv_heads = 1;
  config.head_dim = 8;
  config.vocab_size = 257;
  config.max_positions = 64;
  config.is_embedding_tied = true;
  config.end_token_ids = {kEndToken};
  return config;
}

// A node of 10 MiB on the CPU for SmallModel(), whose rollout server was heard.
inline NodeMemory SmallNode(std::uint64_t elastic_bytes = 4 << 20) {
  NodeMemory node;
  node.weights_bytes = node.model_bytes = 1 << 20;
  node.rollout_standing_bytes = 64 << 10;
  node.trainer_standing_bytes = 4 << 20;
  node.elastic_bytes = elastic_bytes;
  node.rollout = AssumedRolloutMemory(SmallModel(), Device::kCpu);
  return node;
}

class ByteTokenizer final : public Tokenizer {
 public:
  std::vector<TokenId> Encode(std::string_view text, ControlTokens) const override {
    std::vector<TokenId> ids;
    for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
    return ids;
  }
  std::vector<TokenId> EncodeMarked(std::string_view text, std::span<const TextRange>) const override {
    return Encode(text, ControlTokens::kLiteral);
  }
  std::string Decode(std::span<const TokenId> ids, bool) const override {
    std::string text;
    for (const TokenId id : ids) {
      if (id < 256) text += static_cast<char>(id);
    }
    return text;
  }
  std::string_view TokenBytes(TokenId, bool) const override { return {}; }
  const TokenizerSpec& spec() const override { return spec_; }
  std::size_t vocab_size() const override { return 257; }

 private:
  TokenizerSpec spec_;
};

// Chats become "role:content;" pieces; ParseMessages is the real one.
class ByteEncoder final : public PromptEncoder {
 public:
  absl::StatusOr<std::string> Render(const std::vector<ChatMessage>& messages, const ChatOptions&) const override {
    std::string text;
    for (const ChatMessage& message : messages) text += message.role + ":" + message.content + ";";
    return text;
  }
  absl::StatusOr<std::vector<TokenId>> EncodeChat(const std::vector<ChatMessage>& messages,
                                                  const ChatOptions& options) const override {
    TANDEM_ASSIGN_OR_RETURN(const std::string text, Render(messages, options));
    return EncodeText(options.template_arguments + text);
  }
  absl::StatusOr<std::optional<std::vector<TokenId>>> EncodeBehind(const std::vector<ChatMessage>& messages,
                                                                   std::size_t answer_index,
                                                                   const ChatOptions& options) const override {
    const auto behind = messages.begin() + static_cast<std::ptrdiff_t>(answer_index) + 1;
    TANDEM_ASSIGN_OR_RETURN(const std::string text, Render({behind, messages.end()}, options));
    return std::optional(EncodeText(";" + text));
  }
  std::vector<TokenId> EncodeText(std::string_view text) const override {
    return ByteTokenizer().Encode(text, ControlTokens::kLiteral);
  }
};

inline double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// log p(token) = log sigmoid(w[token mod n]): a policy whose gradient is known and whose log-probs follow its weights.
class FakePolicy final : public PolicyModel {
 public:
  FakePolicy(const AdapterMemory& memory, AdapterLayout layout)
      : masters_(Floats(memory.masters)),
        gradients_(Floats(memory.gradients)),
        layout_(std::move(layout)),
        begin_(masters_.begin(), masters_.end()),
        reference_(begin_) {}

  absl::Status InitializeAdapters(std::uint64_t seed) override {
    for (std::size_t i = 0; i < masters_.size(); ++i) masters_[i] = static_cast<float>(RandomUniform(seed, i) - 0.5);
    begin_.assign(masters_.begin(), masters_.end());
    reference_ = begin_;
    return absl::OkStatus();
  }
  absl::Status SetReference(std::span<const std::byte> slot, const AdapterLayout&, float) override {
    reference_ = {static_cast<const float*>(static_cast<const void*>(slot.data())), slot.size() / sizeof(float)};
    return absl::OkStatus();
  }
  absl::StatusOr<HeadScores> Score(const MicroBatch& batch, PolicyKind kind) override {
    ++num_scores;
    if (at) at("score");
    return Evaluate(batch, kind == PolicyKind::kPolicy ? std::span<const float>(masters_) : reference_);
  }
  absl::StatusOr<HeadScores> Forward(const MicroBatch& batch, bool, std::uint64_t dropout_stream) override {
    if (batch.token_ids.size() > max_rows) {
      return absl::ResourceExhaustedError(absl::StrCat("no memory for ", batch.token_ids.size(), " rows"));
    }
    if (at) at("forward");
    ++num_forwards;
    dropout_streams.push_back(dropout_stream);
    forwarded.push_back(batch.token_ids);
    batch_ = batch;
    HeadScores scores = Evaluate(batch, masters_);
    if (num_forwards == nan_at_forward) scores.logprobs[0] = std::nan("");
    return scores;
  }
  absl::Status Backward(std::span<const double> grad_logprobs, std::span<const double>) override {
    if (at) at("backward");
    for (std::size_t row = 0; row < batch_.head_targets.size(); ++row) {
      const std::size_t k = Index(batch_.head_targets[row]);
      gradients_[k] += static_cast<float>(grad_logprobs[row] * (1 - Sigmoid(masters_[k])));
    }
    return absl::OkStatus();
  }
  absl::Status ZeroGradients() override {
    std::ranges::fill(gradients_, 0.0f);
    return absl::OkStatus();
  }
  const AdapterLayout& adapter_layout() const override { return layout_; }

  std::function<void(const char* moment)> at;  // called in "score", "forward", "backward"; may be empty
  int num_scores = 0, num_forwards = 0, nan_at_forward = 0;
  std::size_t max_rows = SIZE_MAX;  // of a forward pass; more find no memory
  std::vector<std::uint64_t> dropout_streams;
  std::vector<std::vector<std::int64_t>> forwarded;  // token ids of each forward pass

 private:
  static std::span<float> Floats(std::span<std::byte> bytes) {
    return {static_cast<float*>(static_cast<void*>(bytes.data())), bytes.size() / sizeof(float)};
  }
  std::size_t Index(std::int64_t target) const { return static_cast<std::size_t>(target) % masters_.size(); }
  HeadScores Evaluate(const MicroBatch& batch, std::span<const float> weights) const {
    HeadScores scores;
    for (const std::int64_t target : batch.head_targets) {
      scores.logprobs.push_back(std::log(Sigmoid(weights[Index(target)])));
      scores.entropies.push_back(0.5 + 0.001 * static_cast<double>(target));
    }
    return scores;
  }

  const std::span<float> masters_, gradients_;
  const AdapterLayout layout_;
  std::vector<float> begin_;  // the reference where none is set
  std::span<const float> reference_;
  MicroBatch batch_;
};

// One region of heap memory for both halves; the lease is a flag.
class FakePool final : public PoolMember {
 public:
  FakePool() : memory_(kBytes) {}
  v1::PoolService::Service* service() override { return nullptr; }
  Device device() const override { return Device::kCpu; }
  absl::Status health() const override { return absl::OkStatus(); }
  void Offer(PoolEvents) override {}
  void Stop() override {}
  std::span<std::byte> region(v1::RegionKind kind) const override {
    const std::span<std::byte> all(memory_.data(), memory_.size());
    return kind == v1::REGION_KIND_ELASTIC ? all.subspan(kBytes / 2) : all.first(kBytes / 2);
  }
  std::uint64_t offset_of(const void* address) const override {
    return static_cast<std::uint64_t>(static_cast<const std::byte*>(address) - memory_.data());
  }
  std::byte* address_of(std::uint64_t offset) const override { return memory_.data() + offset; }
  v1::PoolManifest manifest() const override { return {}; }
  bool made_pool() const override { return true; }
  bool is_peer_attached() const override { return true; }
  std::vector<v1::OwnedBytes> RegionLedger() const override {
    std::vector<v1::OwnedBytes> ledger(2);
    ledger[0].set_owner("trainer_standing");
    ledger[0].set_role(v1::ROLE_TRAINER);
    ledger[1].set_owner("elastic");
    for (v1::OwnedBytes& entry : ledger) {
      entry.set_bytes(kBytes / 2);
      entry.set_in_pool(true);
    }
    return ledger;
  }
  absl::StatusOr<v1::LeaseState> AcquireElastic(v1::StreamMode, MonotonicTime) override {
    if (num_acquire_failures > 0) {
      --num_acquire_failures;
      return absl::UnavailableError("the rollout server is away");
    }
    if (at) at("acquire");
    TANDEM_CHECK(!holds_, "acquired twice");
    holds_ = true;
    ++num_phases;
    return v1::LeaseState();
  }
  absl::Status ReleaseElastic(MonotonicTime) override {
    if (at) at("release");
    if (num_release_failures > 0) {
      --num_release_failures;
      return absl::UnavailableError("the rollout server is away");
    }
    holds_ = false;
    return absl::OkStatus();
  }
  v1::LeaseState lease() const override { return {}; }
  bool holds_elastic() const override { return holds_; }

  std::function<void(const char* moment)> at;  // called in "acquire", "release"; may be empty
  std::atomic<int> num_acquire_failures = 0, num_release_failures = 0, num_phases = 0;

 private:
  static constexpr std::size_t kBytes = 8 << 20;
  mutable std::vector<std::byte> memory_;
  std::atomic<bool> holds_ = false;
};

// First fit over a list; enough for a few pieces. Thread-safe.
class FakeStanding final : public StandingAllocator {
 public:
  explicit FakeStanding(std::span<std::byte> region) : region_(region) {}
  absl::StatusOr<std::span<std::byte>> Allocate(std::uint64_t size_bytes, const std::string& owner) override {
    MutexLock lock(&mutex_);
    std::size_t begin = 0;
    auto place = pieces_.begin();
    for (; place != pieces_.end() && place->begin < begin + size_bytes; ++place)
      begin = (place->begin + place->size + 255) & ~255ul;
    if (begin + size_bytes > region_.size()) return absl::ResourceExhaustedError(owner);
    pieces_.insert(place, {begin, size_bytes, owner});
    const std::span<std::byte> piece = region_.subspan(begin, size_bytes);
    std::ranges::fill(piece, std::byte{0});
    return piece;
  }
  void Free(std::span<std::byte> piece) override {
    MutexLock lock(&mutex_);
    pieces_.remove_if([&](const Piece& p) { return region_.data() + p.begin == piece.data(); });
  }
  std::vector<v1::OwnedBytes> Ledger() const override {
    MutexLock lock(&mutex_);
    std::vector<v1::OwnedBytes> ledger(1);
    std::uint64_t used = 0;
    for (const Piece& piece : pieces_) {
      used += piece.size;
      v1::OwnedBytes& entry = ledger.emplace_back();
      entry.set_owner(piece.owner);
      entry.set_bytes(piece.size);
      entry.set_in_pool(true);
    }
    ledger[0].set_owner("free");
    ledger[0].set_bytes(region_.size() - used);
    ledger[0].set_in_pool(true);
    return ledger;
  }
  std::size_t num_pieces() const {
    MutexLock lock(&mutex_);
    return pieces_.size();
  }

 private:
  struct Piece {
    std::size_t begin, size;
    std::string owner;
  };
  const std::span<std::byte> region_;
  mutable Mutex mutex_;
  std::list<Piece> pieces_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tandem

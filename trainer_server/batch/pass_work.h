// What a forward and backward pass over packed rows has to compute. A prompt that completions share counts once, as it is
// computed.
#pragma once

#include <cstdint>

#include "common/model/model_config.h"
#include "trainer_server/batch/micro_batch.h"

namespace tandem {

struct PassWork {
  double rows = 0;           // through the layers
  double head_rows = 0;      // through the head
  double attended_keys = 0;  // twice the visible keys, summed over the rows: T^2 of a sequence of T rows

  void Add(const MicroBatch& batch) {
    const auto square = [](double x) { return x * x; };
    rows += static_cast<double>(batch.token_ids.size());
    head_rows += static_cast<double>(batch.head_rows.size());
    std::int32_t counted_prompt = -1;
    for (const PackedCompletion& completion : batch.completions) {
      const double prompt = completion.prompt_end - completion.prompt_begin, own = completion.end - completion.begin;
      attended_keys += square(prompt + own) - square(prompt);
      if (completion.prompt_begin != counted_prompt) attended_keys += square(prompt);
      counted_prompt = completion.prompt_begin;
    }
  }
};

namespace internal {

inline double LinearElements(const ModelConfig& config) {
  const double d = config.hidden_size, f = config.intermediate_size, q = config.q_size(), kv = config.kv_size();
  return config.num_layers * (d * (q + 2 * kv) + q * d + 3 * d * f);
}
inline double HeadElements(const ModelConfig& config) { return static_cast<double>(config.hidden_size) * config.vocab_size; }
// Of one causal forward pass.
inline double AttentionFlops(const ModelConfig& config, const PassWork& work) {
  return 2 * work.attended_keys * config.q_size() * config.num_layers;
}

}  // namespace internal

// FLOP of both passes over a frozen base, whose weights have no gradients: 4 N T + 4 H C + 3.5 x 2 T^2 W L for a sequence of T
// rows, C of them scored, with N parameters in linear layers, H in the head, W = heads x head size and L layers.
inline double UsefulFlops(const ModelConfig& config, const PassWork& work) {
  return 4 * internal::LinearElements(config) * work.rows + 4 * internal::HeadElements(config) * work.head_rows +
         3.5 * internal::AttentionFlops(config, work);
}

// With one whole recomputation of every layer: 6 N T + 4 H C + 4.5 x 2 T^2 W L.
inline double ExecutedFlops(const ModelConfig& config, const PassWork& work) {
  return UsefulFlops(config, work) + 2 * internal::LinearElements(config) * work.rows + internal::AttentionFlops(config, work);
}

}  // namespace tandem

// The linear log-prob head: log-prob, entropy and their gradients from hidden states, without logits beyond one tile of
// (rows x vocabulary columns). Formulas: u = h . w_j; z = softcap tanh(logit_scale u / softcap) / temperature (no softcap:
// logit_scale u / temperature).
//
// With a frozen head the unit gradient v = d logp / dh does not depend on the loss, so one pass makes it beside the log-prob and
// the backward pass is dh = g v. The target column stays out of the sum and enters once with 1 - p = -expm1(logp): the form in
// which a confident token keeps its direction. An entropy bonus or a trained head takes the two-pass form: LinearLogprobBackward.
//
// T is float, or double for tests. Functions throw c10::Error; scratch is row_tile x (vocab_tile + width) elements.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tandem {

template <typename T>
struct LinearHead {
  const T* weight = nullptr;  // [vocab_size, width]
  std::int64_t vocab_size = 0;
  std::int64_t width = 0;
  double temperature = 1;
  double logit_scale = 1;
  double softcap = 0;  // 0: none
  std::int64_t row_tile = 256;
  std::int64_t vocab_tile = 2048;
};

// Per row, natural logarithms, at the head's temperature.
struct LinearLogprobs {
  std::vector<double> logprobs;
  std::vector<double> lse;
  std::vector<double> entropies;
};

// hidden: [targets.size(), width]. Targets lie in [0, vocab_size). `unit_gradient` null: not computed; else [targets.size(),
// width], may be `hidden` itself.
template <typename T>
LinearLogprobs LinearLogprobForward(const LinearHead<T>& head, const T* hidden, std::span<const std::int64_t> targets,
                                    T* unit_gradient);

// grad_hidden [rows, width] <- sum of dL/dlogp dlogp/dh and dL/dH dH/dh. `grad_weight` null (frozen head), else [vocab_size,
// width], added to.
template <typename T>
void LinearLogprobBackward(const LinearHead<T>& head, const T* hidden, std::span<const std::int64_t> targets,
                           const LinearLogprobs& forward, std::span<const double> grad_logprobs,
                           std::span<const double> grad_entropies, T* grad_hidden, T* grad_weight);

}  // namespace tandem

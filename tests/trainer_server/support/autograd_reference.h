// A Llama with adapters written in LibTorch operations, differentiated by its autograd on the CPU: what PyTorch computes for the
// same weights, in fp32 or in bf16 throughout (residual stream, products, activations; norms, rotary embedding and log-softmax in
// fp32, as transformers does).
#pragma once

#include <vector>

#include "tests/support/naive_transformer.h"
#include "trainer_server/batch/micro_batch.h"
#include "trainer_server/policy/policy_model.h"

namespace tandem::testing {

struct AutogradResult {
  std::vector<double> logprobs;
  std::vector<double> gradient;  // of sum(grad_logprobs x logprobs), in AdapterLayout order
};
// Requires: a batch of one prompt with one completion; no bias, no norms of heads.
AutogradResult RunAutograd(const TinyModel& base, const PolicyOptions& options, const TinyAdapter& start, const MicroBatch& batch,
                           const std::vector<double>& grad_logprobs, bool is_bf16);

}  // namespace tandem::testing

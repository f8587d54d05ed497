// PolicyModel over a PolicyNetwork and its backend: the part that is the same on every device. Included by the files that make
// one.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/base/random.h"
#include "common/gpu/device.h"
#include "common/torch/run_torch.h"
#include "trainer_server/policy/policy_model.h"
#include "trainer_server/policy/policy_network.h"

namespace tandem {

// Everything inside the model's limits; rows inside the batch. Errors: INVALID_ARGUMENT naming the fault.
absl::Status CheckMicroBatch(const ModelConfig& config, const MicroBatch& batch);

// Views of arrays of T, and of codes, in the weights region.
template <typename T>
NetworkWeights<T> WeightsAt(const WeightLayout& layout, const std::byte* base) {
  const auto at = [base](const TensorPlace& place) { return reinterpret_cast<const T*>(base + place.begin_bytes); };
  const auto optional = [&](const std::optional<TensorPlace>& place) { return place.has_value() ? at(*place) : nullptr; };
  NetworkWeights<T> weights;
  const auto linear = [&](const LinearPlace& place) -> LinearWeight<T> {
    if (!IsQuantized(layout.format)) return at(place);
    return QuantizedMatrixAt(layout, place, base);
  };
  const auto codes = [](const LinearPlace& place) { return place.shape[0] * place.shape[1]; };
  weights.embedding = at(layout.embedding);
  for (const LayerPlaces& places : layout.layers) {
    if (IsQuantized(layout.format)) {
      weights.layer_codes =
          std::max(weights.layer_codes, codes(places.qkv) + codes(places.o) + codes(places.gate_up) + codes(places.down));
    }
    weights.layers.push_back({.input_norm = at(places.input_norm),
                              .qkv = linear(places.qkv),
                              .after_qkv = {optional(places.qkv_bias), optional(places.q_norm), optional(places.k_norm)},
                              .o = linear(places.o),
                              .post_norm = at(places.post_norm),
                              .gate_up = linear(places.gate_up),
                              .down = linear(places.down)});
  }
  weights.final_norm = at(layout.final_norm);
  weights.head = at(layout.head);
  return weights;
}

template <typename T>
LinearHead<T> HeadAt(const ModelConfig& config, const T* weight, const PolicyOptions& options) {
  LinearHead<T> head;
  head.weight = weight;
  head.vocab_size = config.vocab_size;
  head.width = config.hidden_size;
  head.temperature = options.temperature;
  if (options.logit_chunk > 0) head.row_tile = options.logit_chunk;
  return head;
}

template <typename Backend>
class NetworkPolicyModel : public PolicyModel {
 public:
  NetworkPolicyModel(const ModelConfig& config, NetworkWeights<typename Backend::Element> weights, Backend backend, Device device,
                     const AdapterMemory& memory, const PolicyOptions& options, AdapterLayout adapter_layout)
      : config_(config),
        options_(options),
        device_(device),
        memory_(memory),
        adapter_layout_(std::move(adapter_layout)),
        network_(config, std::move(weights), std::move(backend)) {}

  absl::Status InitializeAdapters(std::uint64_t seed) override {
    std::vector<float> values(adapter_layout_.total_bytes / sizeof(float));
    for (std::size_t i = 0; i < adapter_layout_.places.size(); ++i) {
      const AdapterPlace& place = adapter_layout_.places[i];
      const double bound = 1 / std::sqrt(static_cast<double>(place.shape.inputs));
      float* a = values.data() + place.a_begin_bytes / sizeof(float);
      const std::uint64_t place_seed = DeriveSeed(seed, i);
      for (std::int64_t j = 0; j < static_cast<std::int64_t>(adapter_layout_.rank) * place.shape.inputs; ++j) {
        a[j] = static_cast<float>((2 * RandomUniform(place_seed, static_cast<std::uint64_t>(j)) - 1) * bound);
      }
    }
    return CopyFromHost(device_, memory_.masters.data(), values.data(), values.size() * sizeof(float));
  }

  absl::Status SetReference(std::span<const std::byte> slot, const AdapterLayout& layout, float scale) override {
    if (slot.size() < layout.total_bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("reference adapter: a slot of ", slot.size(), " bytes, its layout needs ", layout.total_bytes));
    }
    if (layout.places.size() != layout.targets.size() * static_cast<std::size_t>(config_.num_layers)) {
      return absl::InvalidArgumentError(absl::StrCat("reference adapter: ", layout.places.size(), " places for ",
                                                     layout.targets.size(), " targets in ", config_.num_layers, " layers"));
    }
    reference_ = Reference{slot.first(layout.total_bytes), layout, static_cast<double>(scale)};
    return absl::OkStatus();
  }

  absl::StatusOr<HeadScores> Score(const MicroBatch& batch, PolicyKind kind) override {
    TANDEM_RETURN_IF_ERROR(CheckMicroBatch(config_, batch));
    HeadScores scores;
    TANDEM_RETURN_IF_ERROR(RunTorch(Describe("scoring", batch), [&] {
      std::optional<Active> active;
      if (kind == PolicyKind::kPolicy) {
        active = Activate(memory_.masters, adapter_layout_, static_cast<double>(options_.scale), {});
      } else if (reference_.has_value()) {
        active = Activate(reference_->slot, reference_->layout, reference_->scale, {});
      }
      scores = ToScores(network_.Score(batch, active.has_value() ? &active->lora : nullptr));
      return absl::OkStatus();
    }));
    return scores;
  }

  absl::StatusOr<HeadScores> Forward(const MicroBatch& batch, bool needs_entropy_gradient,
                                     std::uint64_t dropout_stream) override {
    DropKept();
    TANDEM_RETURN_IF_ERROR(CheckMicroBatch(config_, batch));
    const LoraDropout dropout{.probability = options_.dropout, .stream = DeriveSeed(options_.seed, dropout_stream)};
    HeadScores scores;
    const absl::Status status = RunTorch(Describe("forward pass", batch), [&] {
      kept_adapter_ = Activate(memory_.masters, adapter_layout_, static_cast<double>(options_.scale), memory_.gradients);
      scores = ToScores(network_.Forward(batch, kept_adapter_->lora, dropout, needs_entropy_gradient));
      return absl::OkStatus();
    });
    if (status.ok()) return scores;
    DropKept();
    return status;
  }

  absl::Status Backward(std::span<const double> grad_logprobs, std::span<const double> grad_entropies) override {
    if (!network_.has_kept()) return absl::FailedPreconditionError("backward pass: no forward pass is waiting for it");
    const std::size_t rows = network_.num_kept_head_rows();
    if (grad_logprobs.size() != rows || (!grad_entropies.empty() && grad_entropies.size() != rows)) {
      return absl::InvalidArgumentError(absl::StrCat("backward pass: ", grad_logprobs.size(), " log-prob and ",
                                                     grad_entropies.size(), " entropy gradients for ", rows, " head rows"));
    }
    if (!grad_entropies.empty() && !network_.keeps_entropy_gradient()) {
      return absl::FailedPreconditionError("backward pass: entropy gradients, but the forward pass was not asked to allow them");
    }
    const absl::Status status = RunTorch("backward pass", [&] {
      network_.Backward(grad_logprobs, grad_entropies);
      network_.backend().Fence();
      return absl::OkStatus();
    });
    DropKept();
    return status;
  }

  absl::Status ZeroGradients() override { return ZeroMemory(device_, memory_.gradients.data(), memory_.gradients.size()); }
  const AdapterLayout& adapter_layout() const override { return adapter_layout_; }
  PassMemory last_pass() const override { return network_.backend().last_pass(); }

 private:
  using Element = typename Backend::Element;
  using Sum = typename Backend::Sum;
  // An adapter as the network multiplies with it. Made anew for each pass: the masters move between passes.
  struct Active {
    typename Backend::AdapterValues values;
    LoraSet<Element, Sum> lora;
  };
  struct Reference {
    std::span<const std::byte> slot;
    AdapterLayout layout;
    double scale;
  };

  static std::string Describe(const char* what, const MicroBatch& batch) {
    return absl::StrCat(what, " of ", batch.token_ids.size(), " tokens");
  }
  static HeadScores ToScores(LinearLogprobs logprobs) {
    return {.logprobs = std::move(logprobs.logprobs), .entropies = std::move(logprobs.entropies)};
  }
  void DropKept() {
    network_.DropKept();
    kept_adapter_.reset();
  }
  // `gradients` empty: none are wanted.
  Active Activate(std::span<const std::byte> slot, const AdapterLayout& layout, double scale, std::span<std::byte> gradients) {
    Active active{network_.backend().Adapter(slot), {}};
    LoraSet<Element, Sum>& lora = active.lora;
    lora.rank = layout.rank;
    lora.scale = scale;
    lora.layers.resize(static_cast<std::size_t>(config_.num_layers));
    const auto gradient_at = [&](std::uint64_t begin_bytes) {
      return gradients.empty() ? nullptr : reinterpret_cast<Sum*>(gradients.data() + begin_bytes);
    };
    for (const AdapterPlace& place : layout.places) {
      lora.layers[static_cast<std::size_t>(place.layer)][static_cast<std::size_t>(place.kind)] = {
          .a = active.values.values + place.a_begin_bytes / sizeof(float),
          .b = active.values.values + place.b_begin_bytes / sizeof(float),
          .grad_a = gradient_at(place.a_begin_bytes),
          .grad_b = gradient_at(place.b_begin_bytes)};
    }
    return active;
  }

  const ModelConfig config_;
  const PolicyOptions options_;
  const Device device_;
  const AdapterMemory memory_;
  const AdapterLayout adapter_layout_;
  std::optional<Reference> reference_;
  std::optional<Active> kept_adapter_;  // of a Forward that waits for its Backward
  PolicyNetwork<Backend> network_;
};

}  // namespace tandem

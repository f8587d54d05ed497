// What is kept of every layer between a forward pass and its backward pass, in host memory: the CPU's. cuda_layer_inputs.h has
// the GPU's, with the same functions, which this file documents. Confined to one thread.
#pragma once

#include <cstdint>

#include "common/torch/buffer.h"

namespace tandem {

template <typename T, typename Sum>
struct KeptLayer {
  T* input = nullptr;      // [num_rows, d]
  T* attention = nullptr;  // [num_rows, q], attention's output; null: not kept, the backward pass computes it again
  Sum* lse = nullptr;      // num_rows x num_heads; with attention
};

template <typename T>
class HostLayerInputs {
 public:
  HostLayerInputs(int num_layers, std::int64_t num_elements) : inputs_(num_layers * num_elements), num_elements_(num_elements) {}

  bool keeps_attention() const { return false; }
  // Where layer `layer` is to be written. Layers come in ascending order.
  KeptLayer<T, T> Place(int layer) { return {inputs_.data() + layer * num_elements_}; }
  // It has been written.
  void Keep(int) {}
  // What was written, to be read until Release. Layers come in descending order, from the last.
  KeptLayer<T, T> Fetch(int layer) { return Place(layer); }
  // It will not be read any more.
  void Release(int) {}

 private:
  const Buffer<T> inputs_;
  const std::int64_t num_elements_;
};

}  // namespace tandem

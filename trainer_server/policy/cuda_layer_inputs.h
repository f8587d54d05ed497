// What is kept of every layer between a forward pass and its backward pass on the GPU, its input and, where there is room,
// attention's output: that of the last layers stays in device memory, the others' goes to page-locked host memory on a side
// stream and comes back ahead of its use.
//
// A ring of `num_slots` device buffers: what is kept of layer l is in slot l mod num_slots. Forward, a slot is written again once
// its earlier input has reached the host; so after the last layer the ring holds the last num_slots inputs, which never travel.
// Backward, a slot whose input has been used is filled with that of the layer num_slots below. num_slots = num_layers: nothing
// travels.
//
// Example, 5 layers, 2 slots: forward writes 0 1 | 2 3 | 4, copying 0, 1, 2 out; backward reads 4, 3 from the ring, while 2, 1, 0
// come in as slots fall free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/gpu/stage_clock.h"
#include "common/gpu/stream.h"
#include "common/torch/buffer.h"
#include "trainer_server/policy/layer_inputs.h"

namespace tandem {

// Page-locked memory that one pass at a time keeps inputs in. It is pinned when first needed and kept: pinning is slow.
class LayerInputHost {
 public:
  // Room for `size_bytes`; what was there is lost when it grows, which it does by a quarter at least, up to `limit_bytes`.
  // Errors: RESOURCE_EXHAUSTED naming the size.
  absl::Status Reserve(std::uint64_t size_bytes, std::uint64_t limit_bytes);
  std::byte* data() const { return memory_ == nullptr ? nullptr : memory_->bytes().data(); }
  std::uint64_t size_bytes() const { return memory_ == nullptr ? 0 : memory_->bytes().size(); }

 private:
  std::unique_ptr<HostBuffer> memory_;
};

// Bytes, not elements: the same class for every format.
class CudaLayerInputBytes {
 public:
  // `host` has room for (num_layers - num_slots) inputs. `compute`: the stream of the pass. `clock`: of the copies, or null.
  // Everything outlives this.
  CudaLayerInputBytes(int num_layers, std::int64_t num_slots, std::uint64_t input_bytes, LayerInputHost* host, Stream* compute,
                      Stream* copy, StageClock* clock);
  // The compute stream waits for the copies under way: the ring's memory goes to somebody else in its order.
  ~CudaLayerInputBytes();
  CudaLayerInputBytes(const CudaLayerInputBytes&) = delete;
  CudaLayerInputBytes& operator=(const CudaLayerInputBytes&) = delete;

  std::byte* Place(int layer);
  void Keep(int layer);
  std::byte* Fetch(int layer);
  void Release(int layer);
  std::uint64_t offloaded_bytes() const { return input_bytes_ * static_cast<std::uint64_t>(num_layers_ - num_slots_); }

 private:
  struct Slot {
    void* copied = nullptr;   // cudaEvent_t: the last copy out of or into the slot is done
    void* touched = nullptr;  // cudaEvent_t: the compute stream has written, or has used, what is in it
    bool is_copying = false;  // `copied` has been recorded
  };
  Slot& SlotOf(int layer) { return slots_[static_cast<std::size_t>(layer % num_slots_)]; }
  std::byte* DevicePlace(int layer) const;
  std::byte* HostPlace(int layer) const;
  // On the copy stream, behind what the compute stream has done so far.
  void Copy(const char* stage, Slot* slot, std::byte* to, const std::byte* from);
  void AwaitCopy(const Slot& slot);

  const int num_layers_;
  const int num_slots_;
  const std::uint64_t input_bytes_;
  LayerInputHost* const host_;
  Stream* const compute_;
  Stream* const copy_;
  StageClock* const clock_;
  const Buffer<std::byte, Device::kCuda> ring_;
  std::vector<Slot> slots_;
};

// See KeptLayer. A slot holds a layer's input and, where it is kept, its attention output and log-sum-exps.
template <typename T>
class CudaLayerInputs {
 public:
  struct Shape {
    int num_layers = 0;
    std::int64_t num_rows = 0;
    std::int64_t width = 0;            // of the input
    std::int64_t attention_width = 0;  // q; 0: not kept
    std::int64_t num_heads = 0;

    std::uint64_t input_bytes() const { return Padded(num_rows * width * static_cast<std::int64_t>(sizeof(T))); }
    std::uint64_t attention_bytes() const { return Padded(num_rows * attention_width * static_cast<std::int64_t>(sizeof(T))); }
    std::uint64_t slot_bytes() const {
      return input_bytes() + attention_bytes() +
             (attention_width == 0 ? 0 : Padded(num_rows * num_heads * static_cast<std::int64_t>(sizeof(float))));
    }

   private:
    static std::uint64_t Padded(std::int64_t bytes) { return (static_cast<std::uint64_t>(bytes) + 255) / 256 * 256; }
  };
  CudaLayerInputs(const Shape& shape, std::int64_t num_slots, LayerInputHost* host, Stream* compute, Stream* copy,
                  StageClock* clock)
      : shape_(shape), bytes_(shape.num_layers, num_slots, shape.slot_bytes(), host, compute, copy, clock) {}

  bool keeps_attention() const { return shape_.attention_width > 0; }
  KeptLayer<T, float> Place(int layer) { return At(bytes_.Place(layer)); }
  void Keep(int layer) { bytes_.Keep(layer); }
  KeptLayer<T, float> Fetch(int layer) { return At(bytes_.Fetch(layer)); }
  void Release(int layer) { bytes_.Release(layer); }

 private:
  KeptLayer<T, float> At(std::byte* slot) const {
    KeptLayer<T, float> kept{.input = static_cast<T*>(static_cast<void*>(slot))};
    if (!keeps_attention()) return kept;
    slot += shape_.input_bytes();
    kept.attention = static_cast<T*>(static_cast<void*>(slot));
    kept.lse = static_cast<float*>(static_cast<void*>(slot + shape_.attention_bytes()));
    return kept;
  }

  const Shape shape_;
  CudaLayerInputBytes bytes_;
};

}  // namespace tandem

// The layers' inputs between a forward pass and its backward pass on the GPU: those of the last layers stay in device memory, the
// others go to page-locked host memory on a side stream and come back ahead of their use.
//
// A ring of `num_slots` device buffers: layer l's input is in slot l mod num_slots. Forward, a slot is written again once its
// earlier input has reached the host; so after the last layer the ring holds the last num_slots inputs, which never travel.
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

#include "common/gpu/stream.h"
#include "common/torch/buffer.h"

namespace tandem {

// Page-locked memory that one pass at a time keeps inputs in. It is pinned when first needed and kept: pinning is slow.
class LayerInputHost {
 public:
  // Room for `size_bytes`; what was there is lost when it grows. Errors: RESOURCE_EXHAUSTED naming the size.
  absl::Status Reserve(std::uint64_t size_bytes);
  std::byte* data() const { return memory_ == nullptr ? nullptr : memory_->bytes().data(); }
  std::uint64_t size_bytes() const { return memory_ == nullptr ? 0 : memory_->bytes().size(); }

 private:
  std::unique_ptr<HostBuffer> memory_;
};

// Bytes of one pass's inputs, not elements: the same class for every format.
class CudaLayerInputBytes {
 public:
  // `host` has room for (num_layers - num_slots) inputs. `compute`: the stream of the pass. Everything outlives this.
  CudaLayerInputBytes(int num_layers, std::int64_t num_slots, std::uint64_t input_bytes, LayerInputHost* host, Stream* compute,
                      Stream* copy);
  // The compute stream waits for the copies under way: the ring's memory goes to somebody else in its order.
  ~CudaLayerInputBytes();
  CudaLayerInputBytes(const CudaLayerInputBytes&) = delete;
  CudaLayerInputBytes& operator=(const CudaLayerInputBytes&) = delete;

  std::byte* Place(int layer);
  void Keep(int layer);
  const std::byte* Fetch(int layer);
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
  void Copy(Slot* slot, std::byte* to, const std::byte* from);
  void AwaitCopy(const Slot& slot);

  const int num_layers_;
  const int num_slots_;
  const std::uint64_t input_bytes_;
  LayerInputHost* const host_;
  Stream* const compute_;
  Stream* const copy_;
  const Buffer<std::byte, Device::kCuda> ring_;
  std::vector<Slot> slots_;
};

template <typename T>
class CudaLayerInputs {
 public:
  CudaLayerInputs(int num_layers, std::int64_t num_slots, std::int64_t num_elements, LayerInputHost* host, Stream* compute,
                  Stream* copy)
      : bytes_(num_layers, num_slots, static_cast<std::uint64_t>(num_elements) * sizeof(T), host, compute, copy) {}

  T* Place(int layer) { return static_cast<T*>(static_cast<void*>(bytes_.Place(layer))); }
  void Keep(int layer) { bytes_.Keep(layer); }
  const T* Fetch(int layer) { return static_cast<const T*>(static_cast<const void*>(bytes_.Fetch(layer))); }
  void Release(int layer) { bytes_.Release(layer); }
  std::uint64_t offloaded_bytes() const { return bytes_.offloaded_bytes(); }

 private:
  CudaLayerInputBytes bytes_;
};

}  // namespace tandem

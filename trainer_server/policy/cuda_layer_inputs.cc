#include "trainer_server/policy/cuda_layer_inputs.h"

#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#include <algorithm>

#include "common/base/log.h"
#include "common/base/units.h"
#include "common/gpu/cuda_status.h"
#include "common/torch/check_status.h"

namespace tandem {
namespace {

void CheckCuda(cudaError_t error, const char* what) { CheckStatus(CudaToStatus(error, what)); }

cudaStream_t Handle(const Stream* stream) { return static_cast<cudaStream_t>(stream->handle()); }
cudaEvent_t Event(void* event) { return static_cast<cudaEvent_t>(event); }

}  // namespace

absl::Status LayerInputHost::Reserve(std::uint64_t size_bytes, std::uint64_t limit_bytes) {
  const std::uint64_t had_bytes = this->size_bytes();
  if (size_bytes <= had_bytes) return absl::OkStatus();
  size_bytes = std::max(size_bytes, std::min(limit_bytes, had_bytes + had_bytes / 4));
  memory_.reset();  // the old memory first: a peak of one, not two
  absl::StatusOr<std::unique_ptr<HostBuffer>> memory = HostBuffer::Create(Device::kCuda, size_bytes);
  if (!memory.ok()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("page-locked host memory for layer inputs: ", FormatBytes(size_bytes), ": ", memory.status().message()));
  }
  memory_ = *std::move(memory);
  return absl::OkStatus();
}

CudaLayerInputBytes::CudaLayerInputBytes(int num_layers, std::int64_t num_slots, std::uint64_t input_bytes, LayerInputHost* host,
                                         Stream* compute, Stream* copy, StageClock* clock)
    : num_layers_(num_layers),
      num_slots_(static_cast<int>(num_slots)),
      input_bytes_(input_bytes),
      host_(host),
      compute_(compute),
      copy_(copy),
      clock_(clock),
      ring_(num_slots * static_cast<std::int64_t>(input_bytes)),
      slots_(static_cast<std::size_t>(num_slots)) {
  TORCH_CHECK(num_slots >= 1 && num_slots <= num_layers, num_slots, " slots for the inputs of ", num_layers, " layers");
  TORCH_CHECK(host->size_bytes() >= offloaded_bytes(), offloaded_bytes(), " bytes of layer inputs, host memory has ",
              host->size_bytes());
  for (Slot& slot : slots_) {
    for (void** event : {&slot.copied, &slot.touched}) {
      cudaEvent_t made = nullptr;
      CheckCuda(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "making an event");
      *event = made;
    }
  }
}

CudaLayerInputBytes::~CudaLayerInputBytes() {
  for (const Slot& slot : slots_) {
    cudaError_t error = cudaSuccess;
    if (slot.is_copying) error = cudaStreamWaitEvent(Handle(compute_), Event(slot.copied));
    for (void* event : {slot.copied, slot.touched}) {
      if (event != nullptr && error == cudaSuccess) error = cudaEventDestroy(Event(event));
    }
    if (error != cudaSuccess) TANDEM_LOG(kWarning, "policy", "layer inputs: ", cudaGetErrorString(error));
  }
}

std::byte* CudaLayerInputBytes::DevicePlace(int layer) const {
  return ring_.data() + static_cast<std::uint64_t>(layer % num_slots_) * input_bytes_;
}

std::byte* CudaLayerInputBytes::HostPlace(int layer) const {
  return host_->data() + static_cast<std::uint64_t>(layer) * input_bytes_;
}

void CudaLayerInputBytes::Copy(const char* stage, Slot* slot, std::byte* to, const std::byte* from) {
  CheckCuda(cudaEventRecord(Event(slot->touched), Handle(compute_)), "marking a layer input");
  CheckCuda(cudaStreamWaitEvent(Handle(copy_), Event(slot->touched)), "waiting for a layer input");
  if (clock_ != nullptr) clock_->Enter(stage, copy_->handle());
  CheckCuda(cudaMemcpyAsync(to, from, input_bytes_, cudaMemcpyDefault, Handle(copy_)), "copying a layer input");
  if (clock_ != nullptr) clock_->Enter(nullptr, copy_->handle());
  CheckCuda(cudaEventRecord(Event(slot->copied), Handle(copy_)), "marking a layer input's copy");
  slot->is_copying = true;
}

void CudaLayerInputBytes::AwaitCopy(const Slot& slot) {
  if (slot.is_copying) CheckCuda(cudaStreamWaitEvent(Handle(compute_), Event(slot.copied)), "waiting for a layer input's copy");
}

std::byte* CudaLayerInputBytes::Place(int layer) {
  AwaitCopy(SlotOf(layer));
  return DevicePlace(layer);
}

void CudaLayerInputBytes::Keep(int layer) {
  if (layer < num_layers_ - num_slots_) Copy("copies to the host", &SlotOf(layer), HostPlace(layer), DevicePlace(layer));
}

std::byte* CudaLayerInputBytes::Fetch(int layer) {
  AwaitCopy(SlotOf(layer));
  return DevicePlace(layer);
}

void CudaLayerInputBytes::Release(int layer) {
  if (const int next = layer - num_slots_; next >= 0)
    Copy("copies from the host", &SlotOf(layer), DevicePlace(next), HostPlace(next));
}

}  // namespace tandem

// A step's index arrays on their way to the device. They are packed into page-locked memory, of which there are two, so that a
// step is packed while the one before it may still wait for its copy. Confined to the engine thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "common/gpu/cuda_event.h"
#include "common/gpu/stream.h"
#include "rollout_server/model/cuda_decoder_places.h"

namespace tandem {

class StepPacker {
 public:
  // `plan_bytes`: of the attention's plan. Errors: RESOURCE_EXHAUSTED (page-locked memory), INTERNAL.
  static absl::StatusOr<std::unique_ptr<StepPacker>> Create(const StepPlaces& places, int block_tokens, std::uint64_t plan_bytes);
  // The next step begins: waits until the step before the last has left its memory, which it then takes.
  absl::Status Begin();
  // Rows and sequences behind the batch's are padding: token 0 at position 0, written nowhere, of no sequence that has keys.
  void Pack(const StepBatch& batch, std::int64_t num_rows, std::int64_t num_sequences);
  // Enqueues the copy of what was packed to `indices` on the device, laid out as StepPlaces says.
  absl::Status Copy(std::byte* indices, void* stream) const;
  // Everything of the step that reads the page-locked memory is in the stream.
  absl::Status End(void* stream) { return staging().copied->Record(stream); }

  const std::int32_t* query_indptr() const { return At(places_.query_indptr); }
  const std::int32_t* page_indptr() const { return At(places_.page_indptr); }
  std::span<std::byte> plan() const { return staging().plan->bytes(); }

 private:
  struct Staging {
    std::unique_ptr<HostBuffer> indices, plan;
    std::unique_ptr<CudaEvent> copied;  // both are on the device
  };
  StepPacker(const StepPlaces& places, int block_tokens, std::array<Staging, 2> staging)
      : places_(places), block_tokens_(block_tokens), staging_(std::move(staging)) {}
  const Staging& staging() const { return staging_[num_steps_ % staging_.size()]; }
  std::int32_t* At(std::int64_t begin) const {
    return reinterpret_cast<std::int32_t*>(staging().indices->bytes().data()) + begin;
  }

  const StepPlaces places_;
  const int block_tokens_;
  const std::array<Staging, 2> staging_;
  std::uint64_t num_steps_ = 0;
  std::int64_t num_used_ = 0;  // elements of the step's arrays, from the first
};

}  // namespace tandem

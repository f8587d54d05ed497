#include "rollout_server/model/cuda_step_packer.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <utility>

#include "common/gpu/cuda_status.h"

namespace tandem {

absl::StatusOr<std::unique_ptr<StepPacker>> StepPacker::Create(const StepPlaces& places, int block_tokens,
                                                               std::uint64_t plan_bytes) {
  std::array<Staging, 2> staging;
  for (Staging& one : staging) {
    TANDEM_ASSIGN_OR_RETURN(one.indices,
                            HostBuffer::Create(Device::kCuda, static_cast<std::uint64_t>(places.size) * sizeof(std::int32_t)));
    TANDEM_ASSIGN_OR_RETURN(one.plan, HostBuffer::Create(Device::kCuda, plan_bytes));
    TANDEM_ASSIGN_OR_RETURN(one.copied, CudaEvent::Create());
  }
  return std::unique_ptr<StepPacker>(new StepPacker(places, block_tokens, std::move(staging)));
}

absl::Status StepPacker::Begin() {
  ++num_steps_;
  return staging().copied->Wait();
}

void StepPacker::Pack(const StepBatch& batch, std::int64_t num_rows, std::int64_t num_padded_sequences) {
  const auto num_tokens = static_cast<std::int64_t>(batch.token_ids.size());
  const auto num_sequences = static_cast<std::int64_t>(batch.context_lens.size());
  std::copy(batch.token_ids.begin(), batch.token_ids.end(), reinterpret_cast<std::uint32_t*>(At(places_.token_ids)));
  auto* const token_places = reinterpret_cast<const std::uint32_t**>(At(places_.token_places));
  std::fill_n(token_places, num_rows, nullptr);
  std::copy(batch.token_places.begin(), batch.token_places.end(), token_places);
  std::copy(batch.positions.begin(), batch.positions.end(), At(places_.positions));
  std::transform(batch.slot_mapping.begin(), batch.slot_mapping.end(), At(places_.slots),
                 [](std::int64_t slot) { return static_cast<std::int32_t>(slot); });
  for (std::int64_t row = num_tokens; row < num_rows; ++row) {
    At(places_.token_ids)[row] = 0;
    At(places_.positions)[row] = 0;
    At(places_.slots)[row] = -1;
  }
  std::copy(batch.logit_rows.begin(), batch.logit_rows.end(), At(places_.logit_rows));
  std::copy(batch.cu_query_lens.begin(), batch.cu_query_lens.end(), At(places_.query_indptr));
  std::int32_t* const page_indptr = At(places_.page_indptr);
  std::int32_t* pages = At(places_.page_indices);
  page_indptr[0] = 0;
  for (std::int64_t s = 0; s < num_sequences; ++s) {
    const auto index = static_cast<std::size_t>(s);
    const std::int32_t context = batch.context_lens[index];
    const std::int32_t num_pages = (context + block_tokens_ - 1) / block_tokens_;
    pages = std::copy_n(batch.block_tables[index].begin(), num_pages, pages);
    page_indptr[s + 1] = page_indptr[s] + num_pages;
    At(places_.last_page_tokens)[s] = context - (num_pages - 1) * block_tokens_;
  }
  for (std::int64_t s = num_sequences; s < num_padded_sequences; ++s) {
    At(places_.query_indptr)[s + 1] = static_cast<std::int32_t>(num_tokens);
    page_indptr[s + 1] = page_indptr[s];
    At(places_.last_page_tokens)[s] = 0;
  }
  num_used_ = places_.page_indices + page_indptr[num_padded_sequences];
}

absl::Status StepPacker::Copy(std::byte* indices, void* stream) const {
  return CudaToStatus(
      cudaMemcpyAsync(indices, staging().indices->bytes().data(), static_cast<std::size_t>(num_used_) * sizeof(std::int32_t),
                      cudaMemcpyHostToDevice, static_cast<cudaStream_t>(stream)),
      "copying a step's indices");
}

}  // namespace tandem

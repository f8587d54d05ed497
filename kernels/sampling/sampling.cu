// One block of 1024 threads a row. Bytes moved: the row twice (maximum; weights) and a 32nd part of it again (the draw), plus
// once per narrowing pass where top-k or top-p is on, nearly always 1 to 6; after the first pass from the L2 cache. Bound by one
// multiprocessor's share of that cache: some 8 us a pass over 128,256 logits.
#include <cuda_runtime.h>

#include "common/gpu/cuda_status.h"
#include "kernels/sampling/sampling.h"

namespace tandem::internal {
namespace {

using U64 = unsigned long long;

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr float kOne = 1099511627776.f;  // 2^40: a weight of 1
constexpr int kMaxCandidates = 8192;     // that the end of a threshold search holds in shared memory
constexpr unsigned kAllLanes = 0xffffffffu;

// A float's order as an unsigned integer's: larger logits, larger keys. -inf is the least that is no NaN.
__device__ unsigned KeyOf(float value) {
  const unsigned bits = __float_as_uint(value);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ float ValueOf(unsigned key) { return __uint_as_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key); }

struct Shared {
  U64 sums[3][kWarps];
  float maxima[kWarps];
  unsigned ids[kWarps];
  int faults[kWarps];
  U64 segment_weights[kWarps];  // by warp's segment of the vocabulary
  unsigned segment_ties[kWarps];
  unsigned num_candidates;
  unsigned candidates[kMaxCandidates];  // keys
  unsigned drawn;
};

// Sums of up to three values over the block, in every thread.
template <int kCount>
__device__ void BlockSums(U64 (&values)[kCount], Shared* shared) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) values[i] += __shfl_xor_sync(kAllLanes, values[i], offset);
  }
  __syncthreads();  // the last use of the places is over
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) shared->sums[i][threadIdx.x / 32] = values[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] = 0;
    for (int warp = 0; warp < kWarps; ++warp) values[i] += shared->sums[i][warp];
  }
}

// One row of logits as the distribution sees them.
struct Row {
  const float* logits;
  const unsigned* in_text;        // null: no penalties
  const unsigned* in_completion;  // as in_text
  float repetition, presence;
  int vocab_size;
  float maximum, inverse_temperature;

  __device__ float Penalised(int id, float logit) const {
    if (in_text == nullptr || (in_text[id / 32] >> (id % 32) & 1) == 0) return logit;
    logit = logit > 0 ? __fdiv_rn(logit, repetition) : __fmul_rn(logit, repetition);  // never fused: the same bits in every pass
    return (in_completion[id / 32] >> (id % 32) & 1) != 0 ? __fsub_rn(logit, presence) : logit;
  }
  // exp((logit - maximum) / temperature), at most 1.
  __device__ float Weight(float logit) const { return expf(__fmul_rn(__fsub_rn(logit, maximum), inverse_temperature)); }
  __device__ U64 Units(float weight) const { return __float2ull_rn(weight * kOne); }

  // Ids [begin, end) of the vocabulary that a warp sums up.
  __device__ int SegmentSize() const { return (vocab_size + kWarps - 1) / kWarps; }
  // Visits the warp's segment: visit(id, raw logit, penalised logit), lane after lane.
  template <typename Visit>
  __device__ void VisitSegment(Visit&& visit) const {
    const int begin = static_cast<int>(threadIdx.x / 32) * SegmentSize();
    const int end = min(begin + SegmentSize(), vocab_size);
    constexpr int kUnroll = 8;  // loads in flight
    int id = begin + static_cast<int>(threadIdx.x % 32);
    for (; id + 32 * (kUnroll - 1) < end; id += 32 * kUnroll) {
      float values[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) values[i] = logits[id + 32 * i];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) visit(id + 32 * i, values[i], Penalised(id + 32 * i, values[i]));
    }
    for (; id < end; id += 32) {
      const float value = logits[id];
      visit(id, value, Penalised(id, value));
    }
  }
};

struct Maximum {
  float value;
  unsigned id;  // the first that has it
  bool has_nan;
};

// The larger value, of equals the first id.
__device__ void Take(float value, unsigned id, Maximum* maximum) {
  if (value > maximum->value || (value == maximum->value && id < maximum->id)) {
    maximum->value = value;
    maximum->id = id;
  }
}

__device__ Maximum BlockMaximum(Maximum maximum, Shared* shared) {
  for (int offset = 16; offset > 0; offset /= 2) {
    const float value = __shfl_xor_sync(kAllLanes, maximum.value, offset);
    const unsigned id = __shfl_xor_sync(kAllLanes, maximum.id, offset);
    Take(value, id, &maximum);
  }
  const int has_nan = __any_sync(kAllLanes, maximum.has_nan);
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    shared->maxima[threadIdx.x / 32] = maximum.value;
    shared->ids[threadIdx.x / 32] = maximum.id;
    shared->faults[threadIdx.x / 32] = has_nan;
  }
  __syncthreads();
  maximum = {shared->maxima[0], shared->ids[0], shared->faults[0] != 0};
  for (int warp = 1; warp < kWarps; ++warp) {
    Take(shared->maxima[warp], shared->ids[warp], &maximum);
    maximum.has_nan = maximum.has_nan || shared->faults[warp] != 0;
  }
  return maximum;
}

// What stays: keys above `key`, and the first `num_ties` ids, in order, of those with the key itself.
struct Threshold {
  unsigned key = 0;
  unsigned num_ties = 0xffffffffu;
};

// Note [Threshold search]
// Finds the largest key of the row at and above which the measure (how many tokens, or their weight) reaches `limit`. The measure
// falls with the key, so each pass over the row takes it at three keys within (low, high] and keeps the quarter where the limit
// is crossed, until few enough tokens lie in the open part to finish in shared memory, or the part is one key. Pivots alternate
// between equal steps of the logit, which narrow fast where logits are spread, and equal steps of the key, which end in 16 passes
// whatever the logits are. All sums are exact integers, so the outcome does not depend on their order.
template <typename Measure>
class ThresholdSearch {
 public:
  __device__ ThresholdSearch(const Row& row, Measure measure, Shared* shared) : row_(row), measure_(measure), shared_(shared) {}

  // Requires: 1 <= limit <= the whole row's measure; every key is above `low` and at most `high`, or does not count.
  __device__ Threshold Find(U64 limit, unsigned low, unsigned high) {
    // Invariant: measure(keys > high) = above_ < limit <= measure(keys > low).
    above_ = 0;
    for (int pass = 0;; ++pass) {
      U64 open[1] = {0};
      row_.VisitSegment([&](int, float, float logit) {
        const unsigned key = KeyOf(logit);
        open[0] += key > low && key <= high;
      });
      BlockSums(open, shared_);
      if (open[0] <= kMaxCandidates || high - low == 1) {
        if (open[0] <= kMaxCandidates) FindInShared(limit, &low, &high);
        return Ties(limit, high);
      }
      Narrow(limit, pass, &low, &high);
    }
  }

 private:
  __device__ void Narrow(U64 limit, int pass, unsigned* low, unsigned* high) {
    unsigned pivots[3];
    for (unsigned i = 0; i < 3; ++i) {
      const unsigned even = *low + static_cast<unsigned>(static_cast<U64>(*high - *low) * (i + 1) / 4);
      pivots[i] = even;
      const float bottom = ValueOf(*low), top = ValueOf(*high);
      if (pass % 2 == 0 && isfinite(bottom) && isfinite(top)) {
        pivots[i] = KeyOf(bottom + (top - bottom) * (0.25f * static_cast<float>(i + 1)));
      }
      pivots[i] = min(max(pivots[i], *low + 1), *high);
    }
    U64 at_least[3] = {0, 0, 0};  // measure of keys above a pivot, within the open part
    row_.VisitSegment([&](int, float, float logit) {
      const unsigned key = KeyOf(logit);
      if (key <= *low || key > *high) return;
      const U64 amount = measure_(row_, logit);
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        if (key > pivots[i]) at_least[i] += amount;
      }
    });
    BlockSums(at_least, shared_);
    // The highest pivot above which the limit is reached becomes the new floor; the one over it the new top.
    unsigned new_low = *low, new_high = *high;
    U64 new_above = above_;
    for (int i = 0; i < 3; ++i) {
      if (above_ + at_least[i] >= limit) {
        new_low = max(new_low, pivots[i]);
      } else if (pivots[i] < new_high) {
        new_high = pivots[i];
        new_above = above_ + at_least[i];
      }
    }
    *low = new_low;
    *high = new_high;
    above_ = new_above;
  }

  // Gathers the open part's keys and halves it there. Ends with high = low + 1.
  __device__ void FindInShared(U64 limit, unsigned* low, unsigned* high) {
    __syncthreads();
    if (threadIdx.x == 0) shared_->num_candidates = 0;
    __syncthreads();
    row_.VisitSegment([&](int, float, float logit) {
      const unsigned key = KeyOf(logit);
      if (key > *low && key <= *high) shared_->candidates[atomicAdd(&shared_->num_candidates, 1u)] = key;
    });
    __syncthreads();
    const unsigned count = shared_->num_candidates;
    while (*high - *low > 1) {
      const unsigned middle = *low + (*high - *low) / 2;
      U64 over[1] = {0};
      for (unsigned i = threadIdx.x; i < count; i += kThreads) {
        const unsigned key = shared_->candidates[i];
        if (key > middle && key <= *high) over[0] += measure_(row_, ValueOf(key));
      }
      BlockSums(over, shared_);
      if (above_ + over[0] >= limit) {
        *low = middle;
      } else {
        *high = middle;
        above_ += over[0];
      }
    }
  }

  // `key` is the threshold; as many of its tokens stay as the limit needs.
  __device__ Threshold Ties(U64 limit, unsigned key) {
    const U64 each = measure_(row_, ValueOf(key));
    const U64 missing = limit - above_;
    return {key, each == 0 ? 1u : static_cast<unsigned>(min((missing + each - 1) / each, static_cast<U64>(0xfffffffeu)))};
  }

  const Row& row_;
  const Measure measure_;
  Shared* const shared_;
  U64 above_ = 0;
};

struct CountTokens {
  __device__ U64 operator()(const Row&, float) const { return 1; }
};
struct WeighTokens {
  __device__ U64 operator()(const Row& row, float logit) const { return row.Units(row.Weight(logit)); }
};

// Weight of what a threshold keeps, and by segments into shared memory, with ties cut off in order of ids.
__device__ U64 WeighKept(const Row& row, const Threshold& threshold, double min_p, Shared* shared) {
  U64 above = 0;
  unsigned ties = 0;
  row.VisitSegment([&](int, float, float logit) {
    const unsigned key = KeyOf(logit);
    if (key < threshold.key) return;
    if (key == threshold.key) {
      ++ties;
      return;
    }
    const float weight = row.Weight(logit);
    if (static_cast<double>(weight) >= min_p) above += row.Units(weight);
  });
  for (int offset = 16; offset > 0; offset /= 2) {
    above += __shfl_xor_sync(kAllLanes, above, offset);
    ties += __shfl_xor_sync(kAllLanes, ties, offset);
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    shared->segment_weights[threadIdx.x / 32] = above;
    shared->segment_ties[threadIdx.x / 32] = ties;
  }
  __syncthreads();
  const float tie_weight = row.Weight(ValueOf(threshold.key));
  const U64 tie_units = static_cast<double>(tie_weight) >= min_p ? row.Units(tie_weight) : 0;
  U64 total = 0, before_ties = 0;
  U64 own_weight = 0;
  for (int warp = 0; warp < kWarps; ++warp) {
    const U64 left = threshold.num_ties > before_ties ? threshold.num_ties - before_ties : 0;
    const U64 weight = shared->segment_weights[warp] + min(left, static_cast<U64>(shared->segment_ties[warp])) * tie_units;
    before_ties += shared->segment_ties[warp];
    total += weight;
    if (warp == static_cast<int>(threadIdx.x)) own_weight = weight;
  }
  __syncthreads();
  if (threadIdx.x < kWarps) shared->segment_weights[threadIdx.x] = own_weight;
  __syncthreads();
  return total;
}

// The inclusive prefix sum over the block. The places hold the warps' sums.
__device__ U64 BlockPrefix(U64 value, U64* warp_sums) {
  U64 prefix = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const U64 other = __shfl_up_sync(kAllLanes, prefix, offset);
    if (static_cast<int>(threadIdx.x % 32) >= offset) prefix += other;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 31) warp_sums[threadIdx.x / 32] = prefix;
  __syncthreads();
  for (unsigned warp = 0; warp < threadIdx.x / 32; ++warp) prefix += warp_sums[warp];
  return prefix;
}

// The first id, in order, at which the running weight passes `target`. Requires: target below the segments' sum.
__device__ unsigned InvertCdf(const Row& row, const Threshold& threshold, double min_p, U64 target, Shared* shared) {
  int segment = 0;
  U64 before = 0, ties_before = 0;
  while (segment + 1 < kWarps && before + shared->segment_weights[segment] <= target) {
    before += shared->segment_weights[segment];
    ties_before += shared->segment_ties[segment];
    ++segment;
  }
  // Each thread takes neighbouring ids of the segment.
  const int segment_begin = segment * row.SegmentSize();
  const int segment_end = min(segment_begin + row.SegmentSize(), row.vocab_size);
  const int share = (row.SegmentSize() + kThreads - 1) / kThreads;
  const int begin = min(segment_begin + static_cast<int>(threadIdx.x) * share, segment_end);
  const int end = min(begin + share, segment_end);
  U64 ties = 0;
  for (int id = begin; id < end; ++id) ties += KeyOf(row.Penalised(id, row.logits[id])) == threshold.key;
  U64 tie_rank = ties_before + BlockPrefix(ties, shared->sums[0]) - ties;
  const U64 first_tie_rank = tie_rank;
  const auto units = [&](int id, U64* rank) -> U64 {
    const float logit = row.Penalised(id, row.logits[id]);
    const unsigned key = KeyOf(logit);
    const bool is_kept = key > threshold.key || (key == threshold.key && (*rank)++ < threshold.num_ties);
    const float weight = row.Weight(logit);
    return is_kept && static_cast<double>(weight) >= min_p ? row.Units(weight) : 0;
  };
  U64 own = 0;
  for (int id = begin; id < end; ++id) own += units(id, &tie_rank);
  const U64 after = before + BlockPrefix(own, shared->sums[1]);
  if (after > target && after - own <= target) {
    U64 running = after - own, rank = first_tie_rank;
    for (int id = begin; id < end; ++id) {
      running += units(id, &rank);
      if (running > target) {
        shared->drawn = static_cast<unsigned>(id);
        break;
      }
    }
  }
  __syncthreads();
  return shared->drawn;
}

// Applies top-k and top-p. `total` is the whole row's weight.
__device__ Threshold Truncate(const Row& row, const SampleRow& wanted, U64 total, Shared* shared) {
  Threshold threshold;
  const unsigned top = KeyOf(row.maximum);
  bool is_cut = false;
  if (wanted.top_k > 0 && wanted.top_k < static_cast<unsigned>(row.vocab_size)) {
    threshold = ThresholdSearch<CountTokens>(row, {}, shared).Find(wanted.top_k, 0, top);
    is_cut = true;
  }
  if (wanted.top_p < 1) {
    const U64 kept = is_cut ? WeighKept(row, threshold, 0, shared) : total;
    // A token stays while what stands before it is lighter than top_p; the first always stays.
    const double limit = ceil(wanted.top_p * static_cast<double>(kept));
    const U64 units = min(max(static_cast<U64>(limit), static_cast<U64>(1)), kept);
    Threshold nucleus = ThresholdSearch<WeighTokens>(row, {}, shared).Find(units, is_cut ? threshold.key - 1 : 0, top);
    if (is_cut && nucleus.key == threshold.key) nucleus.num_ties = min(nucleus.num_ties, threshold.num_ties);
    threshold = nucleus;
  }
  return threshold;
}

__global__ void __launch_bounds__(kThreads) SampleKernel(SampleParams params) {
  __shared__ Shared shared;
  const SampleRow wanted = params.rows[blockIdx.x];
  SampledToken* const token = params.tokens + blockIdx.x;
  Row row = {};
  row.logits = params.logits + static_cast<std::int64_t>(blockIdx.x) * params.vocab_size;
  row.vocab_size = static_cast<int>(params.vocab_size);
  row.repetition = wanted.repetition_penalty;
  row.presence = wanted.presence_penalty;
  if (wanted.seen >= 0) {
    const std::int64_t words = (params.vocab_size + 31) / 32;
    row.in_text = params.seen + 2 * wanted.seen * words;
    row.in_completion = row.in_text + words;
  }

  const Maximum none = {-INFINITY, 0xffffffffu, false};
  Maximum raw = none, penalised = none;
  row.VisitSegment([&](int id, float raw_logit, float logit) {
    Take(raw_logit, static_cast<unsigned>(id), &raw);
    Take(logit, static_cast<unsigned>(id), &penalised);
    raw.has_nan = raw.has_nan || isnan(raw_logit);
    penalised.has_nan = penalised.has_nan || isnan(logit);
  });
  raw = BlockMaximum(raw, &shared);
  penalised = row.in_text == nullptr ? raw : BlockMaximum(penalised, &shared);
  SampleFault fault = SampleFault::kNone;
  if (raw.has_nan) {
    fault = SampleFault::kNan;
  } else if (!isfinite(raw.value)) {
    fault = SampleFault::kInfinite;
  } else if (penalised.has_nan) {
    fault = SampleFault::kNanAfterPenalties;
  } else if (!isfinite(penalised.value)) {
    fault = SampleFault::kInfiniteAfterPenalties;
  }
  if (fault != SampleFault::kNone) {
    if (threadIdx.x == 0) {
      SampledToken bad;
      bad.fault = fault;
      bad.maximum = fault == SampleFault::kInfinite ? raw.value : penalised.value;
      *token = bad;
    }
    return;
  }

  const bool is_greedy = wanted.inverse_temperature == 0;
  row.maximum = penalised.value;
  row.inverse_temperature = wanted.inverse_temperature;
  // One pass: the raw row's weight, and the weight drawn from by segments.
  U64 raw_units = 0, units = 0;
  row.VisitSegment([&](int, float raw_logit, float logit) {
    raw_units += row.Units(expf(raw_logit - raw.value));
    if (!is_greedy) units += row.Units(row.Weight(logit));
  });
  U64 totals[2] = {raw_units, units};
  for (int offset = 16; offset > 0; offset /= 2) units += __shfl_xor_sync(kAllLanes, units, offset);
  BlockSums(totals, &shared);
  if (threadIdx.x % 32 == 0) {
    shared.segment_weights[threadIdx.x / 32] = units;
    shared.segment_ties[threadIdx.x / 32] = 0;
  }
  __syncthreads();
  const double unit = 1.0 / static_cast<double>(kOne);
  const double raw_log_total = log(static_cast<double>(totals[0]) * unit) + static_cast<double>(raw.value);

  SampledToken drawn;
  if (is_greedy) {
    drawn.id = penalised.id;
  } else {
    const bool truncates = wanted.top_k > 0 || wanted.top_p < 1 || wanted.min_p > 0;
    Threshold threshold;
    U64 kept = totals[1];
    const double min_p = truncates ? wanted.min_p : 0;
    if (truncates) {
      threshold = Truncate(row, wanted, totals[1], &shared);
      kept = WeighKept(row, threshold, min_p, &shared);
    }
    const U64 target = min(static_cast<U64>(wanted.uniform * static_cast<double>(kept)), kept - 1);
    drawn.id = InvertCdf(row, threshold, min_p, target, &shared);
    const double total = static_cast<double>(totals[1]) * unit;
    const double mass = static_cast<double>(kept) / static_cast<double>(totals[1]);
    const float logit = row.Penalised(static_cast<int>(drawn.id), row.logits[drawn.id]);
    const double exponent = static_cast<double>((logit - row.maximum) * row.inverse_temperature);
    drawn.rollout_logprob = static_cast<float>(exponent - log(total) - log(mass));
    drawn.kept_mass = static_cast<float>(mass);
  }
  drawn.raw_logprob = static_cast<float>(static_cast<double>(row.logits[drawn.id]) - raw_log_total);
  if (threadIdx.x == 0) *token = drawn;
}

}  // namespace

absl::Status SampleCuda(const SampleParams& params, void* stream) {
  SampleKernel<<<static_cast<unsigned>(params.num_rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  return CudaToStatus(cudaGetLastError(), "sampling launch");
}

}  // namespace tandem::internal

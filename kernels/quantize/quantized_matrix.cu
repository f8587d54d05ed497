// Both kernels compute a weight as fp32 product rounded to bf16, without contraction: the host's bits.
//
// Dequantize: a thread takes kPackets packets of 8 values, a block's width apart. Bytes moved a value: 2 plus the code's.
//
// MultiplyFew: a block takes 16 or 32 rows of the weight, its warps share out the columns in tiles of 256 and add up through
// shared memory. A step covers 64 columns: lane (g, t) = (lane / 4, lane % 4) loads codes of columns 16 t to 16 t + 15 in rows g
// and g + 8, and the same columns of x's row g. Four mma.m16n8k16 use 4 codes each; which column a product stands for does not
// matter as long as weight and x agree. Bytes read a weight: the code's; bound by memory.
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <array>

#include "common/gpu/cuda_status.h"
#include "common/model/weight_codecs.h"
#include "kernels/base/device_elements.cuh"
#include "kernels/quantize/quantized_matrix.h"

namespace tandem {
namespace {

constexpr int kThreads = 256;
constexpr int kPackets = 4;
constexpr int kPacketValues = 8;

__device__ inline std::uint32_t PackBf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  std::uint32_t bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

// Two E4M3 codes, the first in the low byte.
__device__ inline float2 Fp8PairToFloats(std::uint32_t codes) {
  const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3);
  return __half22float2(*reinterpret_cast<const __half2*>(&raw));
}

// E4M3 codes, whatever scales them.
struct Fp8Codes {
  using Packet = uint2;  // 8 codes
  static constexpr int kBookValues = 0;

  explicit Fp8Codes(const QuantizedMatrix& matrix)
      : codes(static_cast<const std::uint8_t*>(matrix.codes)),
        scales(static_cast<const float*>(matrix.scales)),
        columns(static_cast<std::uint32_t>(matrix.columns)) {}

  __device__ Packet LoadPacket(std::uint32_t packet) const { return reinterpret_cast<const uint2*>(codes)[packet]; }
  // The pair of values i of a packet as bf16.
  static __device__ std::uint32_t Pair(const float*, const Packet& packet, int i, float scale) {
    return CodesToPair((i < 2 ? packet.x : packet.y) >> (16 * (i % 2)), scale);
  }

  using Run = uint4;  // 16 codes
  __device__ Run LoadRun(std::uint32_t row, std::uint32_t column) const {
    return *reinterpret_cast<const uint4*>(codes + static_cast<std::size_t>(row) * columns + column);
  }
  static __device__ std::uint32_t RunPair(const float*, const Run& run, int i, float scale) {
    const std::uint32_t word = i < 2 ? run.x : i < 4 ? run.y : i < 6 ? run.z : run.w;
    return CodesToPair(word >> (16 * (i % 2)), scale);
  }

  static __device__ std::uint32_t CodesToPair(std::uint32_t codes, float scale) {
    const float2 values = Fp8PairToFloats(codes & 0xffffu);
    return PackBf16(__fmul_rn(values.x, scale), __fmul_rn(values.y, scale));
  }

  const std::uint8_t* codes;
  const float* scales;
  std::uint32_t columns;
};

struct Fp8RowSource : Fp8Codes {
  using Fp8Codes::Fp8Codes;
  __device__ float PacketScale(std::uint32_t packet) const { return scales[packet / (columns / kPacketValues)]; }
  __device__ float RunScale(std::uint32_t row, std::uint32_t) const { return scales[row]; }
};

// A scale for each 128 x 128 weights of a part; packets and runs lie within one.
struct Fp8BlockSource : Fp8Codes {
  explicit Fp8BlockSource(const QuantizedMatrix& matrix)
      : Fp8Codes(matrix), scale_columns(static_cast<std::uint32_t>(NumScaleBlocks(matrix.columns))), num_parts(matrix.num_parts) {
    for (int p = 0; p < num_parts; ++p) {
      const LinearPart& part = matrix.parts[static_cast<std::size_t>(p)];
      first_row[p] = static_cast<std::uint32_t>(part.row_begin);
      first_scale_row[p] = static_cast<std::uint32_t>(part.scale_row_begin);
    }
  }

  __device__ float PacketScale(std::uint32_t packet) const {
    const std::uint32_t packets_per_row = columns / kPacketValues, row = packet / packets_per_row;
    return RunScale(row, (packet - row * packets_per_row) * kPacketValues);
  }
  __device__ float RunScale(std::uint32_t row, std::uint32_t column) const {
    std::uint32_t first = 0, scale_row = first_scale_row[0];
#pragma unroll
    for (int next = 1; next < kMaxLinearParts; ++next) {
      if (next < num_parts && row >= first_row[next]) first = first_row[next], scale_row = first_scale_row[next];
    }
    return scales[(scale_row + (row - first) / kScaleBlock) * scale_columns + column / kScaleBlock];
  }

  std::uint32_t scale_columns;
  int num_parts;
  std::uint32_t first_row[kMaxLinearParts] = {};
  std::uint32_t first_scale_row[kMaxLinearParts] = {};
};

__device__ constexpr std::array<float, 16> kNf4DeviceBook = kNf4Book;

struct Nf4Source {
  using Packet = std::uint32_t;
  static constexpr int kBookValues = 16;

  explicit Nf4Source(const QuantizedMatrix& matrix)
      : codes(static_cast<const std::uint8_t*>(matrix.codes)),
        scales(static_cast<const std::uint8_t*>(matrix.scales)),
        nested_map(matrix.nested_map),
        nested_absmax(matrix.nested_absmax),
        nested_offset(matrix.nested_offset),
        columns(static_cast<std::uint32_t>(matrix.columns)),
        num_parts(matrix.num_parts) {
    for (int p = 0; p < num_parts; ++p) {
      const LinearPart& part = matrix.parts[static_cast<std::size_t>(p)];
      first_block[p] = static_cast<std::uint32_t>(part.row_begin * (matrix.columns / kNf4BlockValues));
      nested_begin[p] = static_cast<std::uint32_t>(part.nested_begin);
    }
  }

  __device__ float BlockScale(std::uint32_t block) const {
    int p = 0;
    std::uint32_t first = 0, begin = nested_begin[0];
#pragma unroll
    for (int next = 1; next < kMaxLinearParts; ++next) {
      if (next < num_parts && block >= first_block[next]) p = next, first = first_block[next], begin = nested_begin[next];
    }
    const float scaled = __fmul_rn(nested_map[scales[block]], nested_absmax[begin + (block - first) / kNf4NestedBlocks]);
    return __fadd_rn(scaled, nested_offset[p]);
  }

  __device__ Packet LoadPacket(std::uint32_t packet) const { return reinterpret_cast<const std::uint32_t*>(codes)[packet]; }
  __device__ float PacketScale(std::uint32_t packet) const { return BlockScale(packet / (kNf4BlockValues / kPacketValues)); }
  static __device__ std::uint32_t Pair(const float* book, const Packet& packet, int i, float scale) {
    return CodesToPair(book, packet >> (8 * i), scale);
  }

  using Run = uint2;
  __device__ Run LoadRun(std::uint32_t row, std::uint32_t column) const {
    return *reinterpret_cast<const uint2*>(codes + (static_cast<std::size_t>(row) * columns + column) / 2);
  }
  __device__ float RunScale(std::uint32_t row, std::uint32_t column) const {
    return BlockScale(row * (columns / kNf4BlockValues) + column / kNf4BlockValues);
  }
  static __device__ std::uint32_t RunPair(const float* book, const Run& run, int i, float scale) {
    return CodesToPair(book, (i < 4 ? run.x : run.y) >> (8 * (i % 4)), scale);
  }

  // The high nibble is the even value.
  static __device__ std::uint32_t CodesToPair(const float* book, std::uint32_t code, float scale) {
    return PackBf16(__fmul_rn(book[(code >> 4) & 15u], scale), __fmul_rn(book[code & 15u], scale));
  }

  const std::uint8_t* codes;
  const std::uint8_t* scales;
  const float* nested_map;
  const float* nested_absmax;
  const float* nested_offset;
  std::uint32_t columns;
  int num_parts;
  std::uint32_t first_block[kMaxLinearParts] = {};
  std::uint32_t nested_begin[kMaxLinearParts] = {};
};

// The code book in shared memory: 16 values lie in 16 banks.
template <typename Source>
__device__ inline const float* LoadBook(float (&book)[Source::kBookValues == 0 ? 1 : Source::kBookValues]) {
  if constexpr (Source::kBookValues > 0) {
    if (threadIdx.x < Source::kBookValues) book[threadIdx.x] = kNf4DeviceBook[threadIdx.x];
    __syncthreads();
  }
  return book;
}

template <typename Source>
__global__ void __launch_bounds__(kThreads)
    DequantizeKernel(Source source, uint4* __restrict__ output, std::uint32_t num_packets) {
  __shared__ float shared_book[Source::kBookValues == 0 ? 1 : Source::kBookValues];
  const float* const book = LoadBook<Source>(shared_book);
  const std::uint32_t first = blockIdx.x * (kThreads * kPackets) + threadIdx.x;
  typename Source::Packet packets[kPackets];
  float scales[kPackets];
#pragma unroll
  for (int j = 0; j < kPackets; ++j) {
    const std::uint32_t packet = first + j * kThreads;
    if (packet >= num_packets) continue;
    packets[j] = source.LoadPacket(packet);
    scales[j] = source.PacketScale(packet);
  }
#pragma unroll
  for (int j = 0; j < kPackets; ++j) {
    const std::uint32_t packet = first + j * kThreads;
    if (packet >= num_packets) continue;
    output[packet] = make_uint4(Source::Pair(book, packets[j], 0, scales[j]), Source::Pair(book, packets[j], 1, scales[j]),
                                Source::Pair(book, packets[j], 2, scales[j]), Source::Pair(book, packets[j], 3, scales[j]));
  }
}

constexpr int kTileRows = 16;  // of the weight, for one mma
constexpr int kStepColumns = 64;
constexpr int kTileColumns = 256;  // of a warp at a time, whatever the rows of x: the order of sums
constexpr int kWarps = kThreads / 32;
constexpr int kMmaTokens = 8;

__device__ inline void Mma(float (&sum)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 16 columns of x's row `token`, or zeros.
__device__ inline void LoadX(const __nv_bfloat16* x, int token, int num_tokens, std::uint32_t columns, std::uint32_t column,
                             uint4 (&values)[2]) {
  values[0] = values[1] = make_uint4(0, 0, 0, 0);
  if (token >= num_tokens || column >= columns) return;
  const auto* const source = reinterpret_cast<const uint4*>(x + static_cast<std::size_t>(token) * columns + column);
  values[0] = source[0];
  values[1] = source[1];
}

// kSteps: those whose codes are loaded before the first is used.
template <typename Source, typename Y, int kTokenTiles, int kRowTiles, int kSteps>
__global__ void __launch_bounds__(kThreads)
    MultiplyFewKernel(Source source, const __nv_bfloat16* __restrict__ x, Y* __restrict__ y, std::uint32_t num_rows,
                      int num_tokens, bool is_added) {
  __shared__ float shared_book[Source::kBookValues == 0 ? 1 : Source::kBookValues];
  __shared__ float sums[kWarps][kTokenTiles * kMmaTokens][kTileRows];
  const float* const book = LoadBook<Source>(shared_book);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4;
  const std::uint32_t first_row = blockIdx.x * (kRowTiles * kTileRows);
  std::uint32_t rows[kRowTiles][2];  // past the end: the last, whose sums are not written
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
    rows[r][0] = min(first_row + r * kTileRows + g, num_rows - 1);
    rows[r][1] = min(first_row + r * kTileRows + g + 8, num_rows - 1);
  }
  float sum[kRowTiles][kTokenTiles][4] = {};
  for (std::uint32_t begin = warp * kTileColumns; begin < source.columns; begin += kWarps * kTileColumns) {
    for (int first_step = 0; first_step < kTileColumns / kStepColumns; first_step += kSteps) {
      typename Source::Run runs[kSteps][kRowTiles][2];
      float scales[kSteps][kRowTiles][2];
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const std::uint32_t column = begin + (first_step + s) * kStepColumns + 16 * t;
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            runs[s][r][half] = typename Source::Run{};
            scales[s][r][half] = 0;
            if (column >= source.columns) continue;
            runs[s][r][half] = source.LoadRun(rows[r][half], column);
            scales[s][r][half] = source.RunScale(rows[r][half], column);
          }
        }
      }
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const std::uint32_t column = begin + (first_step + s) * kStepColumns + 16 * t;
        std::uint32_t a[kRowTiles][4][4];
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              a[r][j][i] = Source::RunPair(book, runs[s][r][i % 2], 2 * j + i / 2, scales[s][r][i % 2]);
            }
          }
        }
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) {
          uint4 of_x[2];
          LoadX(x, n * kMmaTokens + g, num_tokens, source.columns, column, of_x);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const uint4& four = of_x[j / 2];
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r) {
              Mma(sum[r][n], a[r][j], j % 2 == 0 ? four.x : four.z, j % 2 == 0 ? four.y : four.w);
            }
          }
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
    if (r > 0) __syncthreads();
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      const int token = n * kMmaTokens + 2 * t;
      sums[warp][token][g] = sum[r][n][0];
      sums[warp][token + 1][g] = sum[r][n][1];
      sums[warp][token][g + 8] = sum[r][n][2];
      sums[warp][token + 1][g + 8] = sum[r][n][3];
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kTokenTiles * kMmaTokens * kTileRows; i += kThreads) {
      const int token = i / kTileRows;
      const std::uint32_t row = first_row + r * kTileRows + i % kTileRows;
      if (token >= num_tokens || row >= num_rows) continue;
      float total = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) total += sums[w][token][i % kTileRows];
      Y* const place = y + static_cast<std::size_t>(token) * num_rows + row;
      SetElement(place, is_added ? AsFloat(*place) + total : total);
    }
  }
}

template <typename Source>
void LaunchDequantize(const QuantizedMatrix& matrix, void* output, cudaStream_t stream) {
  const auto num_packets = static_cast<std::uint32_t>(matrix.rows * matrix.columns / kPacketValues);
  const std::uint32_t blocks = (num_packets + kThreads * kPackets - 1) / (kThreads * kPackets);
  DequantizeKernel<<<blocks, kThreads, 0, stream>>>(Source(matrix), static_cast<uint4*>(output), num_packets);
}

// The more rows x has, the more of the weight a block takes: x is read again by every block.
template <typename Source, typename Y>
void LaunchMultiplyFew(const MultiplyFewParams& params, cudaStream_t stream) {
  static_assert(kFewRows == 8 * kMmaTokens);
  const auto num_rows = static_cast<std::uint32_t>(params.weight.rows);
  const auto launch = [&](auto kernel, std::uint32_t row_tiles) {
    const std::uint32_t block_rows = row_tiles * kTileRows;
    kernel<<<(num_rows + block_rows - 1) / block_rows, kThreads, 0, stream>>>(
        Source(params.weight), static_cast<const __nv_bfloat16*>(params.x), static_cast<Y*>(params.y), num_rows,
        static_cast<int>(params.num_rows), params.is_added);
  };
  if (params.num_rows <= kMmaTokens) {
    launch(MultiplyFewKernel<Source, Y, 1, 1, 4>, 1);
  } else if (params.num_rows <= 2 * kMmaTokens) {
    launch(MultiplyFewKernel<Source, Y, 2, 1, 4>, 1);
  } else if (params.num_rows <= 4 * kMmaTokens) {
    launch(MultiplyFewKernel<Source, Y, 4, 2, 2>, 2);
  } else {
    launch(MultiplyFewKernel<Source, Y, 8, 2, 2>, 2);
  }
}

template <typename Source>
void LaunchMultiplyFew(const MultiplyFewParams& params, cudaStream_t stream) {
  if (params.y_dtype == DType::kBf16) {
    LaunchMultiplyFew<Source, __nv_bfloat16>(params, stream);
  } else {
    LaunchMultiplyFew<Source, float>(params, stream);
  }
}

}  // namespace

namespace internal {

absl::Status DequantizeCuda(const QuantizedMatrix& matrix, void* output, void* stream) {
  if (matrix.format == StorageFormat::kFp8Row) {
    LaunchDequantize<Fp8RowSource>(matrix, output, static_cast<cudaStream_t>(stream));
  } else if (matrix.format == StorageFormat::kFp8Block) {
    LaunchDequantize<Fp8BlockSource>(matrix, output, static_cast<cudaStream_t>(stream));
  } else {
    LaunchDequantize<Nf4Source>(matrix, output, static_cast<cudaStream_t>(stream));
  }
  return CudaToStatus(cudaGetLastError(), "dequantize launch");
}

absl::Status MultiplyFewCuda(const MultiplyFewParams& params, void* stream) {
  if (params.weight.format == StorageFormat::kFp8Row) {
    LaunchMultiplyFew<Fp8RowSource>(params, static_cast<cudaStream_t>(stream));
  } else if (params.weight.format == StorageFormat::kFp8Block) {
    LaunchMultiplyFew<Fp8BlockSource>(params, static_cast<cudaStream_t>(stream));
  } else {
    LaunchMultiplyFew<Nf4Source>(params, static_cast<cudaStream_t>(stream));
  }
  return CudaToStatus(cudaGetLastError(), "multiply few launch");
}

}  // namespace internal
}  // namespace tandem

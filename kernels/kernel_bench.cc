// tandem_kernel_bench: each kernel at the shapes of Llama-3.1-8B and SmolLM2-135M on the GPU: microseconds, bytes and operations
// a second, and the share of the copy rate that the same run measured. Launches go round a large arena, so that a case of some
// megabytes finds nothing in the cache; they are recorded once and replayed, so that the host costs nothing.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "common/base/random.h"
#include "common/gpu/cuda_status.h"
#include "common/gpu/stream.h"
#include "kernels/gemm/gemm.h"
#include "kernels/quantize/quantized_matrix.h"
#include "kernels/rms_norm/rms_norm.h"
#include "kernels/rope/rope.h"
#include "kernels/swiglu/swiglu.h"

ABSL_FLAG(bool, json, false, "one line of JSON a case instead of a table");

namespace tandem {
namespace {

constexpr std::uint64_t kArenaBytes = std::uint64_t{4} << 30;
constexpr std::uint64_t kTouchedBytes = std::uint64_t{8} << 30;  // by the launches of one case, about
constexpr DType kType = DType::kBf16;

// Device memory, zeroed or with random numbers between -1 and 1 in bf16.
class BenchMemory {
 public:
  static absl::StatusOr<std::unique_ptr<BenchMemory>> Create(std::uint64_t size_bytes, bool is_random) {
    void* memory = nullptr;
    TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaMalloc(&memory, size_bytes), "bench memory"));
    auto created = std::make_unique<BenchMemory>(static_cast<std::byte*>(memory), size_bytes);
    TANDEM_RETURN_IF_ERROR(ZeroMemory(Device::kCuda, memory, size_bytes));
    if (!is_random) return created;
    std::vector<std::uint16_t> pattern(std::size_t{1} << 20);
    for (std::size_t i = 0; i < pattern.size(); ++i) {
      const std::uint64_t bits = RandomBits(1, i);
      const std::uint64_t exponent = 0x7e - bits % 8;  // 2^-8 to 1
      pattern[i] = static_cast<std::uint16_t>((bits >> 32 & 0x807f) | exponent << 7);
    }
    const std::uint64_t pattern_bytes = pattern.size() * sizeof(pattern[0]);
    for (std::uint64_t done = 0; done < size_bytes; done += pattern_bytes) {
      TANDEM_RETURN_IF_ERROR(
          CopyFromHost(Device::kCuda, created->begin() + done, pattern.data(), std::min(pattern_bytes, size_bytes - done)));
    }
    return created;
  }
  BenchMemory(std::byte* memory, std::uint64_t size_bytes) : memory_(memory), size_bytes_(size_bytes) {}
  ~BenchMemory() { cudaFree(memory_); }
  BenchMemory(const BenchMemory&) = delete;
  BenchMemory& operator=(const BenchMemory&) = delete;
  std::byte* begin() const { return memory_; }
  std::uint64_t size_bytes() const { return size_bytes_; }

 private:
  std::byte* const memory_;
  const std::uint64_t size_bytes_;
};

struct BenchCase {
  std::string kernel, shape;
  std::uint64_t footprint_bytes = 0;  // of one launch, from the address it is given
  double moved_bytes = 0, operations = 0;
  std::function<absl::Status(std::byte* memory, void* stream)> launch;
};

// Hands out addresses one after the other, each on a boundary of 256 bytes.
class Cursor {
 public:
  explicit Cursor(std::byte* begin) : at_(begin) {}
  std::byte* Take(std::int64_t num_elements) {
    std::byte* const taken = at_;
    at_ += BytesOf(num_elements);
    return taken;
  }
  static std::uint64_t BytesOf(std::int64_t num_elements) {
    return (static_cast<std::uint64_t>(num_elements) * ElementBytes(kType) + 255) / 256 * 256;
  }

 private:
  std::byte* at_;
};

absl::StatusOr<double> SecondsPerLaunch(const BenchCase& bench, const BenchMemory& arena, Stream* stream) {
  const auto handle = static_cast<cudaStream_t>(stream->handle());
  const std::uint64_t num_places = std::max<std::uint64_t>(arena.size_bytes() / bench.footprint_bytes, 1);
  const std::uint64_t num_launches = std::clamp<std::uint64_t>(kTouchedBytes / bench.footprint_bytes, 20, 500);
  TANDEM_RETURN_IF_ERROR(bench.launch(arena.begin(), handle));  // what is done once
  TANDEM_RETURN_IF_ERROR(stream->Synchronize());
  TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaStreamBeginCapture(handle, cudaStreamCaptureModeThreadLocal), "capture"));
  absl::Status launched;
  for (std::uint64_t i = 0; i < num_launches && launched.ok(); ++i) {
    launched = bench.launch(arena.begin() + i % num_places * bench.footprint_bytes, handle);
  }
  cudaGraph_t graph = nullptr;
  TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaStreamEndCapture(handle, &graph), "capture"));
  TANDEM_RETURN_IF_ERROR(launched);
  cudaGraphExec_t replay = nullptr;
  TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaGraphInstantiate(&replay, graph, 0), "graph"));
  cudaEvent_t begin = nullptr, end = nullptr;
  TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaEventCreate(&begin), "event"));
  TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaEventCreate(&end), "event"));
  std::vector<double> seconds;
  for (int round = 0; round < 5; ++round) {
    TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaEventRecord(begin, handle), "event"));
    TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaGraphLaunch(replay, handle), "replay"));
    TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaEventRecord(end, handle), "event"));
    TANDEM_RETURN_IF_ERROR(stream->Synchronize());
    float milliseconds = 0;
    TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaEventElapsedTime(&milliseconds, begin, end), "event"));
    seconds.push_back(static_cast<double>(milliseconds) * 1e-3 / static_cast<double>(num_launches));
  }
  TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaEventDestroy(begin), "event"));
  TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaEventDestroy(end), "event"));
  TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaGraphExecDestroy(replay), "graph"));
  TANDEM_RETURN_IF_ERROR(CudaToStatus(cudaGraphDestroy(graph), "graph"));
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

BenchCase CopyCase() {
  constexpr std::uint64_t kBytes = std::uint64_t{512} << 20;
  return {.kernel = "copy",
          .shape = absl::StrCat(kBytes >> 20, " MiB"),
          .footprint_bytes = 2 * kBytes,
          .moved_bytes = 2.0 * static_cast<double>(kBytes),
          .launch = [](std::byte* memory, void* stream) {
            return CudaToStatus(
                cudaMemcpyAsync(memory + kBytes, memory, kBytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream)),
                "copy");
          }};
}

// c [m, n] = a [m, k] w^T, w [n, k]: a linear layer.
BenchCase GemmCase(Gemm* gemm, const char* layer, std::int64_t m, std::int64_t n, std::int64_t k, DType type = kType) {
  const std::int64_t per_element = type == kType ? 1 : 2;  // in elements of kType
  const auto numbers = static_cast<double>(m * k + n * k + m * n);
  return {.kernel = type == kType ? "gemm bf16" : "gemm fp32",
          .shape = absl::StrCat(layer, " M=", m, " N=", n, " K=", k),
          .footprint_bytes =
              Cursor::BytesOf(m * k * per_element) + Cursor::BytesOf(n * k * per_element) + Cursor::BytesOf(m * n * per_element),
          .moved_bytes = numbers * static_cast<double>(ElementBytes(type)),
          .operations = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k),
          .launch = [=](std::byte* memory, void* stream) {
            Cursor cursor(memory);
            const MatrixView a{.data = cursor.Take(m * k * per_element), .dtype = type, .rows = m, .columns = k, .row_stride = k};
            const MatrixView w{.data = cursor.Take(n * k * per_element), .dtype = type, .rows = n, .columns = k, .row_stride = k};
            const MatrixView c{.data = cursor.Take(m * n * per_element), .dtype = type, .rows = m, .columns = n, .row_stride = n};
            return gemm->Run({.a = a, .b = w.Transposed(), .c = c}, stream);
          }};
}

// A matrix of one part whose codes and scales are whatever lies there.
QuantizedMatrix QuantizedAt(Cursor* cursor, StorageFormat format, std::int64_t n, std::int64_t k) {
  const bool is_nf4 = format == StorageFormat::kNf4;
  QuantizedMatrix matrix = {.format = format, .rows = n, .columns = k, .codes = cursor->Take(is_nf4 ? n * k / 4 : n * k / 2)};
  const std::int64_t blocks = n * k / kNf4BlockValues;
  matrix.scales = cursor->Take(is_nf4 ? blocks / 2 : 2 * n);
  matrix.nested_map = reinterpret_cast<const float*>(cursor->Take(512));
  matrix.nested_absmax = reinterpret_cast<const float*>(cursor->Take(2 * (blocks / kNf4NestedBlocks + 1)));
  matrix.nested_offset = reinterpret_cast<const float*>(cursor->Take(8));
  matrix.num_parts = 1;
  matrix.parts[0] = {.row_begin = 0, .row_end = n};
  return matrix;
}

double CodedBytes(StorageFormat format, std::int64_t n, std::int64_t k) {
  return static_cast<double>(n * k) * (format == StorageFormat::kNf4 ? 0.5 + 1.0 / kNf4BlockValues : 1);
}

// m 0: the whole matrix to bf16; else a product with m rows.
BenchCase QuantizedCase(StorageFormat format, const char* layer, std::int64_t m, std::int64_t n, std::int64_t k) {
  const std::int64_t written = m == 0 ? n * k : m * (n + k);
  return {.kernel = absl::StrCat(m == 0 ? "dequantize " : "few rows ", StorageFormatName(format)),
          .shape = absl::StrCat(layer, " M=", m, " N=", n, " K=", k),
          // Scales and the ends of the arrays are below an eighth of the codes.
          .footprint_bytes = Cursor::BytesOf(n * k * 5 / 8) + Cursor::BytesOf(written + 1024),
          .moved_bytes = CodedBytes(format, n, k) + 2.0 * static_cast<double>(written),
          .operations = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k),
          .launch = [=](std::byte* memory, void* stream) {
            Cursor cursor(memory);
            const QuantizedMatrix matrix = QuantizedAt(&cursor, format, n, k);
            if (m == 0) return Dequantize(matrix, cursor.Take(n * k), Device::kCuda, stream);
            MultiplyFewParams params = {.weight = matrix, .x = cursor.Take(m * k)};
            params.y = cursor.Take(m * n);
            params.num_rows = m;
            return MultiplyFew(params, Device::kCuda, stream);
          }};
}

BenchCase RmsNormCase(std::int64_t rows, std::int64_t width, const BenchMemory& weight) {
  const std::int64_t count = rows * width;
  return {.kernel = "rms_norm",
          .shape = absl::StrCat("[", rows, ", ", width, "]"),
          .footprint_bytes = 3 * Cursor::BytesOf(count),
          .moved_bytes = 3.0 * static_cast<double>(count) * static_cast<double>(ElementBytes(kType)),
          .launch = [=, weight_begin = weight.begin()](std::byte* memory, void* stream) {
            Cursor cursor(memory);
            RmsNormParams params{.dtype = kType, .weight = weight_begin};
            params.input = reinterpret_cast<const float*>(cursor.Take(2 * count));
            params.output = cursor.Take(count);
            params.num_rows = rows;
            params.width = width;
            params.epsilon = 1e-5f;
            return RmsNorm(params, Device::kCuda, stream);
          }};
}

BenchCase RmsNormBackwardCase(std::int64_t rows, std::int64_t width, const BenchMemory& weight) {
  const std::int64_t count = rows * width;
  return {.kernel = "rms_norm backward",
          .shape = absl::StrCat("[", rows, ", ", width, "]"),
          .footprint_bytes = 5 * Cursor::BytesOf(count),
          .moved_bytes = 7.0 * static_cast<double>(count) * static_cast<double>(ElementBytes(kType)),
          .launch = [=, weight_begin = weight.begin()](std::byte* memory, void* stream) {
            Cursor cursor(memory);
            RmsNormBackwardParams params{.dtype = kType, .weight = weight_begin};
            params.input = reinterpret_cast<const float*>(cursor.Take(2 * count));
            params.grad_output = cursor.Take(count);
            params.grad_input = reinterpret_cast<float*>(cursor.Take(2 * count));
            params.num_rows = rows;
            params.width = width;
            params.epsilon = 1e-5f;
            return RmsNormBackward(params, Device::kCuda, stream);
          }};
}

BenchCase SwigluCase(std::int64_t rows, std::int64_t width) {
  const std::int64_t count = rows * width;
  return {.kernel = "swiglu",
          .shape = absl::StrCat("[", rows, ", ", width, "]"),
          .footprint_bytes = Cursor::BytesOf(4 * count) + Cursor::BytesOf(count),
          .moved_bytes = 5.0 * static_cast<double>(count) * static_cast<double>(ElementBytes(kType)),
          .launch = [=](std::byte* memory, void* stream) {
            Cursor cursor(memory);
            SwigluParams params{.dtype = kType, .gate_up = reinterpret_cast<const float*>(cursor.Take(4 * count))};
            params.output = cursor.Take(count);
            params.num_rows = rows;
            params.width = width;
            return Swiglu(params, Device::kCuda, stream);
          }};
}

// Queries and keys in the fused projection. Positions and angles are zeros: the bytes are the same.
BenchCase RopeCase(std::int64_t rows, std::int64_t heads, std::int64_t head_dim, std::int64_t row_stride,
                   const BenchMemory& zeros) {
  return {.kernel = "rope",
          .shape = absl::StrCat("[", rows, ", ", heads, " x ", head_dim, " of ", row_stride, "]"),
          .footprint_bytes = Cursor::BytesOf(rows * row_stride),
          .moved_bytes = 2.0 * static_cast<double>(rows * heads * head_dim) * static_cast<double>(ElementBytes(kType)),
          .launch = [=, zeros_begin = zeros.begin()](std::byte* memory, void* stream) {
            RopeParams params{.dtype = kType, .x = memory, .num_rows = rows, .row_stride = row_stride};
            params.num_heads = heads;
            params.head_dim = head_dim;
            params.positions = reinterpret_cast<const std::int32_t*>(zeros_begin);
            params.cosines = reinterpret_cast<const float*>(zeros_begin);
            params.sines = params.cosines;
            return Rope(params, Device::kCuda, stream);
          }};
}

std::vector<BenchCase> Cases(Gemm* gemm, const BenchMemory& weight, const BenchMemory& zeros) {
  std::vector<BenchCase> cases;
  for (const std::int64_t m : {8, 64, 256, 2048}) {
    cases.push_back(GemmCase(gemm, "8B qkv", m, 6144, 4096));
    cases.push_back(GemmCase(gemm, "8B out", m, 4096, 4096));
    cases.push_back(GemmCase(gemm, "8B gate_up", m, 28672, 4096));
    cases.push_back(GemmCase(gemm, "8B down", m, 4096, 14336));
    cases.push_back(GemmCase(gemm, "8B adapter A", m, 16, 4096));
    cases.push_back(GemmCase(gemm, "8B adapter B", m, 6144, 16));
    cases.push_back(GemmCase(gemm, "135M qkv", m, 960, 576));
    cases.push_back(GemmCase(gemm, "135M out", m, 576, 576));
    cases.push_back(GemmCase(gemm, "135M gate_up", m, 3072, 576));
    cases.push_back(GemmCase(gemm, "135M down", m, 576, 1536));
  }
  cases.push_back(GemmCase(gemm, "8B qkv", 256, 6144, 4096, DType::kFp32));
  for (const StorageFormat format : {StorageFormat::kFp8Row, StorageFormat::kFp8Block, StorageFormat::kNf4}) {
    for (const std::int64_t m : {0, 1, 8, 16, 32, 64}) {
      cases.push_back(QuantizedCase(format, "8B qkv", m, 6144, 4096));
      cases.push_back(QuantizedCase(format, "8B out", m, 4096, 4096));
      cases.push_back(QuantizedCase(format, "8B gate_up", m, 28672, 4096));
      cases.push_back(QuantizedCase(format, "8B down", m, 4096, 14336));
    }
  }
  for (const std::int64_t rows : {8, 256, 2048, 16384}) {
    for (const std::int64_t width : {576, 4096}) {
      cases.push_back(RmsNormCase(rows, width, weight));
      cases.push_back(RmsNormBackwardCase(rows, width, weight));
    }
    for (const std::int64_t width : {1536, 14336}) cases.push_back(SwigluCase(rows, width));
    cases.push_back(RopeCase(rows, 12, 64, 960, zeros));
    cases.push_back(RopeCase(rows, 40, 128, 6144, zeros));
  }
  return cases;
}

absl::Status RunBench() {
  if (!HasCudaDevice()) return absl::FailedPreconditionError("kernel bench: no CUDA device");
  TANDEM_ASSIGN_OR_RETURN(const auto stream, Stream::Create(Device::kCuda));
  TANDEM_ASSIGN_OR_RETURN(const auto arena, BenchMemory::Create(kArenaBytes, /*is_random=*/true));
  TANDEM_ASSIGN_OR_RETURN(const auto weight, BenchMemory::Create(std::uint64_t{1} << 20, /*is_random=*/true));
  TANDEM_ASSIGN_OR_RETURN(const auto zeros, BenchMemory::Create(std::uint64_t{1} << 20, /*is_random=*/false));
  TANDEM_ASSIGN_OR_RETURN(const auto workspace, BenchMemory::Create(kGemmWorkspaceBytes, /*is_random=*/false));
  TANDEM_ASSIGN_OR_RETURN(const auto gemm, Gemm::Create(Device::kCuda, {workspace->begin(), kGemmWorkspaceBytes}));
  std::vector<BenchCase> cases = Cases(gemm.get(), *weight, *zeros);
  cases.insert(cases.begin(), CopyCase());
  const bool is_json = absl::GetFlag(FLAGS_json);
  double copy_rate = 0;
  for (const BenchCase& bench : cases) {
    absl::StatusOr<double> seconds = SecondsPerLaunch(bench, *arena, stream.get());
    if (!seconds.ok()) return Annotate(seconds.status(), absl::StrCat(bench.kernel, " ", bench.shape));
    const double rate = bench.moved_bytes / *seconds;
    if (copy_rate == 0) copy_rate = rate;
    std::printf(is_json ? "{\"bench\":\"kernel\",\"device\":\"%s\",\"kernel\":\"%s\",\"shape\":\"%s\",\"microseconds\":%.2f,"
                          "\"gigabytes_per_second\":%.1f,\"teraflops\":%.1f,\"share_of_copy_rate\":%.3f}\n"
                        : "%s  %-20s %-36s %9.2f us %8.1f GB/s %7.1f TFLOP/s  %5.2f of copy\n",
                DeviceName(Device::kCuda).c_str(), bench.kernel.c_str(), bench.shape.c_str(), *seconds * 1e6, rate * 1e-9,
                bench.operations / *seconds * 1e-12, rate / copy_rate);
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  if (const absl::Status status = tandem::RunBench(); !status.ok()) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    return 1;
  }
  return 0;
}

#include "common/model/weight_loader.h"

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#include "common/base/check.h"
#include "common/base/units.h"
#include "common/model/stripe_writer.h"
#include "common/model/weight_encoders.h"

namespace tandem {
namespace {

constexpr std::uint64_t kStripeBytes = 4 * kMiB;

// The row of the layout (half-split rotary order) for a row of a file that interleaves the halves: 0, 1, 2, 3 go to 0, hd/2, 1,
// hd/2 + 1.
std::uint64_t RowInLayout(std::uint64_t file_row, int interleaved_head_dim) {
  if (interleaved_head_dim == 0) return file_row;
  const auto head_dim = static_cast<std::uint64_t>(interleaved_head_dim);
  const std::uint64_t row_in_head = file_row % head_dim;
  return file_row - row_in_head + row_in_head / 2 + (row_in_head % 2) * (head_dim / 2);
}

// An NF4 tensor's absmax can be quantised again when all of them are known: the thread that loads the last stripe does it.
struct Nf4Progress {
  std::once_flag is_begun;
  std::vector<float> absmax;  // [rows, columns / 64]
  std::atomic<std::size_t> num_stripes_left = 0;
};

// Rows [begin, end) of one tensor: what a thread takes at a time. Whole heads, where rows change places within a head.
struct Stripe {
  const TensorLoad* load = nullptr;
  Nf4Progress* nf4 = nullptr;  // null in the other formats
  std::uint64_t begin_row = 0;
  std::uint64_t end_row = 0;
};

// Loads tensors of one call, on several threads at once.
class Loader {
 public:
  Loader(std::span<const TensorLoad> loads, Device device, std::span<std::byte> region) : device_(device), region_(region) {
    for (const TensorLoad& load : loads) AddStripes(load);
  }
  std::size_t num_stripes() const { return stripes_.size(); }

  // Takes stripes until none is left or one failed. `after_stripe` is called after each.
  absl::Status Run(const std::function<void()>& after_stripe) {
    const absl::Status status = TakeStripes(after_stripe);
    if (!status.ok()) is_stopped_ = true;
    return status;
  }
  std::uint64_t bytes_written() const { return bytes_written_; }

 private:
  static std::uint64_t FileRowBytes(const TensorLoad& load) {
    const CodecBlock block = BlockOf(load.codec);
    return load.target.columns / block.num_values * block.size_bytes;
  }
  // True when the file's bytes are the region's.
  static bool IsCopy(const TensorLoad& load) {
    const StorageFormat format = load.target.format;
    if (load.target.interleaved_head_dim != 0) return false;
    if (format == StorageFormat::kFp8Block) return true;
    return !load.block_scales.has_value() && ((load.codec == WeightCodec::kF32 && format == StorageFormat::kFp32) ||
                                              (load.codec == WeightCodec::kBf16 && format == StorageFormat::kBf16));
  }

  void AddStripes(const TensorLoad& load) {
    const WeightTarget& target = load.target;
    const std::uint64_t row_bytes = RowBytes(target.format, target.columns);
    TANDEM_CHECK(target.begin_bytes + target.rows * row_bytes <= region_.size(), target.name, " ends outside the region of ",
                 region_.size());
    std::uint64_t num_rows = std::max<std::uint64_t>(1, kStripeBytes / std::max(row_bytes, FileRowBytes(load)));
    if (target.interleaved_head_dim > 0) num_rows = RoundUp(num_rows, static_cast<std::uint64_t>(target.interleaved_head_dim));
    Nf4Progress* const nf4 = target.format == StorageFormat::kNf4 ? &nf4_.emplace_back() : nullptr;
    for (std::uint64_t begin = 0; begin < target.rows; begin += num_rows) {
      stripes_.push_back({&load, nf4, begin, std::min(target.rows, begin + num_rows)});
      const std::uint64_t size = stripes_.back().end_row - begin;
      max_stripe_bytes_ = std::max({max_stripe_bytes_, size * row_bytes, size * sizeof(float)});
      if (nf4 != nullptr) ++nf4->num_stripes_left;
    }
    if (nf4 != nullptr) max_stripe_bytes_ = std::max(max_stripe_bytes_, target.rows * target.columns / kNf4BlockValues);
    if (target.format == StorageFormat::kFp8Block) {
      max_stripe_bytes_ = std::max(max_stripe_bytes_, NumBlockScales(target.rows, target.columns) * sizeof(float));
    }
  }

  absl::Status TakeStripes(const std::function<void()>& after_stripe) {
    TANDEM_ASSIGN_OR_RETURN(const std::unique_ptr<StripeWriter> writer,
                            StripeWriter::Create(device_, region_, max_stripe_bytes_));
    Scratch scratch;
    while (!is_stopped_) {
      const std::size_t index = next_++;
      if (index >= stripes_.size()) break;
      TANDEM_RETURN_IF_ERROR(Annotate(Load(stripes_[index], writer.get(), &scratch),
                                      absl::StrCat("tensor '", stripes_[index].load->target.name, "'")));
      after_stripe();
    }
    return writer->Finish();
  }

  // A thread's own.
  struct Scratch {
    std::vector<std::byte> coded;  // of a stripe, as in the file
    std::vector<float> values;     // of a row
    std::vector<float> scales;     // of a stripe
    std::vector<float> factors;    // block scales of a stripe's rows
  };

  absl::Status Load(const Stripe& stripe, StripeWriter* writer, Scratch* scratch) {
    const TensorLoad& load = *stripe.load;
    const WeightTarget& target = load.target;
    const std::uint64_t num_rows = stripe.end_row - stripe.begin_row;
    const std::uint64_t row_bytes = RowBytes(target.format, target.columns), file_row_bytes = FileRowBytes(load);
    const std::uint64_t file_begin_bytes = load.file_begin_bytes + stripe.begin_row * file_row_bytes;
    TANDEM_ASSIGN_OR_RETURN(const std::span<std::byte> out,
                            writer->Begin(target.begin_bytes + stripe.begin_row * row_bytes, num_rows * row_bytes));
    if (IsCopy(load)) {
      TANDEM_RETURN_IF_ERROR(load.file->ReadAt(file_begin_bytes, out));
      if (target.format == StorageFormat::kFp8Block) TANDEM_RETURN_IF_ERROR(CheckFp8Codes(out));
    } else {
      scratch->coded.resize(num_rows * file_row_bytes);
      TANDEM_RETURN_IF_ERROR(load.file->ReadAt(file_begin_bytes, scratch->coded));
      TANDEM_RETURN_IF_ERROR(Encode(stripe, out, scratch));
    }
    bytes_written_ += num_rows * row_bytes;
    TANDEM_RETURN_IF_ERROR(writer->Commit());
    if (target.format == StorageFormat::kFp8Row) {
      return Write(target.scales_begin_bytes + stripe.begin_row * sizeof(float), std::as_bytes(std::span(scratch->scales)),
                   writer);
    }
    if (target.format == StorageFormat::kFp8Block && stripe.begin_row == 0) return CopyBlockScales(load, scratch, writer);
    if (stripe.nf4 != nullptr && --stripe.nf4->num_stripes_left == 0) return FinishNf4(target, stripe.nf4, writer);
    return absl::OkStatus();
  }

  static std::uint64_t NumBlockScales(std::uint64_t rows, std::uint64_t columns) {
    return static_cast<std::uint64_t>(NumScaleBlocks(static_cast<std::int64_t>(rows)) *
                                      NumScaleBlocks(static_cast<std::int64_t>(columns)));
  }

  static absl::Status CheckFp8Codes(std::span<const std::byte> codes) {
    constexpr std::byte kNan{0x7f};
    const auto nan = std::find_if(codes.begin(), codes.end(), [](std::byte code) { return (code & kNan) == kNan; });
    if (nan == codes.end()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("a code is NaN, byte ", nan - codes.begin(), " of ", codes.size()));
  }

  // All of a tensor's at once: there is one for 16384 weights.
  absl::Status CopyBlockScales(const TensorLoad& load, Scratch* scratch, StripeWriter* writer) {
    TANDEM_RETURN_IF_ERROR(ReadBlockScales({.load = &load, .begin_row = 0, .end_row = load.target.rows}, scratch));
    for (const float scale : scratch->factors) {
      if (std::fabs(scale) * kFp8E4m3Max <= FLT_MAX) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("a block's scale is ", scale, "; times ", kFp8E4m3Max, ", the largest code, it must be finite"));
    }
    return Write(load.target.scales_begin_bytes, std::as_bytes(std::span(scratch->factors)), writer);
  }

  static absl::Status ReadBlockScales(const Stripe& stripe, Scratch* scratch) {
    if (!stripe.load->block_scales.has_value()) return absl::OkStatus();
    const BlockScales& scales = *stripe.load->block_scales;
    const std::uint64_t columns = NumBlockScales(1, stripe.load->target.columns), value_bytes = BlockOf(scales.codec).size_bytes;
    const std::uint64_t begin = stripe.begin_row / kScaleBlock, end = NumBlockScales(stripe.end_row, 1);
    std::vector<std::byte> coded((end - begin) * columns * value_bytes);
    TANDEM_RETURN_IF_ERROR(scales.file->ReadAt(scales.file_begin_bytes + begin * columns * value_bytes, coded));
    scratch->factors.resize((end - begin) * columns);
    Decode(scales.codec, coded, scratch->factors);
    return absl::OkStatus();
  }

  // Row after row through fp32 to its place in `out`, which holds the rows of the stripe; the scales go to the scratch or, in
  // NF4, to the tensor's absmax.
  static absl::Status Encode(const Stripe& stripe, std::span<std::byte> out, Scratch* scratch) {
    const TensorLoad& load = *stripe.load;
    const WeightTarget& target = load.target;
    const std::uint64_t num_rows = stripe.end_row - stripe.begin_row;
    const std::uint64_t row_bytes = RowBytes(target.format, target.columns), file_row_bytes = FileRowBytes(load);
    const std::uint64_t scales_per_row = ScalesPerRow(target.format, target.columns);
    std::span<float> scales;
    if (stripe.nf4 != nullptr) {
      std::vector<float>& absmax = stripe.nf4->absmax;
      std::call_once(stripe.nf4->is_begun, [&] { absmax.resize(target.rows * scales_per_row); });
      scales = std::span(absmax).subspan(stripe.begin_row * scales_per_row, num_rows * scales_per_row);
    } else {
      scratch->scales.resize(num_rows * scales_per_row);
      scales = scratch->scales;
    }
    TANDEM_RETURN_IF_ERROR(ReadBlockScales(stripe, scratch));
    scratch->values.resize(target.columns);
    for (std::uint64_t row = 0; row < num_rows; ++row) {
      const std::uint64_t place = RowInLayout(row, target.interleaved_head_dim);
      Decode(load.codec, std::span(scratch->coded).subspan(row * file_row_bytes, file_row_bytes), scratch->values);
      if (load.block_scales.has_value()) {
        const std::uint64_t first =
            ((stripe.begin_row + row) / kScaleBlock - stripe.begin_row / kScaleBlock) * NumBlockScales(1, target.columns);
        for (std::uint64_t i = 0; i < target.columns; ++i) scratch->values[i] *= scratch->factors[first + i / kScaleBlock];
      }
      TANDEM_RETURN_IF_ERROR(EncodeRows(target.format, scratch->values, target.columns, out.subspan(place * row_bytes, row_bytes),
                                        scales.subspan(place * scales_per_row, scales_per_row)));
    }
    return absl::OkStatus();
  }

  absl::Status FinishNf4(const WeightTarget& target, Nf4Progress* nf4, StripeWriter* writer) {
    std::vector<std::uint8_t> codes(nf4->absmax.size());
    std::vector<float> nested((codes.size() + kNf4NestedBlocks - 1) / kNf4NestedBlocks);
    const float offset = EncodeNestedAbsmax(nf4->absmax, codes, nested);
    nf4->absmax = {};
    TANDEM_RETURN_IF_ERROR(Write(target.scales_begin_bytes, std::as_bytes(std::span(codes)), writer));
    TANDEM_RETURN_IF_ERROR(Write(target.nested_absmax_begin_bytes, std::as_bytes(std::span(nested)), writer));
    return Write(target.nested_offset_begin_bytes, std::as_bytes(std::span(&offset, 1)), writer);
  }

  absl::Status Write(std::uint64_t begin_bytes, std::span<const std::byte> bytes, StripeWriter* writer) {
    TANDEM_ASSIGN_OR_RETURN(const std::span<std::byte> out, writer->Begin(begin_bytes, bytes.size()));
    std::memcpy(out.data(), bytes.data(), bytes.size());
    bytes_written_ += bytes.size();
    return writer->Commit();
  }

  const Device device_;
  const std::span<std::byte> region_;
  std::deque<Nf4Progress> nf4_;
  std::vector<Stripe> stripes_;
  std::uint64_t max_stripe_bytes_ = 0;
  std::atomic<std::size_t> next_ = 0;
  std::atomic<bool> is_stopped_ = false;
  std::atomic<std::uint64_t> bytes_written_ = 0;
};

}  // namespace

absl::Status LoadTensors(std::span<const TensorLoad> loads, Device device, std::span<std::byte> region,
                         const std::function<void(std::uint64_t)>& progress) {
  Loader loader(loads, device, region);
  const std::size_t wanted = device == Device::kCpu ? 2 : std::clamp<std::size_t>(std::thread::hardware_concurrency(), 2, 8);
  const std::size_t num_others = std::min(wanted, std::max<std::size_t>(loader.num_stripes(), 1)) - 1;
  std::vector<absl::Status> others(num_others);
  std::vector<std::thread> threads;
  try {
    for (absl::Status& other : others) threads.emplace_back([&loader, &other] { other = loader.Run([] {}); });
  } catch (const std::system_error&) {
    // No more threads to be had: those that there are load everything.
  }
  absl::Status status = loader.Run([&] {
    if (progress) progress(loader.bytes_written());
  });
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& other : others) {
    if (status.ok()) status = other;
  }
  TANDEM_RETURN_IF_ERROR(status);
  if (progress) progress(loader.bytes_written());
  return absl::OkStatus();
}

}  // namespace tandem

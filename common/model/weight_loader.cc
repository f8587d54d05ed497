#include "common/model/weight_loader.h"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>

#include "common/base/check.h"
#include "common/base/units.h"
#include "common/model/stripe_writer.h"

namespace tandem {
namespace {

constexpr std::uint64_t kStripeBytes = 4 * kMiB;

std::uint64_t ElementBytes(StorageFormat format) { return format == StorageFormat::kFp32 ? 4 : 2; }

// The row of the layout (half-split rotary order) for a row of a file that interleaves the halves: 0, 1, 2, 3 go to 0, hd/2, 1,
// hd/2 + 1.
std::uint64_t RowInLayout(std::uint64_t file_row, int interleaved_head_dim) {
  if (interleaved_head_dim == 0) return file_row;
  const auto head_dim = static_cast<std::uint64_t>(interleaved_head_dim);
  const std::uint64_t row_in_head = file_row % head_dim;
  return file_row - row_in_head + row_in_head / 2 + (row_in_head % 2) * (head_dim / 2);
}

// Rows [begin, end) of one tensor: what a thread takes at a time. Whole heads, where rows change places within a head.
struct Stripe {
  const TensorLoad* load = nullptr;
  std::uint64_t begin_row = 0;
  std::uint64_t end_row = 0;
};

// Loads tensors of one call, on several threads at once.
class Loader {
 public:
  Loader(std::span<const TensorLoad> loads, StorageFormat format, Device device, std::span<std::byte> region)
      : format_(format), device_(device), region_(region) {
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
  std::uint64_t RowBytes(const TensorLoad& load) const { return load.target.columns * ElementBytes(format_); }
  static std::uint64_t FileRowBytes(const TensorLoad& load) {
    const CodecBlock block = BlockOf(load.codec);
    return load.target.columns / block.num_values * block.size_bytes;
  }
  // True when the file's bytes are the region's.
  bool IsCopy(const TensorLoad& load) const {
    return load.target.interleaved_head_dim == 0 && ((load.codec == WeightCodec::kF32 && format_ == StorageFormat::kFp32) ||
                                                     (load.codec == WeightCodec::kBf16 && format_ == StorageFormat::kBf16));
  }

  void AddStripes(const TensorLoad& load) {
    const WeightTarget& target = load.target;
    const std::uint64_t row_bytes = RowBytes(load);
    TANDEM_CHECK(target.begin_bytes + target.rows * row_bytes <= region_.size(), target.name, " ends outside the region of ",
                 region_.size());
    std::uint64_t num_rows = std::max<std::uint64_t>(1, kStripeBytes / std::max(row_bytes, FileRowBytes(load)));
    if (target.interleaved_head_dim > 0) num_rows = RoundUp(num_rows, static_cast<std::uint64_t>(target.interleaved_head_dim));
    for (std::uint64_t begin = 0; begin < target.rows; begin += num_rows) {
      stripes_.push_back({&load, begin, std::min(target.rows, begin + num_rows)});
      max_stripe_bytes_ = std::max(max_stripe_bytes_, (stripes_.back().end_row - begin) * row_bytes);
    }
  }

  absl::Status TakeStripes(const std::function<void()>& after_stripe) {
    TANDEM_ASSIGN_OR_RETURN(const std::unique_ptr<StripeWriter> writer,
                            StripeWriter::Create(device_, region_, max_stripe_bytes_));
    std::vector<std::byte> coded;
    std::vector<float> values;
    while (!is_stopped_) {
      const std::size_t index = next_++;
      if (index >= stripes_.size()) break;
      TANDEM_RETURN_IF_ERROR(Annotate(Load(stripes_[index], writer.get(), &coded, &values),
                                      absl::StrCat("tensor '", stripes_[index].load->target.name, "'")));
      after_stripe();
    }
    return writer->Finish();
  }

  absl::Status Load(const Stripe& stripe, StripeWriter* writer, std::vector<std::byte>* coded, std::vector<float>* values) {
    const TensorLoad& load = *stripe.load;
    const std::uint64_t num_rows = stripe.end_row - stripe.begin_row;
    const std::uint64_t row_bytes = RowBytes(load), file_row_bytes = FileRowBytes(load);
    const std::uint64_t file_begin_bytes = load.file_begin_bytes + stripe.begin_row * file_row_bytes;
    TANDEM_ASSIGN_OR_RETURN(const std::span<std::byte> out,
                            writer->Begin(load.target.begin_bytes + stripe.begin_row * row_bytes, num_rows * row_bytes));
    if (IsCopy(load)) {
      TANDEM_RETURN_IF_ERROR(load.file->ReadAt(file_begin_bytes, out));
    } else {
      coded->resize(num_rows * file_row_bytes);
      TANDEM_RETURN_IF_ERROR(load.file->ReadAt(file_begin_bytes, *coded));
      for (std::uint64_t row = 0; row < num_rows; ++row) {
        const std::uint64_t place = RowInLayout(row, load.target.interleaved_head_dim) * row_bytes;
        DecodeRow(load.codec, std::span(*coded).subspan(row * file_row_bytes, file_row_bytes), out.subspan(place, row_bytes),
                  values);
      }
    }
    bytes_written_ += num_rows * row_bytes;
    return writer->Commit();
  }

  void DecodeRow(WeightCodec codec, std::span<const std::byte> coded, std::span<std::byte> row,
                 std::vector<float>* values) const {
    if (format_ == StorageFormat::kFp32) {
      Decode(codec, coded, {reinterpret_cast<float*>(row.data()), row.size() / sizeof(float)});
      return;
    }
    values->resize(row.size() / sizeof(std::uint16_t));
    Decode(codec, coded, *values);
    auto* const out = reinterpret_cast<std::uint16_t*>(row.data());
    for (std::size_t i = 0; i < values->size(); ++i) out[i] = FloatToBf16((*values)[i]);
  }

  const StorageFormat format_;
  const Device device_;
  const std::span<std::byte> region_;
  std::vector<Stripe> stripes_;
  std::uint64_t max_stripe_bytes_ = 0;
  std::atomic<std::size_t> next_ = 0;
  std::atomic<bool> is_stopped_ = false;
  std::atomic<std::uint64_t> bytes_written_ = 0;
};

}  // namespace

absl::Status LoadTensors(std::span<const TensorLoad> loads, StorageFormat format, Device device, std::span<std::byte> region,
                         const std::function<void(std::uint64_t)>& progress) {
  Loader loader(loads, format, device, region);
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

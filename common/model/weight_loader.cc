#include "common/model/weight_loader.h"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>

#include "common/base/check.h"
#include "common/base/units.h"

namespace tandem {
namespace {

constexpr std::uint64_t kStripeBytes = 1 * kMiB;

std::uint64_t ElementBytes(StorageFormat format) { return format == StorageFormat::kFp32 ? 4 : 2; }

// The row of the layout (half-split rotary order) for a row of a file that interleaves the halves: 0, 1, 2, 3 go to 0, hd/2, 1,
// hd/2 + 1.
std::uint64_t RowInLayout(std::uint64_t file_row, int interleaved_head_dim) {
  if (interleaved_head_dim == 0) return file_row;
  const auto head_dim = static_cast<std::uint64_t>(interleaved_head_dim);
  const std::uint64_t row_in_head = file_row % head_dim;
  return file_row - row_in_head + row_in_head / 2 + (row_in_head % 2) * (head_dim / 2);
}

// Loads tensors of one call, on several threads at once.
class Loader {
 public:
  Loader(std::span<const TensorLoad> loads, StorageFormat format, std::span<std::byte> region)
      : loads_(loads), format_(format), region_(region) {}

  // Takes tensors until none is left or one failed. `after_stripe` is called now and then.
  absl::Status Run(const std::function<void()>& after_stripe) {
    std::vector<std::byte> coded;
    std::vector<float> values;
    while (!is_stopped_) {
      const std::size_t index = next_++;
      if (index >= loads_.size()) break;
      if (absl::Status status = Load(loads_[index], &coded, &values, after_stripe); !status.ok()) {
        is_stopped_ = true;
        return Annotate(status, absl::StrCat("tensor '", loads_[index].target.name, "'"));
      }
    }
    return absl::OkStatus();
  }
  std::uint64_t bytes_written() const { return bytes_written_; }

 private:
  // True when the file's bytes are the region's.
  bool IsCopy(const TensorLoad& load) const {
    return load.target.interleaved_head_dim == 0 && ((load.codec == WeightCodec::kF32 && format_ == StorageFormat::kFp32) ||
                                                     (load.codec == WeightCodec::kBf16 && format_ == StorageFormat::kBf16));
  }

  absl::Status Load(const TensorLoad& load, std::vector<std::byte>* coded, std::vector<float>* values,
                    const std::function<void()>& after_stripe) {
    const WeightTarget& target = load.target;
    const CodecBlock block = BlockOf(load.codec);
    const std::uint64_t file_row_bytes = target.columns / block.num_values * block.size_bytes;
    const std::uint64_t row_bytes = target.columns * ElementBytes(format_);
    TANDEM_CHECK(target.begin_bytes + target.rows * row_bytes <= region_.size(), target.name, " ends outside the region of ",
                 region_.size());
    const std::uint64_t rows_per_stripe = std::max<std::uint64_t>(1, kStripeBytes / file_row_bytes);
    for (std::uint64_t begin = 0; begin < target.rows && !is_stopped_; begin += rows_per_stripe) {
      const std::uint64_t end = std::min(target.rows, begin + rows_per_stripe);
      const std::uint64_t file_begin_bytes = load.file_begin_bytes + begin * file_row_bytes;
      const std::uint64_t stripe_bytes = (end - begin) * file_row_bytes;
      if (IsCopy(load)) {
        TANDEM_RETURN_IF_ERROR(
            load.file->ReadAt(file_begin_bytes, region_.subspan(target.begin_bytes + begin * row_bytes, stripe_bytes)));
      } else {
        coded->resize(stripe_bytes);
        TANDEM_RETURN_IF_ERROR(load.file->ReadAt(file_begin_bytes, *coded));
        for (std::uint64_t row = begin; row < end; ++row) {
          const std::uint64_t place = target.begin_bytes + RowInLayout(row, target.interleaved_head_dim) * row_bytes;
          DecodeRow(load.codec, std::span(*coded).subspan((row - begin) * file_row_bytes, file_row_bytes),
                    region_.subspan(place, row_bytes), values);
        }
      }
      bytes_written_ += (end - begin) * row_bytes;
      after_stripe();
    }
    return absl::OkStatus();
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

  const std::span<const TensorLoad> loads_;
  const StorageFormat format_;
  const std::span<std::byte> region_;
  std::atomic<std::size_t> next_ = 0;
  std::atomic<bool> is_stopped_ = false;
  std::atomic<std::uint64_t> bytes_written_ = 0;
};

}  // namespace

absl::Status LoadTensors(std::span<const TensorLoad> loads, StorageFormat format, std::span<std::byte> region,
                         const std::function<void(std::uint64_t)>& progress) {
  Loader loader(loads, format, region);
  absl::Status second_status;
  std::thread second;
  try {
    second = std::thread([&] { second_status = loader.Run([] {}); });
  } catch (const std::system_error&) {
    // No thread to be had: the calling one loads everything.
  }
  const absl::Status status = loader.Run([&] {
    if (progress) progress(loader.bytes_written());
  });
  if (second.joinable()) second.join();
  TANDEM_RETURN_IF_ERROR(status);
  TANDEM_RETURN_IF_ERROR(second_status);
  if (progress) progress(loader.bytes_written());
  return absl::OkStatus();
}

}  // namespace tandem

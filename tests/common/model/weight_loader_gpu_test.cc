// Weights decoded into device memory, against the same decoded into host memory.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <vector>

#include "common/base/units.h"
#include "common/memory/pool_chunks.h"
#include "common/model/model_source.h"
#include "common/model/weight_codecs.h"
#include "tests/support/block_scaled_model.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/tiny_model.h"

namespace tandem {
namespace {

TEST(DeviceWeights, AreTheHostsRoundedToBf16) {
  if (!HasCudaDevice()) GTEST_SKIP() << "no GPU";
  for (const char* const dtype : {"F32", "F16", "BF16"}) {
    const std::string folder = absl::StrCat("/tmp/tandem_device_weights_", ::getpid(), "_", dtype);
    // An embedding of 17 MiB in fp32: several stripes.
    ASSERT_TRUE(WriteTinyModel(folder, {.vocab_size = 70000, .tie_embeddings = false, .dtype = dtype}).ok());
    const auto source = ModelSource::Open(folder);
    ASSERT_TRUE(source.ok()) << source.status();
    const ModelConfig& config = (*source)->description().config;
    const WeightLayout host_layout = WeightLayout::Create(config, StorageFormat::kFp32);
    const WeightLayout layout = WeightLayout::Create(config, StorageFormat::kBf16);
    std::vector<float> host(host_layout.total_bytes / sizeof(float));
    ASSERT_TRUE((*source)->LoadWeights(host_layout, Device::kCpu, std::as_writable_bytes(std::span(host)), nullptr).ok());

    const auto memory = PoolMemory::CreateCuda();
    ASSERT_TRUE(memory.ok()) << memory.status();
    const std::uint64_t size = RoundUp(layout.total_bytes, 2 * kMiB);
    const auto chunks = (*memory)->CreateChunks(1, size);
    ASSERT_TRUE(chunks.ok()) << chunks.status();
    const auto mapping = (*memory)->Map(*chunks, size);
    ASSERT_TRUE(mapping.ok()) << mapping.status();
    const std::span<std::byte> region((*mapping)->base(), layout.total_bytes);
    std::uint64_t written = 0;
    const absl::Status loaded =
        (*source)->LoadWeights(layout, Device::kCuda, region, [&](std::uint64_t bytes) { written = bytes; });
    ASSERT_TRUE(loaded.ok()) << loaded;
    std::vector<std::byte> device(region.size());
    ASSERT_TRUE(CopyToHost(Device::kCuda, device.data(), region.data(), region.size()).ok());

    const auto host_places = host_layout.Tensors(), places = layout.Tensors();
    ASSERT_EQ(host_places.size(), places.size());
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < places.size(); ++i) {
      ASSERT_EQ(host_places[i]->name, places[i]->name);
      const std::size_t num_values = places[i]->size_bytes / 2;
      total += places[i]->size_bytes;
      std::vector<std::uint16_t> values(num_values);
      std::memcpy(values.data(), device.data() + places[i]->begin_bytes, places[i]->size_bytes);
      const float* const wanted = host.data() + host_places[i]->begin_bytes / sizeof(float);
      std::size_t wrong = 0;
      for (std::size_t k = 0; k < num_values; ++k) wrong += values[k] != FloatToBf16(wanted[k]);
      EXPECT_EQ(wrong, 0u) << dtype << " " << places[i]->name << ", of " << num_values;
    }
    EXPECT_EQ(written, total);
    std::filesystem::remove_all(folder);
  }
}

TEST(DeviceWeights, InEveryFormatAreTheBytesThatTheHostWouldHold) {
  if (!HasCudaDevice()) GTEST_SKIP() << "no GPU";
  const testing::TemporaryDirectory directory;
  const std::string& folder = directory.path();
  // Parts of qkv that span stripes and end within blocks and nested blocks.
  const testing::BlockScaledModel model(folder, {.num_layers = 1, .hidden_size = 1088, .num_heads = 68, .num_kv_heads = 34});
  const auto source = ModelSource::Open(folder);
  ASSERT_TRUE(source.ok()) << source.status();
  for (const StorageFormat format :
       {StorageFormat::kBf16, StorageFormat::kFp8Row, StorageFormat::kFp8Block, StorageFormat::kNf4}) {
    SCOPED_TRACE(StorageFormatName(format));
    const WeightLayout layout = WeightLayout::Create((*source)->description().config, format);
    std::vector<std::byte> host(layout.total_bytes), device(layout.total_bytes);
    ASSERT_EQ((*source)->LoadWeights(layout, Device::kCpu, host, nullptr), absl::OkStatus());
    const auto memory = PoolMemory::CreateCuda();
    ASSERT_TRUE(memory.ok()) << memory.status();
    const std::uint64_t size = RoundUp(layout.total_bytes, 2 * kMiB);
    const auto chunks = (*memory)->CreateChunks(1, size);
    ASSERT_TRUE(chunks.ok()) << chunks.status();
    const auto mapping = (*memory)->Map(*chunks, size);
    ASSERT_TRUE(mapping.ok()) << mapping.status();
    const std::span<std::byte> region((*mapping)->base(), layout.total_bytes);
    ASSERT_EQ((*source)->LoadWeights(layout, Device::kCuda, region, nullptr), absl::OkStatus());
    ASSERT_EQ(CopyToHost(Device::kCuda, device.data(), region.data(), region.size()), absl::OkStatus());
    for (const TensorPlace* place : layout.Tensors()) {
      EXPECT_EQ(std::memcmp(host.data() + place->begin_bytes, device.data() + place->begin_bytes, place->size_bytes), 0)
          << place->name;
    }
  }
}

}  // namespace
}  // namespace tandem

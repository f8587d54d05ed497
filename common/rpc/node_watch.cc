#include "common/rpc/node_watch.h"

#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <system_error>
#include <utility>

#include "absl/time/clock.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/units.h"
#include "common/memory/lease_book.h"
#include "common/rpc/node_metrics.h"

namespace tandem {
namespace {

constexpr absl::Duration kInterval = absl::Milliseconds(500);
constexpr std::uint64_t kNotableBytes = 32 * kMiB;

double Seconds(const timeval& time) { return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec); }

}  // namespace

void ExportMemory(const PoolMember& pool, v1::Role role, std::span<const v1::OwnedBytes> standing, Metrics* metrics) {
  std::map<Metrics::LabelValues, double> memory;
  std::vector<std::pair<Metrics::LabelValues, double>> regions;
  for (const v1::OwnedBytes& region : pool.RegionLedger()) {
    if (!region.in_pool()) continue;
    const std::string& name = region.owner();
    regions.push_back({{name}, static_cast<double>(region.bytes())});
    if (name == "weights" || name == "model" || name == "elastic") {
      memory[{name, name, "pair"}] = static_cast<double>(region.bytes());
    } else if (region.role() == role) {
      for (const v1::OwnedBytes& owned : standing) {
        memory[{owned.owner(), name, RoleName(role)}] += static_cast<double>(owned.bytes());
      }
    }
  }
  metrics->ReplaceGauges(kRegionBytes, regions);
  metrics->ReplaceGauges(kMemoryBytes, {memory.begin(), memory.end()});
}

NodeWatch::NodeWatch(const PoolMember* pool, std::string data_dir, Metrics* metrics)
    : pool_(pool), data_dir_(std::move(data_dir)), metrics_(metrics) {
  metrics_->SetGauge(kBuildInfo, {TANDEM_VERSION}, 1);
  metrics_->SetGauge(kProcessStartTimeSeconds, {}, absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()));
  metrics_->AddCounter(kSeriesRefusedTotal, {}, 0);
  if (pool_ == nullptr || pool_->device() != Device::kCuda) return;
  for (const v1::OwnedBytes& owned : pool_->RegionLedger()) pool_bytes_ += owned.in_pool() ? owned.bytes() : 0;
  const absl::StatusOr<std::string> uuid = DeviceUuid(pool_->device());
  absl::StatusOr<std::unique_ptr<Nvml>> nvml = uuid.ok() ? Nvml::Open(*uuid) : uuid.status();
  if (nvml.ok()) {
    nvml_ = *std::move(nvml);
  } else {
    TANDEM_LOG(kWarning, "daemon", "no load, power and temperature of the GPU: ", std::string(nvml.status().message()));
  }
}

bool NodeWatch::Look() {
  if (MonotonicTime::Now() - looked_ < kInterval) return false;
  looked_ = MonotonicTime::Now();
  LookAtProcess();
  LookAtHost();
  if (pool_ != nullptr) LookAtPool();
  if (pool_ != nullptr && pool_->device() == Device::kCuda) LookAtDevice();
  return true;
}

void NodeWatch::LookAtProcess() {
  rusage usage{};
  if (::getrusage(RUSAGE_SELF, &usage) == 0) {
    const double seconds = Seconds(usage.ru_utime) + Seconds(usage.ru_stime);
    metrics_->AddCounter(kProcessCpuSecondsTotal, {}, std::max(seconds - cpu_seconds_, 0.0));
    cpu_seconds_ = std::max(seconds, cpu_seconds_);
  }
  double size_pages = 0, resident_pages = 0, shared_pages = 0;
  if (std::ifstream("/proc/self/statm") >> size_pages >> resident_pages >> shared_pages) {
    const auto page_bytes = static_cast<double>(::sysconf(_SC_PAGESIZE));
    metrics_->SetGauge(kProcessMemoryBytes, {"resident"}, resident_pages * page_bytes);
    metrics_->SetGauge(kProcessMemoryBytes, {"shared"}, shared_pages * page_bytes);
  }
  std::error_code error;
  const std::filesystem::directory_iterator files("/proc/self/fd", error);
  if (!error) metrics_->SetGauge(kProcessOpenFiles, {}, static_cast<double>(std::distance(begin(files), end(files))));
}

void NodeWatch::LookAtHost() {
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  for (double kib = 0; file >> name >> kib && std::getline(file, unit);) {
    if (name == "MemTotal:") metrics_->SetGauge(kHostMemoryBytes, {"total"}, kib * kKiB);
    if (name == "MemAvailable:") metrics_->SetGauge(kHostMemoryBytes, {"available"}, kib * kKiB);
  }
  struct statvfs disk {};
  if (::statvfs(data_dir_.c_str(), &disk) != 0) return;
  const auto block_bytes = static_cast<double>(disk.f_frsize);
  metrics_->SetGauge(kDiskBytes, {"total"}, block_bytes * static_cast<double>(disk.f_blocks));
  metrics_->SetGauge(kDiskBytes, {"available"}, block_bytes * static_cast<double>(disk.f_bavail));
}

void NodeWatch::LookAtPool() {
  const v1::LeaseState lease = pool_->lease();
  for (const v1::Role role : {v1::ROLE_ROLLOUT, v1::ROLE_TRAINER, v1::ROLE_UNSPECIFIED}) {
    metrics_->SetGauge(kLeaseHolder, {RoleName(role)}, lease.holder() == role ? 1 : 0);
  }
  metrics_->SetGauge(kLeaseEpoch, {}, static_cast<double>(lease.epoch()));
  metrics_->SetGauge(kPeerAttached, {}, pool_->is_peer_attached() ? 1 : 0);
}

void NodeWatch::LookAtDevice() {
  const absl::StatusOr<DeviceMemoryUse> use = DriverMemory(pool_->device());
  if (!use.ok()) return;
  const std::uint64_t used_bytes = use->total_bytes - use->free_bytes;
  const std::uint64_t outside_bytes = used_bytes - std::min(used_bytes, pool_bytes_);
  metrics_->SetGauge(kDeviceMemoryBytes, {"total"}, static_cast<double>(use->total_bytes));
  metrics_->SetGauge(kDeviceMemoryBytes, {"free"}, static_cast<double>(use->free_bytes));
  metrics_->SetGauge(kDeviceMemoryBytes, {"outside_pool"}, static_cast<double>(outside_bytes));
  if (std::max(outside_bytes, logged_bytes_) - std::min(outside_bytes, logged_bytes_) >= kNotableBytes) {
    TANDEM_LOG(kInfo, "daemon", "device memory outside the pool=", FormatBytes(outside_bytes), " (all processes; was ",
               FormatBytes(logged_bytes_), ") pool=", FormatBytes(pool_bytes_), " free=", FormatBytes(use->free_bytes),
               " total=", FormatBytes(use->total_bytes));
    logged_bytes_ = outside_bytes;
  }
  if (nvml_ == nullptr) return;
  const GpuReading reading = nvml_->Read();
  const auto set = [this](const Metric& metric, const auto& value) {
    if (value.has_value()) metrics_->SetGauge(metric, {}, static_cast<double>(*value));
  };
  set(kGpuBusyRatio, reading.busy_ratio);
  set(kGpuPowerWatts, reading.power_watts);
  set(kGpuTemperatureCelsius, reading.temperature_celsius);
  set(kGpuClockHertz, reading.clock_hertz);
  set(kDeviceProcessMemoryBytes, reading.process_memory_bytes);
}

}  // namespace tandem

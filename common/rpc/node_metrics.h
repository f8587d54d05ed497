// Metrics that both daemons serve: the pool, the lease, the node.
#pragma once

#include <array>

#include "common/metrics/metrics.h"

namespace tandem {

inline constexpr Metric kMemoryBytes = {
    .name = "tandem_memory_bytes",
    .help = "Memory of the pool by owner: what the daemon has in its standing region, and what the two share (process 'pair')",
    .labels = {"owner", "region", "process"}};
inline constexpr Metric kRegionBytes = {
    .name = "tandem_region_bytes", .help = "Size of each region; they add up to the pool", .labels = {"region"}};
inline constexpr Metric kDeviceMemoryBytes = {
    .name = "tandem_device_memory_bytes",
    .help =
        "Memory of the GPU as the driver counts it, of all processes: total, free, and outside_pool: used and not the pool "
        "(contexts, modules, graphs, other processes)",
    .labels = {"kind"},
    .needs_gpu = true};
inline constexpr Metric kDeviceProcessMemoryBytes = {
    .name = "tandem_device_process_memory_bytes",
    .help = "Memory of the GPU that the driver counts to this process; absent in a PID namespace of its own",
    .needs_gpu = true};
inline constexpr Metric kLeaseHolder = {
    .name = "tandem_lease_holder",
    .help = "1 for who may touch the elastic region: rollout_server, trainer_server or nobody",
    .labels = {"holder"}};
inline constexpr Metric kLeaseEpoch = {.name = "tandem_lease_epoch", .help = "Rises with each change of the lease"};
inline constexpr Metric kPeerAttached = {.name = "tandem_peer_attached", .help = "1 while the other daemon is attached"};
inline constexpr Metric kHostMemoryBytes = {
    .name = "tandem_host_memory_bytes", .help = "Memory of the host: total, available", .labels = {"kind"}};
inline constexpr Metric kProcessMemoryBytes = {
    .name = "tandem_process_memory_bytes",
    .help = "Host memory of this process: resident, and shared of it (without a GPU that is the pool)",
    .labels = {"kind"}};
inline constexpr Metric kProcessCpuSecondsTotal = {.name = "tandem_process_cpu_seconds_total",
                                                   .type = Metric::Type::kCounter,
                                                   .help = "Processor time of this process, user and system"};
inline constexpr Metric kProcessOpenFiles = {.name = "tandem_process_open_files", .help = "Open descriptors of this process"};
inline constexpr Metric kProcessStartTimeSeconds = {.name = "tandem_process_start_time_seconds",
                                                    .help = "When the daemon began to serve, Unix time"};
inline constexpr Metric kBuildInfo = {
    .name = "tandem_build_info", .help = "1, with the version of the daemon", .labels = {"version"}};
inline constexpr Metric kDiskBytes = {
    .name = "tandem_disk_bytes", .help = "Of the file system of --data_dir: total, available", .labels = {"kind"}};
inline constexpr Metric kGpuBusyRatio = {
    .name = "tandem_gpu_busy_ratio", .help = "Share of the time in which a kernel ran, 0 to 1, by NVML", .needs_gpu = true};
inline constexpr Metric kGpuPowerWatts = {
    .name = "tandem_gpu_power_watts", .help = "Power that the card draws, by NVML", .needs_gpu = true};
inline constexpr Metric kGpuTemperatureCelsius = {
    .name = "tandem_gpu_temperature_celsius", .help = "Temperature of the GPU, by NVML", .needs_gpu = true};
inline constexpr Metric kGpuClockHertz = {
    .name = "tandem_gpu_clock_hertz", .help = "Clock of the multiprocessors, by NVML", .needs_gpu = true};

inline constexpr std::array kNodeMetrics = {&kMemoryBytes,
                                            &kRegionBytes,
                                            &kDeviceMemoryBytes,
                                            &kDeviceProcessMemoryBytes,
                                            &kGpuBusyRatio,
                                            &kGpuPowerWatts,
                                            &kGpuTemperatureCelsius,
                                            &kGpuClockHertz,
                                            &kLeaseHolder,
                                            &kLeaseEpoch,
                                            &kPeerAttached,
                                            &kHostMemoryBytes,
                                            &kProcessMemoryBytes,
                                            &kProcessCpuSecondsTotal,
                                            &kProcessOpenFiles,
                                            &kProcessStartTimeSeconds,
                                            &kBuildInfo,
                                            &kDiskBytes,
                                            &kSeriesRefusedTotal};

}  // namespace tandem

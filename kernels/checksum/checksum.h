// A checksum of memory that the CPU and the GPU compute alike, at the speed of memory: what an adapter slot is published with.
// Against accidents (a half-written slot, a wrong range), not against forgery.
//
// Two sums modulo 2^64 over 8-byte little-endian words w_i (the last one filled up with zeros) of mix((w_i + 1) (2 i + 1) K),
// with mix the finaliser of MurmurHash3, K = 0x9e3779b97f4a7c15 for the first and 0xd1342543de82ef95 for the second; each is then
// mix(sum + size K), with the size in bytes.
#pragma once

#include <cstddef>
#include <string>

#include "common/gpu/device.h"

namespace tandem {

// 32 hexadecimal digits. `data` is on an 8-byte boundary. Waits for the result; on the device it runs on the thread's own stream.
// Errors: INTERNAL.
absl::StatusOr<std::string> MemoryChecksum(Device device, const void* data, std::size_t size_bytes);

}  // namespace tandem

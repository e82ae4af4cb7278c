#pragma once
// CRC-32C (Castagnoli, polynomial 0x1EDC6F41 reflected), as in iSCSI (RFC 3720) and
// TensorBoard's event files.

#include <cstddef>
#include <cstdint>

namespace nrl {

/// The CRC of `bytes` bytes at `data`, continued from `crc`, the value returned for the bytes before them (0
/// at the start). crc32c("123456789") is 0xe3069283. Uses the SSE4.2 instruction where the CPU has it.
uint32_t crc32c(const void* data, size_t bytes, uint32_t crc = 0);

/// The table-driven version, for every CPU; equal results. Public for tests.
uint32_t crc32c_portable(const void* data, size_t bytes, uint32_t crc = 0);

/// CRC of A followed by B from crc(A), crc(B) and the length of B. O(log(bytes_b)).
uint32_t crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t bytes_b);

}  // namespace nrl

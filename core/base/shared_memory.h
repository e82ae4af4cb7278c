#pragma once
// Shared memory of a block that a GPU gives without being asked.

#include <cstddef>

namespace nrl {

/// Static and dynamic together, bytes. More is given only to kernels that ask for dynamic memory.
inline constexpr size_t shared_memory_unasked = size_t{48} << 10;
/// Kernels with more dynamic memory than this ask for it (NRL_LAUNCH), others must fit into
/// shared_memory_unasked with their static arrays.
inline constexpr size_t dynamic_shared_unasked = size_t{32} << 10;

}  // namespace nrl

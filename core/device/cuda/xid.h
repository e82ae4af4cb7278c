#pragma once
// Errors that a GPU's driver reports by number ("Xid"), and what must be done before the GPU works again.

#include <cstdint>
#include <string>

namespace nrl::cuda {

/// The immediate action of NVIDIA's Xid catalog (Ampere and newer).
enum class Recovery : uint8_t {
  none,
  restart_run,   ///< the processes that use the GPU
  reset_gpu,     ///< nvidia-smi --gpu-reset, when no process uses it
  restart_node,  ///< the GPU has left the bus
};

/// Number of an Xid for an uncorrectable memory error, and for a GPU that the driver cannot reach.
inline constexpr int xid_double_bit = 48, xid_lost = 79;

/// Numbers that the table does not have need nothing.
Recovery recovery_of(int xid);

/// "Xid 79 (it has fallen off the bus): restart the node".
std::string describe_xid(int xid);

}  // namespace nrl::cuda

#pragma once
// Which device a rank takes.

#include "core/base/error.h"

namespace nrl::device {

/// Ordinal for rank `local_rank` of the `local_size` ranks of a node that see `devices` devices (at least
/// one): ranks take them in turns. More ranks than devices is refused (Exit::unavailable) unless `share`.
inline int choose_ordinal(int local_rank, int local_size, int devices, bool share) {
  NRL_CHECK(devices > 0 && local_rank >= 0 && local_rank < local_size);
  if (local_size > devices && !share)
    fail(Exit::unavailable,
         "{} ranks run on this node, which has {} GPU{}; start one rank per GPU, or let ranks share one with "
         "kernels.share_device: true",
         local_size, devices, devices == 1 ? "" : "s");
  return local_rank % devices;
}

}  // namespace nrl::device

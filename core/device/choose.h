#pragma once
// The device of a rank.

#include <string>
#include <vector>

namespace nrl::device {

/// Ordinal for rank `local_rank` of the `local_size` ranks of a node that all see the same `devices` devices
/// (at least one), assigned round-robin. More ranks than devices is an error (Exit::unavailable) unless
/// `share`.
int choose_ordinal(int local_rank, int local_size, int devices, bool share);

/// The same where ranks may see different devices (a scheduler that gives each rank its own): `seen[r]` are
/// the unique ids of the devices that local rank r sees, in the order of its ordinals. Each rank takes
/// the visible device used by the fewest lower ranks (the first on ties). All ranks fail with the same error.
int choose_ordinal(int local_rank, const std::vector<std::vector<std::string>>& seen, bool share);

}  // namespace nrl::device

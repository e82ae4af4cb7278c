#pragma once
// The device of a rank.

#include <string>
#include <vector>

namespace nrl::device {

/// Ordinal for rank `local_rank` of the `local_size` ranks of a node that all see the same `devices` devices
/// (at least one): ranks take them in turns. More ranks than devices is refused (Exit::unavailable) unless
/// `share`.
int choose_ordinal(int local_rank, int local_size, int devices, bool share);

/// The same where ranks may see different devices (a scheduler that gives each rank its own): `seen[r]` are
/// the unique ids of the devices that local rank r sees, in the order of its ordinals. Every rank takes the
/// first device of its own that the fewest lower ranks took. All ranks get the same refusal.
int choose_ordinal(int local_rank, const std::vector<std::vector<std::string>>& seen, bool share);

}  // namespace nrl::device

#pragma once
// Shared memory of Open MPI that killed ranks have left on this host.

#include <string>

namespace nrl::diagnosis {

/// Removes the segments through which ranks of this user on this host exchanged messages
/// ("vader_segment.HOST.UID.JOB.RANK"), if no living process maps them and they are older than `age` seconds.
/// A rank that ends removes its own, and a daemon of Open MPI a killed rank's, unless it loses its launcher
/// too. Returns their number; errors are left out.
int remove_stale_segments(const std::string& directory = "/dev/shm", double age = 5);

}  // namespace nrl::diagnosis

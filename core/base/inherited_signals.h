#pragma once
// Signals that the parent process left ignored (nohup).

namespace nrl {

/// Whether SIGHUP was ignored when the process started. Read before the constructors of shared libraries:
/// UCX, which Open MPI may load, installs its own handler.
bool hangup_was_ignored();

/// Ignores SIGHUP again if it was ignored at start. Call before exec().
void restore_ignored_hangup();

}  // namespace nrl

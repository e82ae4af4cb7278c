#pragma once
// What the parent process asked for with the signals it left ignored (nohup).

namespace nrl {

/// Whether SIGHUP was ignored when the process was started. Read before the constructors of shared libraries:
/// UCX, which Open MPI may load, puts a handler of its own in its place.
bool hangup_was_ignored();

/// Makes an ignored SIGHUP ignored again, for a process that is about to execute another image.
void restore_ignored_hangup();

}  // namespace nrl

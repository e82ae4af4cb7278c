#pragma once
// Stopping on request: signals become a flag that the step loop reads and all ranks agree on. The actions
// stay until the process ends: a signal that comes during the summary, MPI_Finalize or exit() must not kill
// it.

#include <csignal>
#include <string>

namespace nrl::train::stop {

/// For the start of the process, before other threads are started: from now on a thread of its own takes the
/// signals and no other one is interrupted. SIGUSR1 and SIGHUP (unless it is ignored, as under nohup) set the
/// flag, any number of times. SIGPIPE, SIGXFSZ (writes fail with EPIPE, EFBIG) and SIGCONT are ignored.
/// SIGINT and SIGTERM end the process: there is nothing to save yet.
void handle_at_start();

enum class Term { by_environment, second_leaves, never_leaves };
/// For the step loop, after handle_at_start(). SIGINT and SIGTERM set the flag too; the second of them ends
/// the process at once with 128 + its number. One exception: Slurm itself sends SIGTERM twice at a time limit
/// and at a preemption, so inside a Slurm job (`by_environment`: SLURM_JOB_ID is set) only SIGINT counts as a
/// second request.
void handle_in_steps(Term term = Term::by_environment);

/// The work is done and saved: a second SIGINT or SIGTERM leaves with this exit code from now on.
void work_is_done(int exit_code);

/// Ends the process by this signal, so that a shell sees which one it was.
[[noreturn]] void end_by(int number);

/// The number of the first signal that set the flag, 0 when there was none. Safe on any thread.
int requested();

/// "SIGUSR1", "SIGTERM", ...; "signal N" for others.
std::string signal_name(int number);

}  // namespace nrl::train::stop

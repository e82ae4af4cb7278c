#pragma once
// Stop requests: signals set a flag that the step loop reads and all ranks agree on. The handlers remain
// installed until the process exits: a signal during the summary, MPI_Finalize or exit() must not kill it.

#include <csignal>
#include <optional>
#include <string>

namespace nrl::train::stop {

/// Must be called at the start of the process, before other threads exist: a dedicated thread receives the
/// signals from now on. SIGUSR1 and SIGHUP (unless ignored, as under nohup) set the flag, any number of
/// times. SIGPIPE, SIGXFSZ (writes fail with EPIPE, EFBIG) and SIGCONT are ignored. SIGINT and SIGTERM still
/// end the process: there is nothing to save yet.
void handle_at_start();

/// Must be called before the step loop, after handle_at_start(). SIGINT and SIGTERM then set the flag too,
/// and the second of them ends the process at once with 128 + its number. `second_term_ends`: whether SIGTERM
/// counts as a second request. Inside a Slurm job (SLURM_JOB_ID is set) it does not by default, because Slurm
/// itself sends SIGTERM twice at a time limit and at a preemption.
void handle_in_steps(std::optional<bool> second_term_ends = std::nullopt);

/// Must be called when the work is done and saved: a second SIGINT or SIGTERM then exits with this code.
void set_final_exit_code(int exit_code);

/// Ends the process by this signal, so that the shell sees which one it was.
[[noreturn]] void end_by(int number);

/// The number of the first signal that set the flag; 0: none. Thread-safe.
int requested();

/// True once after each SIGUSR2, which asks for a window of recorded steps. handle_at_start() handles it.
bool take_profile_request();

/// "SIGUSR1", "SIGTERM", ...; "signal N" for others.
std::string signal_name(int number);

}  // namespace nrl::train::stop

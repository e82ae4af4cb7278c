#pragma once
// The identity of processes on this machine.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace nrl {

std::string host_name();
/// A text that the kernel makes anew at every boot: a pid means something together with it only.
std::string boot_id();

/// /proc/PID/stat.
struct ProcessFacts {
  char name[16] = {};
  /// As in ps: 'R', 'S', 'D' (waits for a device), 'T' (stopped), 't' (by a debugger), 'Z' (has ended).
  char state = '?';
  uint64_t start_ticks = 0;  ///< since boot: tells a process from a later one with its number
  int wait_status = -1;      ///< of one that has ended, if the system shows it
};
/// Unset if there is no such process. Does not allocate.
std::optional<ProcessFacts> read_process(int64_t pid);
/// 0: there is no such process.
int64_t start_ticks_of(int64_t pid);
/// The processes of this host that /proc shows; empty if it cannot be read.
std::vector<int64_t> process_numbers();

}  // namespace nrl

#pragma once
// The identity of processes on this machine.

#include <cstdint>
#include <string>

namespace nrl {

std::string host_name();
/// A text that the kernel makes anew at every boot: a pid means something together with it only.
std::string boot_id();
/// Start of a process since boot, in clock ticks, which tells it from a later one with its number. 0: there
/// is no such process.
int64_t start_ticks_of(int64_t pid);
/// The state of a process as in ps: 'R', 'S', 'D' (waits for a device), 'T' (stopped), 't' (of a debugger),
/// 'Z' (has ended); 0: there is no such process.
char state_of(int64_t pid);

}  // namespace nrl

#pragma once
// Programs that this process starts and may kill with all their children.

#include <initializer_list>
#include <string>
#include <vector>

#include <sys/types.h>

namespace nrl {

/// File descriptors that a program gets as its standard streams; -1: /dev/null. They stay ours to close.
struct StandardStreams {
  int in = -1, out = -1, error = -1;
};

/// Our environment, as "NAME=value".
std::vector<std::string> own_environment();
/// The variables with these names that our environment has: for programs that must not see the others, which
/// may hold secrets.
std::vector<std::string> inherited(std::initializer_list<const char*> names);

/// Starts words[0], which is looked up in PATH unless it has a slash, with these arguments and environment
/// ("NAME=value"), in a process group of its own, with no signal blocked or ignored. Sets `child`; returns 0,
/// or the number of the error. Safe in a process with threads and MPI.
int spawn_group(pid_t& child, const std::vector<std::string>& words,
                const std::vector<std::string>& environment, const StandardStreams& streams);

/// Runs a program to its end, with `input` on its standard input and no other environment than `environment`;
/// its output and errors go to `output`, or nowhere (-1). Returns what went wrong; empty: it exited with 0.
/// After `limit_s` seconds it is killed with its children (of its process group).
std::string run_program(const std::vector<std::string>& words, const std::string& input,
                        const std::vector<std::string>& environment, double limit_s, int output = -1);

}  // namespace nrl

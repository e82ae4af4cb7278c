#pragma once
// Stacks of the threads of a run that hangs: copied as bytes by the process itself when the verdict is known,
// unwound afterwards by nrl-train diagnose (unwind.h). The copies hold data of the run.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace nrl::diagnosis {

inline constexpr size_t most_threads = 12;            ///< of a process; the main thread is the first
inline constexpr size_t most_stack_bytes = 64 << 10;  ///< of a thread, its innermost ones
/// Registers of x86-64 in the order of its DWARF numbers: rax, rdx, rcx, rbx, rsi, rdi, rbp, rsp, r8 to r15,
/// rip.
inline constexpr size_t stack_registers = 17, stack_pointer = 7, instruction_pointer = 16;

/// A thread as /proc shows it, and its stack.
struct ThreadStack {
  int64_t id = 0;
  std::string name;
  char state = '?';     ///< as in ps: 'R', 'S', 'D' (waits for a device), 'T' (stopped)
  std::string wchan;    ///< function of the kernel in which it waits; empty: unknown
  std::string syscall;  ///< number and arguments of the system call in progress, or "running"
  bool copied = false;  ///< the following are known
  std::array<uint64_t, stack_registers> registers{};
  uint64_t begin = 0;  ///< address of the first byte: the stack pointer
  std::string bytes;
};

struct ProcessStacks {
  int rank = 0, attempt = 0;
  int64_t pid = 0;
  std::vector<ThreadStack> threads;
  std::string maps;  ///< /proc/PID/maps
};

/// "rank-3.attempt-2.stacks"
std::string stacks_name(int rank, int attempt);

/// The threads of a process of this user, without their stacks. None if it is gone.
std::vector<ThreadStack> threads_of(int64_t pid);

/// Writes a file of mode 0600 with the threads of a process. Of this process (`pid`: its own) with their
/// stacks: then all threads but the caller's stop for good, so that the process must end without them, and
/// what follows must not take a lock. A thread that blocks signals or hangs in the kernel keeps its stack.
/// Error(Exit::io).
void save_stacks(const std::string& path, int rank, int attempt, int64_t pid);

/// Reads a file that may come from anywhere. Error(Exit::data), naming the file, for anything else than a
/// file of stacks; Exit::no_input where it cannot be read.
ProcessStacks read_stacks(const std::string& path);

/// A part of a file that a process had mapped for execution.
struct Mapping {
  uint64_t begin = 0, end = 0, offset = 0;  ///< offset of `begin` in the file
  std::string path;
};
std::vector<Mapping> executable_mappings(std::string_view maps);

}  // namespace nrl::diagnosis

#pragma once
// A program that the supervisor starts and that must not outlive it.

#include <optional>
#include <span>
#include <string>
#include <vector>

#include <sys/types.h>

namespace nrl::launch {

class Process {
 public:
  /// Starts words[0], which is looked up in PATH unless it has a slash, in a process group of its own,
  /// without standard input. It gets SIGTERM when the calling thread ends. `output`: descriptor of its
  /// standard output; -1: this process's. Error(Exit::unavailable) if it cannot be started.
  explicit Process(const std::vector<std::string>& words, int output = -1);
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  /// Kills the group if it has not ended.
  ~Process();

  /// The exit code, 128 + N if signal N ended it; unset while it runs. When it has ended, the rest of its
  /// group is killed.
  std::optional<int> ended();
  /// To the process alone: a launcher passes it to its ranks.
  void signal(int number);
  /// SIGKILL to the group.
  void kill_group();

 private:
  pid_t pid_ = 0;
  std::optional<int> code_;
};

/// Processes of this user on this host whose command line has all these words.
std::vector<pid_t> processes_with(std::span<const std::string> words);

/// Signals that the supervisor handles, SIGCHLD among them; they are blocked from now on in this thread and
/// in those that it starts. SIGHUP only if it is not ignored, as under nohup.
void block_signals();
/// Waits for one of these signals, for that time at most. 0: none, or SIGCHLD.
int wait_signal(double seconds);

}  // namespace nrl::launch

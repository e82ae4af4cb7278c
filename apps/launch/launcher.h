#pragma once
// The command that starts the ranks of an attempt: words, never a shell's text.

#include <string>
#include <string_view>
#include <vector>

namespace nrl::launch {

/// --launcher: "mpirun", "srun", words with {ranks}, {hosts} and {hostfile}, or "" (one rank, no launcher).
struct Launcher {
  std::string text = {};
  int ranks_per_node = 0;    ///< used with hosts
  std::string program = {};  ///< path of nrl-train

  /// Error(Exit::usage) if the text has no words, or other names in braces.
  void check() const;
  /// The words before the program, for `ranks` ranks on these hosts (empty: this host, or the nodes of the
  /// Slurm job). `hostfile`: path of a file with host_file_text() of these hosts.
  std::vector<std::string> words(int ranks, const std::vector<std::string>& hosts,
                                 const std::string& hostfile) const;
};

/// Lines "node0 slots=2".
std::string host_file_text(const std::vector<std::string>& hosts, int ranks_per_node);
/// The hosts of such a file, in order; "slots=N" and comments (#) are optional. `*slots`: the N that all
/// lines give, 0 without. Error(Exit::usage), naming FILE:LINE, for anything else, a name that occurs twice,
/// and different numbers. `source` names the file.
std::vector<std::string> hosts_from(std::string_view text, const std::string& source, int* slots);

}  // namespace nrl::launch

#pragma once
// The records of a run: failure.json and the flight files of its last attempt.

#include <optional>
#include <string>
#include <vector>

#include "apps/diagnosis/diagnosis.h"
#include "apps/diagnosis/stacks.h"
#include "apps/monitor/failure.h"

namespace nrl::diagnosis {

struct Records {
  std::string run_id;
  int attempt = 0;                          ///< the last one
  std::vector<Rank> ranks;                  ///< by rank
  std::optional<monitor::Failure> failure;  ///< of the last attempt
  std::vector<ProcessStacks> stacks;        ///< of that attempt, if it hung; by rank
  std::vector<std::string> unreadable;      ///< files that were left out, with the reason
};

/// Reads the records of the run with this log directory: of the last attempt, in shared memory of this host
/// and in the log directory. Error(Exit::no_input) if there is no run.json; Exit::data if it is malformed.
Records read_records(const std::string& log_dir);

}  // namespace nrl::diagnosis

#pragma once
// run.json: the identity of a run and its sessions, so that a job that is started again is one run in every
// program that shows it.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/io/json.h"
#include "core/io/run_lock.h"

namespace nrl::monitor {

inline constexpr const char* run_file = "run.json";

/// One process of a run. A session that was killed has no end.
struct RunSession {
  int attempt = 1;   ///< its number: increases from session to session, by 1 without nrl-train launch
  double start = 0;  ///< seconds since the epoch
  std::optional<double> end = {};
  int64_t first_step = 0;  ///< steps at the start: 0, or the step of the checkpoint
  std::optional<int64_t> last_step = {};
  std::optional<int> exit = {};  ///< exit code
};

struct RunFile {
  std::string run_id;                     ///< 8 hexadecimal digits
  std::string name;                       ///< the last directory of the log directory other than "logs"
  double created = 0;                     ///< seconds since the epoch
  std::vector<RunSession> sessions = {};  ///< in order, not empty

  const RunSession& last() const { return sessions.back(); }
  /// The number of the last session, from 1; 0 without one.
  int attempt() const { return sessions.empty() ? 0 : last().attempt; }
};

JsonValue to_json(const RunFile& run);
/// Inverse of to_json(). Error(Exit::data), naming `where` and the fix, for anything else.
RunFile run_file_from(const JsonValue& json, const std::string& where);

/// run.json of a log directory. Error(Exit::no_input) if there is none, Exit::data if it is malformed.
RunFile read_run_file(const std::string& log_dir);

/// Begins a session of the run in `log_dir`, at `step`, and writes run.json (atomically). A session continues
/// the run of the file if it starts from a checkpoint, or if the last session was killed; otherwise it begins
/// a new run, as in metrics.jsonl. `now`: seconds since the epoch. `supervised`: the id of a new run and the
/// least number of the attempt. Error(Exit::data) for a malformed file.
RunFile begin_session(const std::string& log_dir, int64_t step, double now,
                      const RunIdentity& supervised = {});
/// Ends the last session of `run`.
void end_session(const std::string& log_dir, RunFile& run, int64_t step, double now, int exit_code);

}  // namespace nrl::monitor

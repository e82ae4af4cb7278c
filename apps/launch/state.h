#pragma once
// launch.json: the state of a supervisor, so that one that was killed goes on where it was.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/io/json.h"

namespace nrl::launch {

inline constexpr const char* state_file = "launch.json";
/// Attempts that the file keeps.
inline constexpr size_t max_history = 100;

/// An attempt that has ended.
struct Ended {
  int attempt = 0;
  int code = 0;                  ///< of failure.json, else of the launcher
  std::string kind = {};         ///< of failure.json, or of the code; "unknown": neither tells
  std::string host = {};         ///< on which it failed; empty: not known, or on all
  std::optional<int> rank = {};  ///< that failed
  int64_t step = 0;              ///< of that rank
  int64_t saved = 0;             ///< step of the newest checkpoint
  bool progress = false;         ///< the attempt has saved a later step than those before
  double time = 0;               ///< seconds since the epoch
};

struct LaunchState {
  std::string run_id = {};
  int attempt = 0;       ///< the last one that was started; 0: none
  bool running = false;  ///< its end has not been seen
  bool done = false;     ///< the supervisor has returned: the next one begins with an empty history
  int restarts = 0;
  std::vector<std::string> hosts = {};    ///< in use, by number of the node; empty: this host alone
  std::vector<std::string> spares = {};   ///< in the order in which they are taken
  std::vector<std::string> retired = {};  ///< were replaced
  std::vector<std::string> barred = {};   ///< retired and never used again: they compute wrongly
  std::vector<Ended> history = {};        ///< oldest first
};

JsonValue to_json(const LaunchState& state);
/// Inverse. Error(Exit::data), naming `where` and the fix, for anything else.
LaunchState state_from(const JsonValue& json, const std::string& where);

/// launch.json of a log directory; unset if there is none. Error(Exit::data) if it is malformed.
std::optional<LaunchState> read_state(const std::string& log_dir);
/// Atomic. Keeps the newest max_history attempts.
void write_state(const std::string& log_dir, const LaunchState& state);

}  // namespace nrl::launch

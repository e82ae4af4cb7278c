#pragma once
// A live view of runs from the files in their log directories, as text.

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "apps/monitor/alerts.h"
#include "apps/monitor/run_history.h"
#include "apps/monitor/telemetry.h"

namespace nrl::monitor {

/// Follows a file of lines that another process appends to or replaces.
class LineFollower {
 public:
  explicit LineFollower(std::string path) : path_(std::move(path)) {}
  /// Calls `line` for every whole line that came since the last call. If the file was replaced or became
  /// shorter, `restart` is called first, and lines from its beginning follow. A missing file has no lines.
  /// Lines above a megabyte are left out.
  void read(const std::function<void(std::string_view)>& line, const std::function<void()>& restart);

 private:
  std::string path_, rest_;  // the beginning of a line
  uint64_t inode_ = 0, offset_ = 0;
  bool skipping_ = false;  // within a line that is too long
};

/// A run that may be alive or dead.
class WatchedRun {
 public:
  /// `directory`: logger.log_dir of the run. Error(Exit::no_input) if there is no such directory.
  explicit WatchedRun(const std::string& directory);
  void update();

  RunHistory history;
  std::map<std::string, double> last = {};  ///< numbers of the last step's row
  double last_time = 0;                     ///< of the newest row; 0: none
  std::optional<Telemetry> telemetry = {};
  std::deque<Alert> alerts = {};  ///< the last ones, oldest first
  int64_t unreadable = 0;         ///< lines
  std::optional<int64_t> max_steps = {};
  /// From run.json: "exit 0", "no end of session"; empty without one.
  std::string ending = {};

 private:
  std::string directory_;
  LineFollower metrics_, telemetry_, alerts_;
};

/// A frame of at most `columns` columns and, if `rows` > 0, so many lines. `now`: seconds since the epoch.
std::string watch_text(std::span<const WatchedRun> runs, int columns, int rows, double now);

}  // namespace nrl::monitor

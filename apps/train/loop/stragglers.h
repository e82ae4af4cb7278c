#pragma once
// Ranks that need longer for their own work than their peers, for which the others wait in every step.

#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "apps/monitor/metrics.h"
#include "apps/train/start/run.h"

namespace nrl::train {

inline constexpr const char* stragglers_file = "stragglers.jsonl";

struct StragglerLimits {
  double z = 5;         ///< robust deviations above the median of the peers, and
  double ratio = 1.10;  ///< times that median,
  int windows = 3;      ///< in so many windows in a row; an episode ends after as many without
};

/// Compares ranks that have the same work. Pure.
class Stragglers {
 public:
  struct Peer {
    int stage = 0;  ///< of the pipeline: ranks of one stage have the same work
    int node = 0;
    std::string host;
  };
  /// Own work of a rank in a step, mean over a window. NaN: unknown.
  struct Work {
    double seconds = std::numeric_limits<double>::quiet_NaN();
    double data_seconds = 0;  ///< the part of it that read data
  };
  struct Slow {
    int rank = 0;
    double ratio = 1, z = 0;
    double seconds = 0, median = 0;
    bool data = false;  ///< most of the difference is in reading data
  };
  struct Change {
    double ratio = 1;         ///< the largest of all ranks
    std::vector<Slow> began;  ///< episodes that begin with this window
    std::vector<int> ended;   ///< ranks
  };

  explicit Stragglers(std::vector<Peer> ranks, const StragglerLimits& limits = {});
  /// `work`: by rank. The median is the lower one, so that a half that is slow, as one of two nodes, is
  /// found.
  Change window(std::span<const Work> work);
  /// Nodes of several ranks, most of which are in an episode.
  std::vector<int> slow_nodes() const;
  /// "rank 5 (node 2, HOST) needs 1.34 x the time of its peers for its own work (computing; 0.412 s a step,
  /// median 0.307 s)"
  std::string describe(const Slow& slow) const;
  const Peer& peer(int rank) const { return ranks_[static_cast<size_t>(rank)]; }

 private:
  struct State {
    int slow = 0, clean = 0;  // windows in a row
    bool episode = false;
  };
  std::vector<Peer> ranks_;
  std::vector<State> states_;
  StragglerLimits limits_;
};

/// Looks at the pace of the ranks of a run (RunControl::paces()), on the process that has it.
class StragglerWatch {
 public:
  /// `warn`: gets one text for each episode. References must outlive the object.
  StragglerWatch(const Run& run, std::function<void(const std::string&)> warn);
  /// After a step; at most once a second it does anything.
  void look(int64_t step);
  /// The slowest rank's own work in the last window over the median of its peers; unset before the first.
  std::optional<double> ratio() const { return ratio_; }

 private:
  void judge(int64_t step, std::span<const Stragglers::Work> work);

  const Run& run_;
  std::function<void(const std::string&)> warn_;
  Stragglers stragglers_;
  std::vector<uint32_t> seen_;  // by rank: readings that were judged
  std::optional<monitor::MetricsLog> file_;
  std::optional<double> ratio_;
  double next_look_ = 0, judged_ = 0;
};

}  // namespace nrl::train

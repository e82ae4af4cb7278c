#pragma once
// Decides after each attempt of a supervised run: pure functions, so that all cases are a table of tests.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "apps/launch/state.h"
#include "apps/monitor/failure.h"

namespace nrl::launch {

/// The end of an attempt as the supervisor sees it.
struct Outcome {
  int code = 0;                                  ///< of the launcher; 128 + N: ended by signal N
  std::optional<monitor::Failure> failure = {};  ///< of this attempt
  int64_t saved_before = 0, saved = 0;  ///< step of the newest checkpoint, at the start and at the end
};

/// A code of a launcher tells little: failure.json counts, else a code that the program itself returns.
Ended ended_by(const LaunchState& state, const Outcome& outcome, double now);

/// Nodes to examine before they are used again.
enum class Check { none, one, all };

struct Decision {
  bool restart = false;
  int code = 0;                 ///< without a restart: to return
  double delay_seconds = 0;     ///< before a restart
  bool ranks_may_live = false;  ///< on other hosts: nothing proves that they have ended
  Check check = Check::none;
  int node = -1;         ///< Check::one: of the failure
  bool replace = false;  ///< that node is replaced, healthy or not, if there is a spare
  bool unfit = false;    ///< without one the run must not go on
  std::string why = {};  ///< "rank 2 on node1 failed in step 37 (exit 80, rank_killed)"
};

/// `state.history` does not have `ended` yet.
Decision decide(const LaunchState& state, const Ended& ended, int max_restarts);

/// The number of a host in `hosts`, by its name or the part before the first dot; -1: none.
int node_of(const std::vector<std::string>& hosts, std::string_view host);

/// The first spare takes the number of the node, which is retired, and barred if it is unfit. False without a
/// spare.
bool replace_node(LaunchState& state, int node, bool unfit);

/// Retired hosts that may become spares again if their examination finds no problem, the first one retired
/// first: not those that computed wrongly, as the examination may not find that again.
std::vector<std::string> may_return(const LaunchState& state);
/// A retired host becomes the last spare.
void take_back(LaunchState& state, const std::string& host);

}  // namespace nrl::launch

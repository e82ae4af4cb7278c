#include "apps/launch/policy.h"

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "core/base/error.h"

namespace nrl::launch {
namespace {

constexpr int most_without_progress = 3;
constexpr double retry_delay_seconds = 30, strike_seconds = 3600;

bool any_of(std::string_view kind, std::initializer_list<std::string_view> kinds) {
  return std::find(kinds.begin(), kinds.end(), kind) != kinds.end();
}

// The node is suspect, not the process. Which node is lost the record does not prove: ranks that were cut off
// may have written it, and name the others.
bool of_node(std::string_view kind) {
  return any_of(kind, {"gpu", "rank_stopped", "silent_corruption"});
}

bool of_process(std::string_view kind) {
  return any_of(kind, {"rank_killed", "rank_hung", "mismatch", "launcher_lost", "start_timeout"});
}

bool lost(int code) {
  return code == static_cast<int>(Exit::peer_lost);
}

// Attempts in a row that saved nothing new, the given one included.
int without_progress(const LaunchState& state, const Ended& ended) {
  if (ended.progress) return 0;
  int n = 1;
  for (auto e = state.history.rbegin(); e != state.history.rend(); ++e, ++n)
    if (e->progress) break;
  return n;
}

// A rank that fails at the same step on another node has met the same data with the same program.
const Ended* same_position(const LaunchState& state, const Ended& ended) {
  if (!ended.rank || ended.step <= 0 || ended.host.empty() ||
      any_of(ended.kind, {"node_lost", "network", "launcher_lost", "start_timeout"}))
    return nullptr;
  for (const Ended& e : state.history)
    if (e.rank == ended.rank && e.step == ended.step && !e.host.empty() && e.host != ended.host) return &e;
  return nullptr;
}

int strikes(const LaunchState& state, const Ended& ended) {
  int n = 1;
  for (const Ended& e : state.history)
    n += lost(e.code) && e.host == ended.host && ended.time - e.time <= strike_seconds ? 1 : 0;
  return n;
}

std::string text_of(const Ended& e) {
  if (e.kind == "unknown")
    return e.code > 128 && e.code <= 128 + 64
               ? fmt::format("it was ended by signal {} and left no failure.json", e.code - 128)
               : fmt::format("it left exit code {} and no failure.json", e.code);
  if (!e.rank) return fmt::format("it failed (exit {}, {})", e.code, e.kind);
  return fmt::format("rank {}{} failed in step {} (exit {}, {})", *e.rank,
                     e.host.empty() ? "" : " on " + e.host, e.step, e.code, e.kind);
}

}  // namespace

Ended ended_by(const LaunchState& state, const Outcome& outcome, double now) {
  Ended e{.attempt = state.attempt,
          .code = outcome.code,
          .kind = "unknown",
          .host = {},
          .rank = {},
          .saved = outcome.saved,
          .progress = outcome.saved > outcome.saved_before,
          .time = now};
  if (const auto& f = outcome.failure) {
    e.code = f->exit_code;
    e.kind = f->kind;
    e.rank = f->rank;
    if (f->rank) e.host = f->host;  // else the writer's
    e.step = f->step;
  } else if (outcome.code == 0 || outcome.code == static_cast<int>(Exit::stopped)) {
    e.kind = outcome.code == 0 ? "finished" : "stopped";
  } else if (!lost(outcome.code)) {
    e.kind = monitor::kind_of(static_cast<Exit>(outcome.code));
  }
  return e;
}

Decision decide(const LaunchState& state, const Ended& e, int max_restarts) {
  Decision d{.code = e.code, .why = text_of(e)};
  const auto done = [&](std::string_view why) {
    d.why += why;
    return d;
  };
  if (e.kind == "finished" || e.kind == "stopped") {
    d.why = e.kind == "finished" ? "the run is complete" : "the run has stopped with a checkpoint";
    return d;
  }
  switch (static_cast<Exit>(e.code)) {
    case Exit::usage:
    case Exit::data:
    case Exit::no_input:
    case Exit::unavailable:
    case Exit::cannot_create:
    case Exit::config:
      return done("; starting again cannot help");
    case Exit::internal:
    case Exit::diverged:
      return done("; starting again would fail again");
    default:
      break;
  }
  const bool retry = e.code == static_cast<int>(Exit::out_of_memory) || e.code == static_cast<int>(Exit::io);
  const int failures = without_progress(state, e);
  if (retry && failures > 1 && state.history.back().code == e.code) return done(", again");
  if (const Ended* before = same_position(state, e))
    return done(
        fmt::format(", as on {} in attempt {}: the program or its data is the cause, not a node. Fix: "
                    "nrl-train data show "
                    "prints the samples of the step",
                    before->host, before->attempt));
  if (failures >= most_without_progress)
    return done(fmt::format("; {} failures without a new checkpoint in between", failures));
  if (state.restarts >= max_restarts) return done(fmt::format(" after {} restarts", state.restarts));

  d.restart = true;
  d.delay_seconds = retry ? retry_delay_seconds : failures == 0 ? 0 : failures == 1 ? 1 : 10;
  if (retry) return d;
  d.ranks_may_live = e.kind == "unknown";
  const bool unfit = e.kind == "silent_corruption";
  d.node = node_of(state.hosts, e.host);
  if (unfit && d.node < 0) {
    d.restart = false;
    return done("; that host must not be used again. Fix: leave it out of --hosts");
  }
  if (state.hosts.empty() || of_process(e.kind)) return d;
  // A rank that ended without a message may have ended with its host, which closes connections when it halts.
  const bool suspect = of_node(e.kind);
  d.check = (suspect || e.kind == "rank_exited") && d.node >= 0 ? Check::one : Check::all;
  d.unfit = unfit;
  d.replace = suspect && d.check == Check::one && (unfit || e.kind == "gpu" || strikes(state, e) >= 2);
  return d;
}

int node_of(const std::vector<std::string>& hosts, std::string_view host) {
  // "node1" and "node1.cluster"; not two addresses.
  const auto same = [](std::string_view a, std::string_view b) {
    if (a.size() > b.size()) std::swap(a, b);
    return b.starts_with(a) && b[a.size()] == '.' && a.find('.') == a.npos;
  };
  if (host.empty()) return -1;
  for (size_t i = 0; i < hosts.size(); ++i)
    if (hosts[i] == host) return static_cast<int>(i);
  for (size_t i = 0; i < hosts.size(); ++i)
    if (!hosts[i].empty() && same(hosts[i], host)) return static_cast<int>(i);
  return -1;
}

bool replace_node(LaunchState& state, int node, bool unfit) {
  if (state.spares.empty()) return false;
  std::string& host = state.hosts.at(static_cast<size_t>(node));
  state.retired.push_back(host);
  if (unfit) state.barred.push_back(host);
  host = state.spares.front();
  state.spares.erase(state.spares.begin());
  return true;
}

std::vector<std::string> may_return(const LaunchState& state) {
  std::vector<std::string> hosts;
  for (const std::string& host : state.retired)
    if (std::find(state.barred.begin(), state.barred.end(), host) == state.barred.end())
      hosts.push_back(host);
  return hosts;
}

void take_back(LaunchState& state, const std::string& host) {
  std::erase(state.retired, host);
  state.spares.push_back(host);
}

}  // namespace nrl::launch

#include "apps/launch/supervisor.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

#include "apps/launch/health.h"
#include "apps/launch/policy.h"
#include "apps/launch/process.h"
#include "apps/launch/state.h"
#include "apps/monitor/failure.h"
#include "apps/monitor/run_file.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/base/log.h"
#include "core/io/atomic_file.h"
#include "core/io/checkpoint_store.h"
#include "core/io/run_lock.h"

namespace nrl::launch {
namespace {

constexpr double poll_seconds = 0.1, verdict_seconds = 5, kill_seconds = 2, health_seconds = 15;
constexpr size_t probes_at_once = 64;

double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

template <class... Args>
void say(fmt::format_string<Args...> text, Args&&... args) {
  log::line("launch: " + fmt::format(text, std::forward<Args>(args)...));
}

std::string joined(const std::vector<std::string>& hosts) {
  std::string text;
  for (const std::string& host : hosts) text += (text.empty() ? "" : ", ") + host;
  return text;
}

int64_t newest_checkpoint(const std::string& store) {
  const std::vector<CheckpointEntry> all = list_checkpoints(store, Validation::none);
  return all.empty() ? 0 : all.front().step;
}

class Supervisor {
 public:
  explicit Supervisor(const Options& options);
  int run();

 private:
  Outcome attempt();
  std::optional<int> restart(const Decision& decision);
  bool wait(
      double seconds, const std::function<bool()>& until = [] { return false; });
  void wait_for_ranks();
  void end_launcher();
  /// Environment variables that name the attempt.
  std::vector<std::string> variables() const {
    return {"NRL_RUN_ID=" + state_.run_id, fmt::format("NRL_ATTEMPT={}", state_.attempt)};
  }
  bool examine_nodes(const Decision& decision);
  void find_spare();
  std::vector<std::string> unhealthy(const std::vector<std::string>& hosts);
  void probe(std::span<const std::string> hosts, std::vector<std::string>& bad);
  std::optional<monitor::Failure> failure() const;
  void take_signal(int number, Process* process);
  void end();
  std::vector<std::string> command(int ranks, const std::vector<std::string>& hosts,
                                   const std::string& hostfile) const;
  std::string path(const std::string& name) const { return join_path(options_.log_dir, name); }

  const Options& options_;
  RunLock lock_;
  LaunchState state_;
  int stop_signal_ = 0;  // the first one
  bool kill_ = false;    // the second one, or the end of the grace
  double stop_by_ = 0;   // steady time; 0: none
};

Supervisor::Supervisor(const Options& options)
    : options_(options), lock_(options.log_dir, {}, {}, "launch.lock") {
  const std::optional<LaunchState> before = read_state(options.log_dir);
  if (before) state_.attempt = before->attempt, state_.run_id = before->run_id;
  if (state_.run_id.empty()) state_.run_id = random_nonce().substr(0, 8);
  state_.hosts = options.hosts;
  state_.spares = options.spares;
  if (!before || before->done) return;
  // It has replaced hosts: that counts if this command names the same ones.
  const auto sorted = [](std::vector<std::string> a, const std::vector<std::string>& b,
                         const std::vector<std::string>& c) {
    a.insert(a.end(), b.begin(), b.end());
    a.insert(a.end(), c.begin(), c.end());
    std::sort(a.begin(), a.end());
    return a;
  };
  const bool same_hosts =
      before->hosts.size() == options.hosts.size() &&
      sorted(before->hosts, before->spares, before->retired) == sorted(options.hosts, options.spares, {});
  state_.running = before->running;
  state_.restarts = before->restarts;
  state_.history = before->history;
  if (!same_hosts) return;
  state_.hosts = before->hosts;
  state_.spares = before->spares;
  state_.retired = before->retired;
  state_.barred = before->barred;
}

std::optional<monitor::Failure> Supervisor::failure() const {
  try {
    std::optional<monitor::Failure> found = monitor::read_failure(options_.log_dir);
    if (found && found->attempt == state_.attempt) return found;
  } catch (const Error&) {
    // It is no record of this attempt.
  }
  return {};
}

std::vector<std::string> Supervisor::command(int ranks, const std::vector<std::string>& hosts,
                                             const std::string& hostfile) const {
  if (!hosts.empty())
    write_file_atomic(hostfile, host_file_text(hosts, options_.launcher.ranks_per_node), Durable::no);
  return options_.launcher.words(ranks, hosts, hostfile);
}

// `process` may be null: nothing runs.
void Supervisor::take_signal(int number, Process* process) {
  if (number == 0) return;
  const bool first = std::exchange(stop_signal_, stop_signal_ == 0 ? number : stop_signal_) == 0;
  if (number != SIGUSR1) {
    // Slurm sends SIGTERM twice at a time limit and at a preemption.
    kill_ |= stop_by_ != 0 && (number == SIGINT || !std::getenv("SLURM_JOB_ID"));
    if (stop_by_ == 0) stop_by_ = steady_seconds() + options_.grace_seconds;
  }
  if (!process || !first) return;
  // Launchers pass SIGUSR1 on; SIGTERM and SIGINT would make them kill the ranks.
  process->signal(SIGUSR1);
  say("signal {}: the run is asked to save and to stop{}", number,
      number == SIGUSR1 ? "" : fmt::format(", and killed after {:.0f} s", options_.grace_seconds));
}

Outcome Supervisor::attempt() {
  monitor::RunFile run;
  const std::string run_path = path(monitor::run_file);
  if (path_exists(run_path)) {
    run = monitor::read_run_file(options_.log_dir);
    state_.run_id = run.run_id;
    state_.attempt = std::max(state_.attempt, run.attempt());
  }
  ++state_.attempt;
  state_.running = true;
  write_state(options_.log_dir, state_);

  Outcome outcome;
  outcome.saved_before = newest_checkpoint(options_.checkpoint_dir);
  std::vector<std::string> words = command(options_.ranks, state_.hosts, path("launch.hosts"));
  words.emplace_back("env");
  for (const std::string& variable : variables()) words.push_back(variable);
  if (const char* faults = std::getenv("NRL_FAULTS")) words.push_back(fmt::format("NRL_FAULTS={}", faults));
  words.push_back(options_.launcher.program);
  words.insert(words.end(), options_.arguments.begin(), options_.arguments.end());
  say("attempt {} starts{}{}", state_.attempt,
      options_.ranks > 0 ? fmt::format(": {} rank{}", options_.ranks, options_.ranks == 1 ? "" : "s") : "",
      state_.hosts.empty() ? "" : " on " + joined(state_.hosts));
  Process process(words);
  double kill_at = 0;
  bool forced = false;
  for (;;) {
    take_signal(wait_signal(poll_seconds), &process);
    if (const std::string lost = lock_.lost(); !lost.empty()) fail(Exit::cannot_create, "{}", lost);
    const double now = steady_seconds();
    if (const std::optional<int> code = process.ended()) {
      outcome.code = *code;
      break;
    }
    if (kill_at == 0 && failure()) kill_at = now + verdict_seconds;
    const bool too_long = stop_by_ != 0 && now >= stop_by_;
    if (!forced && (kill_ || too_long || (kill_at != 0 && now >= kill_at))) {
      kill_ |= too_long;
      forced = true;
      kill_at = now + kill_seconds;
      process.signal(SIGTERM);
      say("processes of attempt {} are ended: {}", state_.attempt,
          kill_ ? "they did not stop in time" : fmt::format("{} s after its failure", verdict_seconds));
    } else if (forced && now >= kill_at) {
      process.kill_group();
    }
  }
  outcome.failure = failure();
  outcome.saved = newest_checkpoint(options_.checkpoint_dir);
  if (outcome.failure)
    say("attempt {} has ended, {:.1f} s after its failure", state_.attempt,
        std::clamp(wall_seconds() - outcome.failure->failed_at, 0.0, 1e6));
  return outcome;
}

// True when the time has passed or `until` holds, false at a request to stop.
bool Supervisor::wait(double seconds, const std::function<bool()>& until) {
  for (const double end = steady_seconds() + seconds; stop_signal_ == 0 && !until();) {
    const double left = end - steady_seconds();
    if (left <= 0) break;
    take_signal(wait_signal(std::min(left, poll_seconds)), nullptr);
  }
  return stop_signal_ == 0;
}

// Ranks on hosts that cannot be reached leave by themselves when they miss the others; the lock of the run
// proves earlier that its writer is gone, or that the attempt never had one.
void Supervisor::wait_for_ranks() {
  const auto gone = [&] {
    const std::optional<LockOwner> owner = read_lock_owner(options_.log_dir);
    return !owner || owner->ended || (owner->identity.known() && owner->identity.attempt < state_.attempt);
  };
  if (gone()) return;
  const double seconds = options_.network_timeout_seconds + verdict_seconds;
  say("ranks of attempt {} may still run on other hosts: waiting for {:.0f} s", state_.attempt, seconds);
  wait(seconds, gone);
}

// A launcher whose supervisor was killed is asked to end, which Open MPI's may fail to do when hosts vanish.
void Supervisor::end_launcher() {
  for (const pid_t pid : processes_with(variables()))
    if (::kill(pid, SIGKILL) == 0)
      say("process {}, the launcher of attempt {}, had not ended and is killed", pid, state_.attempt);
}

// The hosts whose examination finds a problem, or does not answer; none if no host at all answers.
std::vector<std::string> Supervisor::unhealthy(const std::vector<std::string>& hosts) {
  std::vector<std::string> bad;
  for (size_t begin = 0; begin < hosts.size(); begin += probes_at_once)
    probe(std::span(hosts).subspan(begin, std::min(probes_at_once, hosts.size() - begin)), bad);
  if (bad.size() == hosts.size() && hosts.size() > 1) {
    say("no host answers: the health check does not work here, and is left out");
    bad.clear();
  }
  return bad;
}

void Supervisor::probe(std::span<const std::string> hosts, std::vector<std::string>& bad) {
  struct Probe {
    std::string host, output;
    std::unique_ptr<Process> process;
  };
  std::vector<Probe> probes;
  for (const std::string& host : hosts) {
    Probe probe{.host = host, .output = path(fmt::format("launch.health-{}", probes.size())), .process = {}};
    std::vector<std::string> words = command(1, {host}, probe.output + ".host");
    words.insert(words.end(), {options_.launcher.program, "doctor", "--health", "--json"});
    const int file =
        ::open(probe.output.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0644);
    probe.process = std::make_unique<Process>(words, file);
    if (file >= 0) ::close(file);
    probes.push_back(std::move(probe));
  }
  wait(health_seconds, [&] {
    return std::all_of(probes.begin(), probes.end(), [](Probe& p) { return p.process->ended().has_value(); });
  });
  for (Probe& probe : probes) {
    probe.process.reset();
    std::string problem;
    try {
      problem = problem_in(read_file(probe.output, 1 << 20));
    } catch (const Error& e) {
      problem = e.what();
    }
    for (const char* end : {"", ".host"}) ::unlink((probe.output + end).c_str());
    say("{}: {}", probe.host, problem.empty() ? "healthy" : problem);
    if (!problem.empty()) bad.push_back(probe.host);
  }
}

// Retired hosts whose examination finds no problem now are spares again: they were started again, or their
// cable is in.
void Supervisor::find_spare() {
  const std::vector<std::string> hosts = may_return(state_);
  if (hosts.empty()) return;
  say("no spare is left: looking whether {} can be used again", joined(hosts));
  std::vector<std::string> bad;
  for (size_t begin = 0; begin < hosts.size(); begin += probes_at_once)
    probe(std::span(hosts).subspan(begin, std::min(probes_at_once, hosts.size() - begin)), bad);
  for (const std::string& host : hosts)
    if (std::find(bad.begin(), bad.end(), host) == bad.end()) take_back(state_, host);
}

// Replaces nodes that must not be used. False if there is no host for one of them.
bool Supervisor::examine_nodes(const Decision& decision) {
  std::vector<std::string> bad;
  const auto host = [&](int node) -> std::string& { return state_.hosts.at(static_cast<size_t>(node)); };
  if (decision.check == Check::all)
    bad = unhealthy(state_.hosts);
  else if (decision.check == Check::one && decision.replace && (decision.unfit || !state_.spares.empty()))
    bad = {host(decision.node)};
  else if (decision.check == Check::one) {
    // Its neighbor shows that the examination itself works.
    std::vector<std::string> examined{host(decision.node)};
    if (state_.hosts.size() > 1)
      examined.push_back(host((decision.node + 1) % static_cast<int>(state_.hosts.size())));
    bad = unhealthy(examined);
  }
  bool looked = false;  // a host that answers now and then must not come back for ever
  for (size_t i = 0; i < bad.size() && stop_signal_ == 0; ++i) {
    const int node = node_of(state_.hosts, bad[i]);
    const std::string old = host(node);
    if (state_.spares.empty() && !std::exchange(looked, true)) find_spare();
    if (!replace_node(state_, node, decision.unfit && i == 0)) {
      say("node {} ({}) has no spare. Fix: start again with another host", node, old);
      return false;
    }
    say("{} takes the place of {} as node {}", host(node), old, node);
    // A spare has been idle: nothing is known of it.
    if (!unhealthy({host(node)}).empty()) bad.push_back(host(node));
  }
  return true;
}

// Prepares the next attempt; an exit code if there is none.
std::optional<int> Supervisor::restart(const Decision& decision) {
  const int again = static_cast<int>(Exit::stopped);
  ++state_.restarts;
  if (decision.ranks_may_live) wait_for_ranks();
  if (stop_signal_ == 0 && !examine_nodes(decision)) return again;
  if (decision.delay_seconds > 0) wait(decision.delay_seconds);
  if (stop_signal_ == 0) return {};
  say("stopped between two attempts; the same command resumes");
  return again;
}

int Supervisor::run() {
  std::optional<int> code;
  bool known = true;  // the end of the last attempt is seen by this supervisor
  if (state_.running) {
    say("attempt {} was running when its supervisor ended", state_.attempt);
    known = false;
  }
  while (!code) {
    Outcome outcome;
    if (known) {
      try {
        outcome = attempt();
      } catch (const Error&) {
        end();
        throw;
      }
    } else {
      wait_for_ranks();
      end_launcher();
      outcome.code = static_cast<int>(Exit::peer_lost);
      outcome.failure = failure();
      outcome.saved = outcome.saved_before = newest_checkpoint(options_.checkpoint_dir);
    }
    const Ended ended = ended_by(state_, outcome, wall_seconds());
    Decision decision = decide(state_, ended, options_.max_restarts);
    // An attempt that its supervisor has left alone is no failure of its own.
    if (!known && ended.kind == "unknown") decision = {.restart = true, .why = "it left no failure.json"};
    if (known || ended.kind != "unknown") state_.history.push_back(ended);
    known = true;
    state_.running = false;
    if (stop_signal_ != 0 && decision.restart) {
      code = kill_ ? 128 + stop_signal_ : static_cast<int>(Exit::stopped);
      say("attempt {}: {}. Stopped; the same command resumes", state_.attempt, decision.why);
    } else if (!decision.restart) {
      code = decision.code;
      say("attempt {}: {}. Exit {}", state_.attempt, decision.why, *code);
    } else {
      say("attempt {}: {}. Restart {} of at most {} from step {}{}", state_.attempt, decision.why,
          state_.restarts + 1, options_.max_restarts, outcome.saved,
          decision.delay_seconds > 0 ? fmt::format(" in {:.0f} s", decision.delay_seconds) : "");
      write_state(options_.log_dir, state_);
      code = restart(decision);
    }
  }
  end();
  return *code;
}

void Supervisor::end() {
  state_.running = false;
  state_.done = true;
  write_state(options_.log_dir, state_);
}

}  // namespace

int supervise(const Options& options) {
  options.launcher.check();
  block_signals();
  make_directories(options.log_dir);
  return Supervisor(options).run();
}

}  // namespace nrl::launch

#pragma once
// Standard output of a run: banner, step lines or a progress bar, events, final summary.

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>

#include "apps/monitor/facts.h"
#include "core/config/enums.h"

namespace nrl::monitor {

/// Columns of the terminal behind `fd`; 0 if it is not a terminal, or has no size. (Under mpirun isatty() is
/// always true, because ranks get pseudo-terminals.)
int terminal_columns(int fd);

/// Resolves `automatic`: `bar` on a terminal (columns > 0, TERM not "dumb"), else `plain`.
Progress resolve_progress(Progress wanted, int columns);

/// Progress::plain: a line every log_interval steps; bar: one redrawn line, events scroll above it; json:
/// every line of standard output is one JSON object (steps as in metrics.jsonl, the rest as {"event": ...}).
struct TerminalOptions {
  bool active = true;  ///< true on rank 0 only; inactive terminals print nothing but warnings
  Progress progress = Progress::automatic;
  int64_t log_interval = 1;  ///< steps between plain lines
  int64_t max_steps = 0;     ///< determines the width of the step column

  // For tests. Defaults: the wall clock, standard output and its size, and the environment (NO_COLOR, TERM
  // and the locale's character set).
  std::function<double()> clock;  ///< seconds since the epoch
  std::function<int()> columns;
  std::function<void(std::string_view)> write;
  enum class Choice {
    by_environment,
    no,
    yes
  } color = Choice::by_environment,
    unicode = Choice::by_environment;
};

/// Not thread-safe. Writes through core/base/output.h: after output::background(), a standard output that is
/// not read or closed never blocks the run.
class Terminal {
 public:
  explicit Terminal(TerminalOptions options = {});
  ~Terminal();  ///< erases the bar
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  /// Must be called before the first step if max_steps was unknown at construction.
  void set_max_steps(int64_t max_steps);

  void banner(const RunFacts& facts);
  /// Must be called for every step. `plain` prints the first, every log_interval-th, the last, and skipped
  /// steps; `bar` redraws at most five times per second; `json` prints the metrics object.
  void step(const StepFacts& facts);
  /// "HH:MM:SS eval   144        val_loss 6.0021  4.1s"
  void eval(const EvalFacts& facts);
  /// "HH:MM:SS ckpt   144        text". The bar also shows the step of the last "ckpt".
  void event(std::string_view kind, int64_t step, std::string_view text);
  /// "HH:MM:SS text", for messages that belong to no step.
  void note(std::string_view text);
  /// "warn: text" on standard error through core/base/log.h, without damaging the bar. Also on inactive ranks
  /// (with a rank prefix).
  void warn(std::string_view text);
  void summary(const RunSummary& summary);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace nrl::monitor

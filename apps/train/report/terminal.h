#pragma once
// The run's standard output: banner, step lines or a progress bar, events, end summary.

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>

#include "apps/train/report/facts.h"
#include "core/config/enums.h"

namespace nrl::train {

/// Columns of the terminal behind `fd`; 0 when it is none, or has no size: isatty() alone is always true
/// under mpirun, which gives its ranks pseudo-terminals.
int terminal_columns(int fd);

/// What `automatic` stands for: `bar` on a terminal (columns > 0, TERM not "dumb") and `plain` otherwise.
Progress resolve_progress(Progress wanted, int columns);

/// Progress::plain: a line every log_interval steps; bar: one redrawn line, events scroll above it; json:
/// every line of standard output is one JSON object (steps as in metrics.jsonl, the rest as {"event": ...}).
struct TerminalOptions {
  bool active = true;  ///< rank 0; elsewhere nothing is printed
  Progress progress = Progress::automatic;
  int64_t log_interval = 1;  ///< steps from one plain line to the next
  int64_t max_steps = 0;     ///< sets the width of the step column

  // For tests; the defaults are the wall clock, standard output and its size, and the environment (NO_COLOR,
  // TERM and the locale's character set).
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

/// Not thread-safe. Writes by way of core/base/output.h: after output::background() a standard output that is
/// not read or gone (a closed pipe) never holds up the run.
class Terminal {
 public:
  explicit Terminal(TerminalOptions options = {});
  ~Terminal();  ///< takes the bar away
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  /// What `automatic` was resolved to.
  Progress progress() const;

  /// Where they become known after the construction.
  void set_max_steps(int64_t max_steps);

  void banner(const RunFacts& facts);
  /// Every step: `plain` prints the first one, every log_interval-th, the last, and skipped ones; `bar`
  /// redraws at most five times a second; `json` prints the metrics object.
  void step(const StepFacts& facts);
  /// "HH:MM:SS eval   144        val_loss 6.0021  4.1s"
  void eval(const EvalFacts& facts);
  /// "HH:MM:SS ckpt   144        text"; `kind` has up to four letters by custom ("ckpt", "eval", "save").
  /// A "ckpt" is also named in the bar.
  void event(std::string_view kind, int64_t step, std::string_view text);
  /// "HH:MM:SS text", for what belongs to no step (signals, stopping).
  void note(std::string_view text);
  /// "warn: text" on standard error by way of core/base/log.h, with the bar out of the way. Also on inactive
  /// ranks (with the rank in front).
  void warn(std::string_view text);
  void summary(const RunSummary& summary);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace nrl::train

#pragma once
// Formats terminal output; pure functions.

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/monitor/facts.h"

namespace nrl::monitor {

/// Capabilities of the terminal.
struct TextStyle {
  bool color = false;    ///< ANSI colors
  bool unicode = false;  ///< UTF-8 block characters; otherwise ASCII
};

/// Distances in standard deviations from OutlierDetector; 0: not an outlier.
struct StepMarks {
  double loss = 0, grad_norm = 0;
};

/// "03:12:29", local time, from seconds since the epoch.
std::string clock_text(double time);
/// "812", "412.3k", "1.24M", "3.10G".
std::string compact_count(double value);

/// "03:12:29 step   120/20000  loss 6.2310  lr 1.71e-04  gnorm 0.842  412.3k tok/s  mfu 47.0%  mem 41.6G
/// 1.272s  data 0.3%  eta 7h01m" in one line. With several ranks "(51.5k/rank)" follows the rate; "skipped"
/// is appended if the update was not applied. `columns` > 0: the least important fields are omitted until the
/// line fits; step, loss, ETA and "skipped" are always kept.
std::string step_line(const StepFacts& facts, double time, const StepMarks& marks, const TextStyle& style,
                      int columns = 0);

/// "03:13:04 ckpt   144        text", aligned with step lines.
std::string event_line(double time, std::string_view kind, int64_t step, int64_t max_steps,
                       std::string_view text);

/// "val_loss 6.0021  val_loss/code 5.1130  4.1s".
std::string eval_text(const EvalFacts& facts);

/// One character per value, scaled to the range of the values; a blank for a non-finite value.
/// Empty without unicode.
std::string sparkline(std::span<const double> values, const TextStyle& style);

/// The progress bar, at most max(1, columns - 1) columns wide (some terminals wrap after the last column).
/// The least important fields are omitted until it fits; step, loss and ETA are the most important.
/// `checkpoint_step` < 0: none yet.
std::string bar_line(const StepFacts& facts, std::span<const double> losses, const StepMarks& marks,
                     int64_t checkpoint_step, int columns, const TextStyle& style);

/// The maximum width of the banner and the summary.
inline constexpr int most_header_columns = 100;

/// Lines of "label     text" with aligned texts. Further lines of a text are indented, and texts longer than
/// `columns` are wrapped: between fields (two blanks) if possible, else between words. Each
/// line ends with a newline.
std::string labeled_lines(const std::vector<std::pair<std::string, std::string>>& rows,
                          int columns = most_header_columns);

/// The final summary without its first line (the outcome).
std::string summary_lines(const RunSummary& summary, int columns = most_header_columns);

}  // namespace nrl::monitor

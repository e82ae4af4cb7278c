#pragma once
// Curves of runs as text for a terminal, and as a page of HTML with inline SVG.

#include <span>
#include <string>
#include <vector>

#include "apps/train/report/run_history.h"

namespace nrl::train {

/// Round numbers that divide [low, high] into about `count` parts: multiples of 1, 2 or 5 times a power of
/// ten, all inside the range.
std::vector<double> axis_ticks(double low, double high, int count);

/// One curve of each run over common axes, `width` x `height` characters without the axes; the marks are
/// `*`, `o`, `+`, ... in the order of the runs, named below the chart when there are several. Runs without
/// this curve are left out; empty when none has it.
std::string text_chart(std::span<const RunHistory> runs, Curve RunHistory::*curve, int width, int height);

/// The numbers of each run, one line a run: steps, tokens, first and last loss, best validation loss, median
/// tokens/s.
std::string text_table(std::span<const RunHistory> runs);

/// A self-contained page (no script, no reference to another file): loss with validation points, learning
/// rate, gradient norm and tokens/s of all runs, and the table.
std::string html_report(std::span<const RunHistory> runs);

}  // namespace nrl::train

#pragma once
// Charts of runs: as text for a terminal, and as an HTML page with inline SVG.

#include <span>
#include <string>
#include <vector>

#include "apps/monitor/axis.h"
#include "apps/monitor/run_history.h"

namespace nrl::monitor {

/// About `count` round numbers in [low, high]: multiples of 1, 2 or 5 times a power of ten.
std::vector<double> axis_ticks(double low, double high, int count);

/// One curve of each run over common axes, `width` x `height` characters without the axes. The marks are `*`,
/// `o`, `+`, ... in the order of the runs, with a legend if there are several. Runs without this curve are
/// omitted; empty if no run has it.
std::string text_chart(std::span<const RunHistory> runs, Curve RunHistory::*curve, int width, int height,
                       By by = By::steps);

/// One line per run: steps, tokens, first and last loss, best validation loss, median tokens/s.
std::string text_table(std::span<const RunHistory> runs);

/// A self-contained page (no scripts or external files): loss with validation points, learning rate, gradient
/// norm and tokens/s of all runs, maps of the layers of each, and the table.
std::string html_report(std::span<const RunHistory> runs, By by = By::steps);

}  // namespace nrl::monitor

#pragma once
// metrics.jsonl as a table.

#include <string>

namespace nrl::monitor {

/// The rows of `path` (for_each_row()) as CSV (RFC 4180, lines end with LF): one line per step, with the
/// evaluations and texts of the step in their own columns. The first line names the columns, which are all
/// keys of the file in the order of their first row; "time" is the time of the step. A number that is not
/// known is an empty cell.
std::string metrics_csv(const std::string& path);

}  // namespace nrl::monitor

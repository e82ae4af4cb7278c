#pragma once
// The page of promises beside measurements, from the results of `nrl-train bench compare --json`.

#include <string>
#include <vector>

namespace nrl::bench {

/// "+12.5 %" for a ratio of 1.125.
std::string change_text(double ratio);

/// Markdown with a section for every comparison of the files: promises with what was measured and their
/// verdicts, and the variants. Comparisons that were skipped in all files are listed with the reason. Fails
/// with Exit::no_input and Exit::data for files that are missing or are no such results.
std::string claims_page(const std::vector<std::string>& results);

}  // namespace nrl::bench

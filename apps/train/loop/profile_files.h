#pragma once
// The files of a window: LOG_DIR/profile/step-FIRST.

#include <string>

#include "apps/profile/profile.h"
#include "apps/profile/recorded.h"
#include "apps/train/loop/capture.h"

namespace nrl::train {

/// True if the timeline of `rank` is written: of profiling.ranks. `auto` is all of up to 16 ranks, else the
/// first ones of pipeline stages and nodes, at most 16.
bool writes_timeline(const Recording& run, int rank);

/// Analyzes the records of all ranks, gathers the results on rank 0, and writes profile.json, profile.html,
/// the timelines of profiling.ranks in the format of profiling.trace, and memory.html if asked for. With
/// profiling.every, profile.json is a line of profile/history.jsonl, too. Collective; what fails on one rank
/// fails on all.
struct WrittenProfile {
  std::string directory;
  profile::Profile merged = {};  ///< of all ranks, on rank 0
};
WrittenProfile write_profile(const Recording& run, const profile::Recorded& record,
                             const std::string& log_dir);

/// Writes profile.json, profile.html and the trace of a window of one process without ranks. Returns the
/// directory.
std::string write_local_profile(const profile::Recorded& record, profile::RunFacts facts,
                                const std::string& log_dir);

/// Removes the timelines that this rank has in the directory of a window.
void remove_timelines(const Recording& run, const std::string& directory);

}  // namespace nrl::train

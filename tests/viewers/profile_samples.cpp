// Writes the outputs of a profile of two synthetic ranks, for the tests of this directory:
// profile_samples DIRECTORY.

#include <string>
#include <vector>

#include "apps/profile/chrome.h"
#include "apps/profile/page.h"
#include "apps/profile/perfetto.h"
#include "apps/profile/timeline.h"
#include "core/io/atomic_file.h"
#include "tests/profile/sample_profile.h"
#include "tests/profile/sample_recording.h"

int main(int argc, char** argv) {
  using namespace nrl;
  if (argc != 2) return 64;
  const std::string directory = argv[1];
  make_directory(join_path(directory, "chrome"));
  std::vector<std::string> traces;
  for (const int rank : {0, 1}) {
    traces.push_back(join_path(directory, "rank-" + std::to_string(rank) + ".pftrace"));
    const profile::Recorded recorded = profile::sample_recording(rank, true);
    profile::write_trace(traces.back(), recorded);
    profile::write_chrome_trace(
        join_path(directory, "chrome/rank-" + std::to_string(rank) + ".pt.trace.json"), recorded, 2);
  }
  profile::join_traces(join_path(directory, "all.pftrace"), traces);
  // A timeline with as many bars as a page may have.
  profile::Recorded recorded = profile::sample_recording(1);
  profile::Timeline timeline = profile::timeline_of(recorded);
  profile::Lane lane{"many operations", {}};
  for (size_t i = 0; i + 40 < profile::most_bars; ++i) {
    const double begin = timeline.seconds * static_cast<double>(i) / profile::most_bars;
    const auto paint = static_cast<profile::Paint>(i * i % profile::paints.size());
    lane.bars.push_back({begin, begin + timeline.seconds / 5000, paint, "linear_forward", 1});
  }
  timeline.lanes.push_back(lane);
  write_file_atomic(join_path(directory, "profile.html"),
                    profile::html_page(profile::sample_profile(16), timeline));
  write_file_atomic(join_path(directory, "memory.html"), profile::memory_page(recorded));
}

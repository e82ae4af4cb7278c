#include "apps/train/loop/profile_files.h"

#include <algorithm>
#include <array>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "apps/profile/analyze.h"
#include "apps/profile/chrome.h"
#include "apps/profile/json.h"
#include "apps/profile/page.h"
#include "apps/profile/perfetto.h"
#include "apps/profile/timeline.h"
#include "apps/train/launch/launch.h"
#include "core/io/atomic_file.h"

namespace nrl::train {
namespace {

using profile::RankProfile;

/// The command line of this process, separated by blanks.
std::string command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);  // its size is not known before
  std::string text{std::istreambuf_iterator<char>(file), {}};
  while (!text.empty() && text.back() == '\0') text.pop_back();
  std::replace(text.begin(), text.end(), '\0', ' ');
  return text;
}

std::string time_now() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text.data();
}

profile::RunFacts facts_of(const Recording& run, const profile::Recorded& record) {
  const plan::RunPlan& plan = run.plan();
  const auto tokens = plan.batch.tokens_per_step;
  return {.version = NRL_VERSION,
          .command = command_line(),
          .started = time_now(),
          .config = dump_resolved(run.config),
          .world = run.world.size(),
          .nodes = run.world.nodes().back() + 1,
          .threads = run.placement.host_threads(),
          .stages = plan.layout.stages,
          .first_step = record.first_step,
          .last_step = record.last_step,
          .tokens_per_step = tokens,
          .flops_per_step =
              static_cast<double>(tokens) * model::training_flops_per_token(plan.spec, plan.sequence_length)};
}

void append_line(const std::string& path, const std::string& line) {
  std::ofstream file(path, std::ios::app);
  if (!(file << line << "\n" << std::flush)) fail(Exit::io, "{} cannot be written", path);
}

/// Chrome traces have a directory of their own, since their readers take every JSON file beside one for a
/// trace.
std::string timeline_path(const std::string& directory, const Recording& run, int rank) {
  const bool chrome = run.config.config.profiling.trace == TraceFormat::chrome;
  return join_path(directory, chrome ? fmt::format("chrome/rank-{}.pt.trace.json", rank)
                                     : fmt::format("rank-{}.pftrace", rank));
}

void write_timeline(const Recording& run, const profile::Recorded& record, const std::string& directory) {
  const TraceFormat format = run.config.config.profiling.trace;
  if (format == TraceFormat::none || !writes_timeline(run, record.rank)) return;
  const std::string path = timeline_path(directory, run, record.rank);
  if (format == TraceFormat::perfetto) {
    profile::write_trace(path, record);
    return;
  }
  make_directories(std::filesystem::path(path).parent_path().string());
  profile::write_chrome_trace(path, record, run.world.size());
}

/// The traces that are visible here: other nodes may have directories of their own.
void join_all(const Recording& run, const std::string& directory) {
  std::vector<std::string> paths;
  for (int rank = 0; rank < run.world.size(); ++rank) {
    std::error_code error;
    std::string path = timeline_path(directory, run, rank);
    if (writes_timeline(run, rank) && std::filesystem::exists(path, error)) paths.push_back(std::move(path));
  }
  if (!paths.empty()) profile::join_traces(join_path(directory, "all.pftrace"), paths);
}

}  // namespace

bool writes_timeline(const Recording& run, int rank) {
  constexpr int most = 16;
  const std::vector<std::string>& ranks = run.config.config.profiling.ranks;
  const auto lists = [&](std::string_view word) {
    return std::find(ranks.begin(), ranks.end(), word) != ranks.end();
  };
  if (lists("all") || lists(std::to_string(rank))) return true;
  if (!lists("auto")) return false;
  const int size = run.world.size();
  if (size <= most) return true;
  // The ranks of a stage are consecutive, and so are the ranks of a node.
  const std::vector<int>& nodes = run.world.nodes();
  const int per_stage = size / run.plan().layout.stages;
  int chosen = 0;
  for (int r = 0; r <= rank; ++r) {
    if (r > 0 && r % per_stage != 0 && nodes[r] == nodes[r - 1]) continue;
    if (r == rank) return chosen < most;
    ++chosen;
  }
  return false;
}

WrittenProfile write_profile(const Recording& run, const profile::Recorded& record,
                             const std::string& log_dir) {
  const std::string root = join_path(log_dir, "profile");
  const std::string directory = join_path(root, fmt::format("step-{}", record.first_step));
  const bool first = run.world.rank() == 0;
  std::string own, drawn;
  run_collectively(run.world, [&] {
    make_directories(directory);
    own = to_json(profile::analyze(record)).dump();
    write_timeline(run, record, directory);
    if (first && run.config.config.profiling.memory_snapshot)
      write_file_atomic(join_path(directory, "memory.html"), profile::memory_page(record));
  });
  const std::vector<std::string> texts = run.world.comm().gather_texts_to(own, 0);
  profile::Profile merged;
  std::string shown = "0";
  run_collectively(run.world, [&] {
    if (!first) return;
    std::vector<RankProfile> ranks;
    for (const std::string& text : texts) ranks.push_back(profile::rank_from(parse_json(text, "profile")));
    merged = profile::merge(std::move(ranks), facts_of(run, record));
    // The page shows a step of the rank with most own work.
    const auto slowest =
        std::max_element(merged.ranks.begin(), merged.ranks.end(),
                         [](const auto& a, const auto& b) { return a.own_work() < b.own_work(); });
    shown = std::to_string(slowest->rank);
  });
  run.world.comm().broadcast_text(shown, 0);
  if (shown == std::to_string(record.rank)) drawn = to_json(profile::timeline_of(record)).dump();
  const std::vector<std::string> timelines = run.world.comm().gather_texts_to(drawn, 0);
  run_collectively(run.world, [&] {
    if (!first) return;
    const JsonValue json = to_json(merged);
    write_file_atomic(join_path(directory, profile::profile_file), json.dump(2) + "\n");
    if (run.config.config.profiling.every) append_line(join_path(root, "history.jsonl"), json.dump());
    const std::string& timeline = timelines[static_cast<size_t>(std::stoi(shown))];
    write_file_atomic(join_path(directory, "profile.html"),
                      profile::html_page(merged, profile::timeline_from(parse_json(timeline, "timeline"))));
    if (run.config.config.profiling.trace == TraceFormat::perfetto) join_all(run, directory);
  });
  return {directory, std::move(merged)};
}

std::string write_local_profile(const profile::Recorded& record, profile::RunFacts facts,
                                const std::string& log_dir) {
  const std::string directory =
      join_path(join_path(log_dir, "profile"), fmt::format("step-{}", record.first_step));
  make_directories(directory);
  facts.version = NRL_VERSION;
  facts.command = command_line();
  facts.started = time_now();
  facts.first_step = record.first_step;
  facts.last_step = record.last_step;
  const profile::Profile merged = profile::merge({profile::analyze(record)}, std::move(facts));
  write_file_atomic(join_path(directory, profile::profile_file), to_json(merged).dump(2) + "\n");
  write_file_atomic(join_path(directory, "profile.html"),
                    profile::html_page(merged, profile::timeline_of(record)));
  profile::write_trace(join_path(directory, "rank-0.pftrace"), record);
  return directory;
}

void remove_timelines(const Recording& run, const std::string& directory) {
  std::error_code ignored;
  std::filesystem::remove(timeline_path(directory, run, run.world.rank()), ignored);
  if (run.world.rank() == 0) std::filesystem::remove(join_path(directory, "all.pftrace"), ignored);
}

}  // namespace nrl::train

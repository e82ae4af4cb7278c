#include "apps/train/loop/stragglers.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "apps/monitor/timers.h"
#include "apps/train/launch/run_control.h"
#include "core/base/clock.h"
#include "core/base/log.h"

namespace nrl::train {
namespace {

constexpr double look_seconds = 1, patience_seconds = 15;  // for ranks whose window ends late
constexpr double gaussian_mad = 1.4826;                    // deviation of a normal distribution / its MAD
constexpr double least_deviation = 0.01;                   // of the median

double lower_median(std::vector<double> values) {
  const auto middle = values.begin() + (std::ssize(values) - 1) / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::vector<Stragglers::Peer> peers_of(const Run& run) {
  const parallel::RankGrid grid(run.placement.grid_position().sizes);
  std::vector<Stragglers::Peer> peers;
  for (int r = 0; r < run.world.size(); ++r)
    peers.push_back({grid.coordinates(r).pp, run.world.nodes()[static_cast<size_t>(r)],
                     run.world.hosts()[static_cast<size_t>(r)]});
  return peers;
}

}  // namespace

Stragglers::Stragglers(std::vector<Peer> ranks, const StragglerLimits& limits)
    : ranks_(std::move(ranks)), states_(ranks_.size()), limits_(limits) {}

Stragglers::Change Stragglers::window(std::span<const Work> work) {
  Change change;
  std::map<int, std::vector<int>> stages;
  for (size_t r = 0; r < work.size(); ++r)
    if (std::isfinite(work[r].seconds)) stages[ranks_[r].stage].push_back(static_cast<int>(r));
  for (const auto& [stage, ranks] : stages) {
    if (ranks.size() < 2) continue;
    std::vector<double> seconds, data, distances;
    for (const int r : ranks) {
      seconds.push_back(work[static_cast<size_t>(r)].seconds);
      data.push_back(work[static_cast<size_t>(r)].data_seconds);
    }
    const double median = lower_median(seconds), median_data = lower_median(data);
    if (median <= 0) continue;
    for (const double s : seconds) distances.push_back(std::abs(s - median));
    const double deviation = std::max(gaussian_mad * lower_median(distances), least_deviation * median);
    for (const int r : ranks) {
      const Work& own = work[static_cast<size_t>(r)];
      const double longer = own.seconds - median;
      const Slow slow{.rank = r,
                      .ratio = own.seconds / median,
                      .z = longer / deviation,
                      .seconds = own.seconds,
                      .median = median,
                      .data = 2 * (own.data_seconds - median_data) > longer};
      change.ratio = std::max(change.ratio, slow.ratio);
      State& state = states_[static_cast<size_t>(r)];
      const bool is_slow = slow.z >= limits_.z && slow.ratio >= limits_.ratio;
      state.slow = is_slow ? state.slow + 1 : 0;
      state.clean = is_slow ? 0 : state.clean + 1;
      if (!state.episode && state.slow >= limits_.windows) {
        state.episode = true;
        change.began.push_back(slow);
      } else if (state.episode && state.clean >= limits_.windows) {
        state.episode = false;
        change.ended.push_back(r);
      }
    }
  }
  return change;
}

std::vector<int> Stragglers::slow_nodes() const {
  std::map<int, std::pair<int, int>> nodes;  // ranks, and how many are slow
  for (size_t r = 0; r < ranks_.size(); ++r) {
    auto& [all, slow] = nodes[ranks_[r].node];
    ++all;
    slow += states_[r].episode;
  }
  std::vector<int> out;
  for (const auto& [node, counts] : nodes)
    if (counts.first > 1 && 2 * counts.second > counts.first && nodes.size() > 1) out.push_back(node);
  return out;
}

std::string Stragglers::describe(const Slow& slow) const {
  const Peer& at = peer(slow.rank);
  return fmt::format(
      "rank {} (node {}, {}) needs {:.2f} x the time of its peers for its own work ({}; {:.3g} s a step, "
      "median "
      "{:.3g} s)",
      slow.rank, at.node, at.host, slow.ratio, slow.data ? "reading data" : "computing", slow.seconds,
      slow.median);
}

StragglerWatch::StragglerWatch(const Run& run, std::function<void(const std::string&)> warn)
    : run_(run),
      warn_(std::move(warn)),
      stragglers_(peers_of(run)),
      seen_(static_cast<size_t>(run.world.size())),
      judged_(steady_seconds()) {}

void StragglerWatch::look(int64_t step) {
  const RunControl* control = RunControl::current();
  const double now = steady_seconds();
  if (!control || now < next_look_) return;
  next_look_ = now + look_seconds;
  const std::vector<control::Control::PaceReading> paces = control->paces();
  std::vector<Stragglers::Work> work(paces.size());
  size_t known = 0;
  for (size_t r = 0; r < paces.size(); ++r) {
    if (paces[r].count == seen_[r]) continue;
    ++known;
    work[r] = {paces[r].pace.seconds, paces[r].pace.data_seconds};
  }
  if (known < 2 || (known < paces.size() && now - judged_ < patience_seconds)) return;
  for (size_t r = 0; r < paces.size(); ++r) seen_[r] = paces[r].count;
  judged_ = now;
  judge(step, work);
}

void StragglerWatch::judge(int64_t step, std::span<const Stragglers::Work> work) {
  const Stragglers::Change change = stragglers_.window(work);
  ratio_ = change.ratio;
  if (change.began.empty() && change.ended.empty()) return;
  const auto row = [&](const char* event, int rank) {
    const Stragglers::Peer& at = stragglers_.peer(rank);
    return JsonValue::object({{"step", step},
                              {"time", monitor::wall_seconds()},
                              {"event", event},
                              {"rank", int64_t{rank}},
                              {"node", int64_t{at.node}},
                              {"host", at.host}});
  };
  try {
    if (!file_) file_.emplace(run_.config.logger.log_dir, step, true, stragglers_file);
    for (const Stragglers::Slow& slow : change.began) {
      JsonValue began = row("began", slow.rank);
      began.set("ratio", slow.ratio);
      began.set("z", slow.z);
      began.set("own_s", slow.seconds);
      began.set("median_s", slow.median);
      began.set("in", slow.data ? "data" : "computing");
      file_->append(began);
    }
    for (const int rank : change.ended) file_->append(row("ended", rank));
  } catch (const Error& e) {
    log::warn("{}", e.what());
  }
  std::vector<int> told;  // nodes
  const std::vector<int> nodes = stragglers_.slow_nodes();
  for (const Stragglers::Slow& slow : change.began) {
    const int node = stragglers_.peer(slow.rank).node;
    std::string text = stragglers_.describe(slow);
    if (std::find(nodes.begin(), nodes.end(), node) != nodes.end()) {
      if (std::find(told.begin(), told.end(), node) != told.end()) continue;
      told.push_back(node);
      text = fmt::format("node {} is slow, as most of its ranks are: {}", node, text);
    }
    warn_(fmt::format(
        "{} in {} windows of 10 s in a row; the others wait for it. Fix: look at that node: clocks, "
        "temperature, other processes",
        text, StragglerLimits().windows));
  }
}

}  // namespace nrl::train

#include "apps/profile/analyze.h"

#include <algorithm>
#include <string_view>

#include "apps/data/loader.h"
#include "apps/profile/analyses.h"
#include "apps/profile/verdicts.h"
#include "core/base/error.h"
#include "core/config/load.h"

namespace nrl::profile {

RankProfile analyze(const Recorded& recorded) {
  const Rows rows(recorded);
  RankProfile out;
  out.rank = recorded.rank;
  out.host = recorded.host;
  out.device = recorded.device;
  out.split = split_of(recorded, rows);
  for (size_t i = 0; i + 1 < recorded.step_begins.size(); ++i)
    out.step_s.push_back(static_cast<double>(recorded.step_begins[i + 1] - recorded.step_begins[i]) * 1e-9);
  out.operations = operations_of(recorded, rows);
  out.layers = layers_of(recorded, rows);
  out.groups = groups_of(recorded);
  out.memory = memory_of(recorded);
  const auto steps = static_cast<double>(out.step_s.size());
  out.cpu_seconds = recorded.counters.cpu_seconds / steps;
  out.starved = recorded.counters.starved / steps;
  for (const trace::Event& e : recorded.window.events)
    if (std::string_view(e.name) == data::read_range)
      out.read_seconds += static_cast<double>(e.end - e.begin) * 1e-9 / steps;
  out.involuntary_switches = recorded.counters.involuntary_switches;
  out.migrations = recorded.counters.migrations;
  out.resident_bytes = recorded.counters.resident_bytes;
  out.cores = recorded.counters.cores;
  const Arrivals arrivals = arrivals_of(recorded);
  out.arrived_last = arrivals.last;
  out.caused_waiting = arrivals.caused_s;
  out.clock_error = recorded.clock_error;
  out.dropped = recorded.window.dropped;
  return out;
}

Profile merge(std::vector<RankProfile> ranks, RunFacts facts) {
  NRL_CHECK(!ranks.empty(), "a profile of no rank");
  std::stable_sort(ranks.begin(), ranks.end(),
                   [](const RankProfile& a, const RankProfile& b) { return a.rank < b.rank; });
  Profile profile;
  profile.facts = std::move(facts);
  profile.ranks = std::move(ranks);
  std::vector<Operation> operations, layers;
  const RankProfile* slowest = &profile.ranks.front();
  for (const RankProfile& r : profile.ranks) {
    if (r.own_work() > slowest->own_work()) slowest = &r;
    operations.insert(operations.end(), r.operations.begin(), r.operations.end());
    layers.insert(layers.end(), r.layers.begin(), r.layers.end());
  }
  profile.split = slowest->split;
  profile.operations = merge_operations(std::move(operations));
  profile.layers = merge_operations(std::move(layers));
  const ConfigResult config = load_config_text(profile.facts.config, "the configuration");
  if (!config.ok()) return profile;  // a profile of no run
  for (Verdict& v : find_verdicts(profile, config.config)) profile.findings.push_back(std::move(v.finding));
  return profile;
}

}  // namespace nrl::profile

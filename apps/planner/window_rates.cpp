#include "apps/planner/window_rates.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <utility>

#include "apps/plan/parts.h"
#include "core/base/sample.h"

namespace nrl::planner {
namespace {

/// A call counts as the same number of calls in run and dry run up to this share.
constexpr double same_calls = 0.005;

/// Times of calls, from the sums by operation and part of the step that a window has. A sum of calls of
/// several shapes is divided among them as the device's model expects.
class CallRates {
 public:
  explicit CallRates(const machine::DeviceModel& device) : times_(device, nullptr) {}

  void add(const StageCalls& calls, const profile::RankProfile& rank) {
    struct Group {
      std::vector<const ops::Call*> calls;
      double count = 0, expected = 0;
    };
    std::map<std::pair<std::string, std::string>, Group> groups;
    for (const ops::Call& call : calls.step.calls) {
      const std::string_view part = plan::part_of(call.op, call.range);
      Group& group = groups[{call.op, std::string(part.empty() ? plan::other_ops : part)}];
      group.calls.push_back(&call);
      group.count += calls.count(call);
      group.expected += calls.count(call) * times_.of(call).value;
    }
    for (const profile::Operation& o : rank.operations) {
      const auto found = groups.find({o.name, o.part});
      const double counted = found == groups.end() ? 0 : found->second.count;
      if (std::abs(static_cast<double>(o.calls) - counted) > same_calls * counted || counted == 0) {
        left_out.push_back(fmt::format("{} ({}): {} calls in the run, {:.0f} in the plan", o.name, o.part,
                                       o.calls, counted));
        continue;
      }
      const Group& group = found->second;
      if (!(o.seconds > 0) || !(group.expected > 0)) continue;
      for (const ops::Call* call : group.calls) {
        Sum& sum = sums_[machine::key_of(*call)];
        sum.cost = call->cost;
        sum.count += calls.count(*call);
        sum.seconds += calls.count(*call) * times_.of(*call).value * o.seconds / group.expected;
      }
    }
  }

  std::vector<machine::MeasuredCall> measured(int rounds) const {
    std::vector<machine::MeasuredCall> out;
    for (const auto& [key, sum] : sums_)
      out.push_back({.key = key,
                     .work = sum.cost.work,
                     .flops = sum.cost.flops,
                     .library = sum.cost.library,
                     .seconds = sum.seconds / sum.count,
                     .rounds = rounds});
    return out;
  }

  std::vector<std::string> left_out;

 private:
  struct Sum {
    ops::Cost cost;
    double count = 0, seconds = 0;
  };
  machine::CallTimes times_;
  std::map<machine::CallKey, Sum> sums_;
};

/// Relative standard deviation of the ranks' own work; unset where their work differs by the layout.
std::optional<double> spread_of(const profile::Profile& window) {
  if (window.ranks.size() < 2 || window.facts.stages > 1) return std::nullopt;
  std::vector<double> work;
  for (const profile::RankProfile& r : window.ranks) work.push_back(r.own_work());
  const double average = mean(work), spread = deviation(work);
  if (!(average > 0) || spread == 0) return std::nullopt;
  return spread / average;
}

/// The rank of a stage with most own work, as in Profile::split; null: the window has no operations of one.
const profile::RankProfile* rank_of_stage(const profile::Profile& window, int stage) {
  const int ranks = std::max(1, window.facts.world / std::max(1, window.facts.stages));
  const profile::RankProfile* out = nullptr;
  for (const profile::RankProfile& r : window.ranks)
    if (r.rank / ranks == stage && !r.operations.empty() && (!out || r.own_work() > out->own_work()))
      out = &r;
  return out;
}

/// A message takes the time from its issue on both sides to its end: on a CPU the thread that moves it may
/// have to wait for a processor, which no bandwidth says.
void add_messages(const profile::Profile& window, machine::Profile& profile) {
  double seconds = 0, bytes = 0, calls = 0;
  int domains = 1;
  for (const profile::RankProfile& rank : window.ranks)
    for (const profile::GroupTime& g : rank.groups) {
      if (g.operation != "recv" || !g.group.starts_with("pp")) continue;
      seconds += g.wire;
      bytes += static_cast<double>(g.bytes);
      calls += static_cast<double>(g.calls);
      domains = std::max(domains, g.nodes);
    }
  if (!(seconds > 0) || !(bytes > 0) || !(calls > 0)) return;
  for (const comm::Op op : {comm::Op::send, comm::Op::recv})
    profile.links.push_back({.op = op,
                             .ranks = std::max(2, window.facts.stages),
                             .domains = domains,
                             .bytes = bytes / calls,
                             .seconds = seconds / calls});
}

}  // namespace

StageCalls calls_of(const predict::DryStages& stages, const predict::DryStages::Stage& stage) {
  return {stage.step, static_cast<double>(stages.microbatches()) / stage.step.microbatches};
}

double gaps_of(const profile::Split& s) {
  return s.host + s.launch + s.unattributed;
}

WindowRates window_rates(const profile::Profile& window, const predict::DryStages& stages,
                         const std::string& base) {
  CallRates rates(stages.device().model());
  for (const predict::DryStages::Stage& stage : stages.stages())
    if (const profile::RankProfile* rank = rank_of_stage(window, stage.stage))
      rates.add(calls_of(stages, stage), *rank);
  WindowRates out;
  machine::Profile& profile = out.profile;
  profile.base = base;
  profile.build = window.facts.version;
  profile.date = window.facts.started;
  profile.calls = rates.measured(static_cast<int>(window.facts.last_step - window.facts.first_step + 1));
  profile.spread = spread_of(window);
  add_messages(window, profile);
  double launches = 0;
  const StageCalls first = calls_of(stages, stages.stages().front());
  for (const ops::Call& call : first.step.calls) launches += first.count(call) * call.cost.launches;
  if (const profile::RankProfile* rank = rank_of_stage(window, 0);
      rank && launches > 0 && gaps_of(rank->split) > 0)
    profile.host_gap_s = gaps_of(rank->split) / launches;
  out.left_out = std::move(rates.left_out);
  return out;
}

}  // namespace nrl::planner

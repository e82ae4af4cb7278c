#include "apps/predict/stage_time.h"

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <unordered_set>

#include "apps/machine/host_time.h"
#include "apps/machine/trainer_kernels.h"
#include "apps/model/decoder.h"
#include "apps/model/linear/linear.h"

namespace nrl::predict {
namespace {

/// The slots of a step's items.
class Slots {
 public:
  Slots(const model::Decoder& decoder, int64_t microbatches)
      : decoder_(decoder),
        program_(decoder.program(memory::training)),
        chunks_(static_cast<size_t>(program_.stashes.chunks())),
        count_(static_cast<size_t>(microbatches) * chunks_ * pass_count + 1) {}

  size_t count() const { return count_; }
  int of(int step, int microbatch) const {
    // Steps of an evaluation before the passes are of another program, without microbatches.
    if (step < 0 || microbatch < 0) return static_cast<int>(count_) - 1;
    const program::Step& s = program_.steps[step];
    return static_cast<int>((static_cast<size_t>(microbatch) * chunks_ + static_cast<size_t>(s.chunk)) *
                                pass_count +
                            static_cast<size_t>(pass_of(decoder_, s)));
  }

 private:
  const model::Decoder& decoder_;
  const program::Program& program_;
  size_t chunks_, count_;
};

/// The times of the operations of a rank's groups; equal ones are looked up once.
class OperationTimes {
 public:
  OperationTimes(const engine::DryStep& step, const parallel::ProcessGrid& grid, const Rates& rates)
      : step_(step), grid_(grid), rates_(rates), crossings_(step.groups.size()) {}

  const machine::CollectiveTime& of(const comm::Ledger::Event& e) {
    const auto [at, added] = times_.try_emplace({e.group, e.op, e.purpose, e.bytes});
    if (added) {
      const bool experts = e.purpose == comm::Purpose::experts;
      const double load = experts ? rates_.expert_load : 1;
      const machine::Crossing& c = crossing(e.group);
      at->second =
          machine::collective_time(rates_.fabric, c, machine::pattern_of(e.op, e.purpose),
                                   load * static_cast<double>(e.bytes), experts ? across(c.domains) : 1);
    }
    return at->second;
  }
  machine::Link link(int group) { return link_of(crossing(group)); }

 private:
  /// The part of the rows for experts on other nodes that crosses to them.
  double across(int domains) const {
    if (!rates_.calls.device().experts.once) return 1;
    // The experts of a token are in some groups, which lie one after the other.
    const ops::RouterRule& rule = rates_.router;
    const double nodes = static_cast<double>(domains * rule.group_top_k) / static_cast<double>(rule.groups);
    return machine::once_to_each_node(std::max(nodes, 1.0), rule.top_k);
  }
  const machine::Crossing& crossing(int group) {
    std::optional<machine::Crossing>& c = crossings_[group];
    if (!c) c = rates_.fabric.crossing(grid_, step_.groups[group].id);
    return *c;
  }

  const engine::DryStep& step_;
  const parallel::ProcessGrid& grid_;
  const Rates& rates_;
  std::vector<std::optional<machine::Crossing>> crossings_;
  std::map<std::tuple<int, comm::Op, comm::Purpose, int64_t>, machine::CollectiveTime> times_;
};

/// Work with the host, by its number.
using HostStarts = std::map<int, const plan::TrafficEvent*>;

/// Adds the items of work with the host that `e` starts or waits for. A CPU copies with the threads that
/// compute: what leaves at the start, what comes back at the wait.
void add_host_work(const plan::TrafficEvent& e, Item item, const HostStarts& starts,
                   const machine::DeviceModel& device, std::vector<Item>& out) {
  const plan::TrafficEvent& start = *starts.at(e.what.operation);
  item.purpose = comm::Purpose::offload;
  Item begins = item;
  begins.kind = Item::Kind::start;
  begins.seconds = machine::host_seconds(device, *start.host, static_cast<double>(start.what.bytes));
  begins.link = machine::link_of(*start.host);
  begins.after = start.what.after;
  item.kind = Item::Kind::wait;
  const bool there = *start.host == memory::HostWork::to_host;
  if (device.gpu()) {
    out.push_back(e.what.wait ? item : begins);
  } else if (e.what.wait != there) {
    out.push_back(begins);
    out.push_back(item);
  }
}

}  // namespace

Pass pass_of(const model::Decoder& decoder, const program::Step& s) {
  if (s.kind == program::StepKind::compute && decoder.step(s).pass == memory::Pass::weight)
    return Pass::backward_weight;
  const bool backward = s.backward || s.again || s.subject() == program::StepKind::fetch;
  return backward ? Pass::backward_data : Pass::forward;
}

StageItems stage_items(const engine::DryStep& step, const model::Decoder& decoder,
                       const parallel::ProcessGrid& grid, const Rates& rates) {
  StageItems out;
  const Slots slots(decoder, step.microbatches);
  OperationTimes times(step, grid, rates);
  out.slots = slots.count();
  const bool gpu = rates.calls.device().gpu();
  out.items.reserve(step.calls.size() + step.events.size());
  // Operations that the step leaves in flight count where the step before it has left them.
  std::unordered_set<int> waited;
  std::unordered_set<int> beside;  // other computation, for which nothing waits
  HostStarts host;
  const machine::DeviceModel& device = rates.calls.device();
  const auto hidden = [&](const plan::TrafficEvent& e) {
    if (e.what.purpose == comm::Purpose::experts) return device.experts.beside;
    return e.what.purpose == comm::Purpose::layers && e.what.op == comm::Op::all_gather && device.kernels &&
           device.kernels->gathers_again_beside && e.step >= 0 && e.microbatch >= 0 &&
           decoder.program(memory::training).steps[static_cast<size_t>(e.step)].again;
  };
  for (const plan::TrafficEvent& e : step.events) {
    if (e.what.wait) waited.insert(e.what.operation);
    if (!e.what.wait && hidden(e)) beside.insert(e.what.operation);
    if (e.host) host[e.what.operation] = &e;
  }
  const auto add_event = [&](const plan::TrafficEvent& e, int index) {
    // The host's copies and updates follow each other, and one wait is for all of an update.
    const bool of_host = e.what.purpose == comm::Purpose::offload;
    if (e.what.wait && beside.contains(e.what.operation)) return;
    if (!of_host && !waited.contains(e.what.operation)) return;
    Item item{.kind = e.what.wait ? Item::Kind::wait : Item::Kind::start,
              .slot = slots.of(e.step, e.microbatch),
              .operation = e.what.operation,
              .source = index};
    if (of_host) {
      out.links = weakest(out.links, machine::Source::assumed);
      return add_host_work(e, item, host, rates.calls.device(), out.items);
    }
    if (!e.what.wait) {
      const machine::CollectiveTime& time = times.of(e.what);
      const machine::Link link = times.link(e.what.group);
      if (link != machine::Link::none) out.links = weakest(out.links, time.time.source);
      if (e.what.purpose == comm::Purpose::messages) {
        // Stages wait for each other's messages in pipeline::simulate().
        out.message = std::max(out.message, time.time.value);
        if (e.what.op == comm::Op::send) out.sent += time.time.value;
        out.message_link = link;
        return;
      }
      // A rank on a CPU starts an operation on the processors that compute.
      const double issuing = gpu ? 0 : time.latency;
      // Context-parallel ranks gather without copies.
      const bool copies =
          e.what.purpose != comm::Purpose::layers || step.groups[e.what.group].id.axes == parallel::Axis::tp;
      item.host = issuing;
      if (copies)
        item.host += rates.calls.copies(e.what.purpose, e.what.op, static_cast<double>(e.what.bytes));
      item.issue = rates.calls.host_of_operation();
      item.seconds = time.time.value - issuing;
      item.after = e.what.after;
      item.op = e.what.op;
      item.link = link;
      item.purpose = e.what.purpose;
      item.beside = beside.contains(e.what.operation);
    }
    out.items.push_back(item);
  };
  const auto copied_before = [&](const ops::Call& call) {
    if (call.step < 0 || call.microbatch < 0) return false;
    const program::Step& s = decoder.program(memory::training).steps[static_cast<size_t>(call.step)];
    return (call.microbatch > 0 || s.again) && s.kind == program::StepKind::compute &&
           model::copies_weight(decoder.step(s).name);
  };
  size_t next = 0;
  const auto add_events = [&](size_t calls) {
    for (; next < step.events.size() && step.events[next].calls <= calls; ++next)
      add_event(step.events[next], static_cast<int>(next));
  };
  for (size_t i = 0; i < step.calls.size(); ++i) {
    add_events(i);
    const ops::Call& call = step.calls[i];
    const machine::Seconds seconds = rates.calls.of(call);
    out.kernels = weakest(out.kernels, seconds.source);
    if (device.kernels && device.kernels->caches_weights && copied_before(call)) continue;
    out.items.push_back({.slot = slots.of(call.step, call.microbatch),
                         .seconds = seconds.value,
                         .host = rates.calls.gaps(call),
                         .issue = rates.calls.host(call),
                         .host_waits = rates.calls.host_waits(call),
                         .row = rates.overlap.row(call.op, call.cost.work),
                         .source = static_cast<int>(i)});
  }
  add_events(step.calls.size());
  return out;
}

void set_costs(const StageTime& time, int first, int end, int stages, pipeline::MicrobatchCosts& costs) {
  for (int stage = first; stage < end; ++stage)
    for (size_t chunk = 0; chunk < time.middle.size(); ++chunk) {
      const size_t of_model = chunk * static_cast<size_t>(stages) + static_cast<size_t>(stage);
      costs.first[of_model] = time.first[chunk];
      costs.middle[of_model] = time.middle[chunk];
      costs.last[of_model] = time.last[chunk];
    }
}

StageTime stage_time(const StageItems& items, int chunks, int64_t microbatches,
                     const machine::Overlap& overlap) {
  const Replay replayed = replay(items.items, items.slots, overlap);
  const auto n = static_cast<size_t>(chunks), run = (items.slots - 1) / (n * pass_count);
  const auto total = static_cast<double>(microbatches);
  StageTime out;
  out.end = replayed.slots.back();
  // The microbatches between the first and the last are alike: those that did not run count as the others.
  const size_t first = run > 2 ? 1 : 0, last = run > 2 ? run - 1 : run;
  const double weight = 1 + (total - static_cast<double>(run)) / static_cast<double>(last - first);
  const auto between = [&](size_t m) { return m >= first && m < last; };
  const auto slot = [&](size_t microbatch, size_t chunk, Pass pass) -> const SlotTime& {
    return replayed.slots[(microbatch * n + chunk) * pass_count + static_cast<size_t>(pass)];
  };
  for (size_t m = 0; m < run; ++m)
    for (size_t s = 0; s < n * pass_count; ++s)
      out.passes += replayed.slots[m * n * pass_count + s] * (between(m) ? weight : 1);
  const auto mean = [&](size_t chunk, Pass pass, auto part) {
    double sum = 0;
    for (size_t m = first; m < last; ++m) sum += part(slot(m, chunk, pass));
    return sum / static_cast<double>(last - first);
  };
  const auto total_of = [](const SlotTime& s) { return s.total(); };
  const auto data_of = [](const SlotTime& s) { return s.data(); };
  const auto costs = [&](auto seconds) {
    return pipeline::ChunkCosts{.forward = seconds(Pass::forward),
                                .backward_data = seconds(Pass::backward_data),
                                .backward_weight = seconds(Pass::backward_weight),
                                .message = items.message};
  };
  for (size_t c = 0; c < n; ++c) {
    const auto end = [&](size_t m) {
      return costs([&](Pass pass) {
        const SlotTime& own = slot(m, c, pass);
        const double outside = std::max(0.0, own.data() - mean(c, pass, data_of));
        out.outside += outside;
        return own.total() - outside;
      });
    };
    out.first.push_back(end(0));
    out.middle.push_back(costs([&](Pass pass) { return mean(c, pass, total_of); }));
    out.last.push_back(end(run - 1));
  }
  out.busy = out.passes.busy;
  out.busy += out.end.busy;
  out.busy.of(items.message_link) += items.sent * total / static_cast<double>(run);
  return out;
}

}  // namespace nrl::predict

#include "apps/planner/timeline.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <utility>
#include <vector>

#include <spdlog/fmt/fmt.h>

#include "apps/planner/predicted_memory.h"
#include "apps/planner/predicted_power.h"
#include "apps/profile/chrome_writer.h"
#include "core/io/json.h"

namespace nrl::planner {
namespace {

using pipeline::ActionKind;
using predict::Detail;
using predict::PassSpan;
using predict::Span;
using predict::StageTimeline;
using predict::WorkSpan;

/// Links follow `compute` in the order of machine::Link.
enum Thread : uint8_t {
  passes = 1,
  compute,
  waits = compute + machine::link_count,
  to_next,
  to_previous,
};

int64_t nanoseconds(double seconds) {
  return std::llround(seconds * 1e9);
}

Thread thread_of(const Span& span) {
  switch (span.resource) {
    case Span::Resource::processors:
      return compute;
    case Span::Resource::link:
      return static_cast<Thread>(compute + static_cast<int>(span.link));
    case Span::Resource::waits:
      break;
  }
  return waits;
}

/// Passes that are not in full.
size_t hidden_passes(const StageTimeline& stage) {
  return stage.hidden.second - stage.hidden.first;
}

struct Counter {
  double time;
  memory::Category category;
  int64_t bytes;
};
/// Live bytes of a category from a time on, for passes that are not hidden.
std::vector<Counter> counters_of(const plan::RunPlan& plan, const StageTimeline& stage) {
  std::array<int64_t, memory::category_count> now{};
  const bool hides = hidden_passes(stage) > 0;
  const double from = hides ? stage.passes[stage.hidden.first].begin : stage.end,
               to = hides ? stage.passes[stage.hidden.second - 1].end : stage.end;
  std::vector<Counter> out;
  for (const auto& [time, bytes] : predicted_memory(plan, stage).curve) {
    if (time > from && time < to) continue;
    for (size_t c = 0; c < bytes.size(); ++c)
      if (bytes[c] != now[c]) out.push_back({time, static_cast<memory::Category>(c), now[c] = bytes[c]});
  }
  return out;
}

/// The values of the counters of all stages, which are slow to find.
struct Counters {
  std::vector<std::vector<Counter>> memory = {};  // by stage; empty: not planned
  std::vector<std::vector<double>> watts = {};    // by stage, of equal parts of the step; empty: not known
};
Counters counters_of(const predict::DryStages& stages, std::span<const plan::RunPlan* const> plans,
                     const predict::StepTimeline& timeline) {
  constexpr size_t parts = 256;
  const predict::PowerModel power = predict::power_of(stages.device().model());
  Counters out;
  for (const StageTimeline& stage : timeline.stages) {
    out.memory.emplace_back();
    if (const plan::RunPlan* plan = plan_of(stages, plans, stage))
      out.memory.back() = counters_of(*plan, stage);
    out.watts.push_back(predicted_power(power, stage, timeline.end, parts));
  }
  return out;
}

class StepTrace {
 public:
  StepTrace(const std::string& path, const predict::DryStages& stages, const predict::StepTimeline& timeline,
            const Counters& counters)
      : out_(path, fmt::format("\"displayTimeUnit\": \"ms\",\n\"otherData\": {{\"predicted_step_s\": {}, "
                               "\"spread_s\": {}, \"microbatches\": {}}},\n",
                               JsonValue(timeline.estimate.step).dump(),
                               JsonValue(timeline.estimate.spread).dump(), stages.microbatches())),
        stages_(stages),
        timeline_(timeline),
        counters_(counters) {}

  void write() {
    for (const StageTimeline& stage : timeline_.stages) {
      names(stage);
      add_passes(stage);
      for (const WorkSpan& w : stage.work) add_work(stage, w);
    }
    messages();
    for (const StageTimeline& stage : timeline_.stages) {
      memory(stage);
      watts(stage);
    }
    out_.commit();
  }
  size_t events() const { return out_.events(); }

 private:
  const engine::DryStep& step_of(const StageTimeline& stage) const {
    return stages_.stages()[stage.dry].step;
  }
  /// As in recorded traces, because viewers keep process 0 for the idle one.
  int process_of(int stage) const { return first_rank(stage) + 1; }
  int first_rank(int stage) const { return stages_.fabric().world() / stages_.layout().stages * stage; }

  void names(const StageTimeline& stage) {
    const int process = process_of(stage.stage);
    const machine::DeviceModel& device = stages_.device().model();
    out_.name(
        "process_name", process, 0,
        stages_.layout().stages > 1
            ? fmt::format("rank {} predicted {}, stage {}", first_rank(stage.stage), device.name, stage.stage)
            : fmt::format("rank {} predicted {}", first_rank(stage.stage), device.name));
    std::array<bool, to_previous + 1> used{};
    used[passes] = used[compute] = true;
    for (const WorkSpan& w : stage.work) used[thread_of(w.span)] = true;
    used[to_next] = used[to_previous] = stages_.layout().stages > 1;
    std::array<std::string_view, to_previous + 1> texts{};
    texts[passes] = "passes";
    texts[compute] = "compute";
    for (const machine::Link link : machine::all_links)
      texts[compute + static_cast<size_t>(link)] = machine::name_of(link, device.gpu());
    texts[waits] = "waiting";
    texts[to_next] = "to next stage";
    texts[to_previous] = "to previous stage";
    for (int thread = passes; thread <= to_previous; ++thread)
      if (used[thread]) out_.name("thread_name", process, thread, texts[thread]);
  }

  std::string name_of(const PassSpan& pass) const {
    const std::string_view kind = pass.kind == ActionKind::forward           ? "F"
                                  : pass.kind == ActionKind::backward_weight ? "W"
                                                                             : "B";
    return stages_.layout().chunks > 1 ? fmt::format("{} {}.{}", kind, pass.microbatch, pass.chunk)
                                       : fmt::format("{} {}", kind, pass.microbatch);
  }

  void slice(std::string_view category, std::string_view name, int stage, Thread thread, double begin,
             double end, const std::string& arguments) {
    out_.slice(category, name, process_of(stage), thread, nanoseconds(begin), nanoseconds(end), arguments);
  }

  void add_passes(const StageTimeline& stage) {
    for (size_t p = 0; p < stage.passes.size(); ++p) {
      const PassSpan& pass = stage.passes[p];
      if (hidden_passes(stage) > 0 && p == stage.hidden.first) {
        hidden(stage);
        p = stage.hidden.second - 1;
        continue;
      }
      slice("pass", name_of(pass), stage.stage, passes, pass.begin, pass.end,
            fmt::format(R"("chunk": {}, "microbatch": {})", pass.chunk, pass.microbatch));
    }
  }

  void hidden(const StageTimeline& stage) {
    const size_t count = hidden_passes(stage);
    const double begin = stage.passes[stage.hidden.first].begin,
                 end = stage.passes[stage.hidden.second - 1].end;
    const std::string name = fmt::format("{} more passes", count);
    slice("pass", name, stage.stage, passes, begin, end, fmt::format(R"("passes": {})", count));
    if (!stage.work.empty())
      slice("op", name, stage.stage, compute, begin, end,
            fmt::format(R"("passes": {}, "seconds": {})", count, JsonValue(stage.hidden_compute).dump()));
  }

  void add_work(const StageTimeline& stage, const WorkSpan& w) {
    std::string arguments;
    if (w.call) {
      arguments =
          fmt::format(R"("flops": {:.0f}, "bytes": {:.0f}, )", w.call->cost.flops, w.call->cost.bytes());
    } else if (w.event->host) {
      arguments = fmt::format(R"("bytes": {}, )", w.event->what.bytes);
    } else {
      const comm::Ledger::Event& e = w.event->what;
      arguments = fmt::format(
          R"("operation": "{}", "bytes": {}, "group": {}, "purpose": "{}", )", comm::name_of(e.op), e.bytes,
          out_.quoted(parallel::name_of(step_of(stage).groups[e.group].id)), comm::name_of(e.purpose));
    }
    if (w.pass >= 0)
      arguments += fmt::format(R"("chunk": {}, "microbatch": {}, )", stage.passes[w.pass].chunk,
                               stage.passes[w.pass].microbatch);
    const Thread thread = thread_of(w.span);
    const bool waiting = thread == waits;
    if (waiting)
      arguments.resize(arguments.size() - 2);
    else
      arguments += fmt::format(R"("seconds": {}, "source": "{}")", JsonValue(w.alone).dump(),
                               machine::name_of(w.source));
    slice(waiting         ? "wait"
          : w.call        ? "op"
          : w.event->host ? "copy"
                          : "communication",
          waiting         ? "wait"
          : w.call        ? std::string_view(w.call->op)
          : w.event->host ? memory::name_of(*w.event->host)
                          : comm::name_of(w.event->what.op),
          stage.stage, thread, w.span.begin, w.span.end, arguments);
  }

  void messages() {
    int64_t id = 0;
    for (const predict::MessageSpan& m : timeline_.messages) {
      const PassSpan &sender = timeline_.stages[m.from].passes[m.sender],
                     &receiver = timeline_.stages[m.to].passes[m.receiver];
      const Thread thread = sender.backward() ? to_previous : to_next;
      slice("message", "send", m.from, thread, m.begin, m.end,
            fmt::format(R"("chunk": {}, "microbatch": {}, "to_stage": {})", sender.chunk, sender.microbatch,
                        m.to));
      // An arrow starts within the pass that sends. Where that is longer than the schedule has it, because it
      // waits for weights or gradients, it may end after the pass that receives has begun.
      const int64_t end = nanoseconds(receiver.begin);
      const int64_t begin = std::clamp(end, nanoseconds(sender.begin),
                                       std::max(nanoseconds(sender.begin), nanoseconds(sender.end) - 1));
      out_.flow("message", ++id, false, process_of(m.from), passes, begin);
      out_.flow("message", id, true, process_of(m.to), passes, std::max(begin, end));
    }
  }

  void memory(const StageTimeline& stage) {
    for (const Counter& c : counters_.memory[stage.stage])
      out_.counter(fmt::format("memory: {}", memory::name_of(c.category)), process_of(stage.stage),
                   nanoseconds(c.time), fmt::format(R"("bytes": {})", c.bytes));
  }

  void watts(const StageTimeline& stage) {
    const std::vector<double>& all = counters_.watts[stage.stage];
    const double each = timeline_.end / static_cast<double>(std::max<size_t>(all.size(), 1));
    const bool hides = hidden_passes(stage) > 0;
    const double from = hides ? stage.passes[stage.hidden.first].begin : timeline_.end,
                 to = hides ? stage.passes[stage.hidden.second - 1].end : timeline_.end;
    int64_t last = -1;
    for (size_t i = 0; i < all.size(); ++i) {
      const double begin = each * static_cast<double>(i), end = begin + each;
      const int64_t now = std::llround(all[i]);
      if (now == last || (end > from && begin < to)) continue;
      out_.counter("watts", process_of(stage.stage), nanoseconds(begin), fmt::format(R"("W": {})", now));
      last = now;
    }
  }

  profile::ChromeWriter out_;
  const predict::DryStages& stages_;
  const predict::StepTimeline& timeline_;
  const Counters& counters_;
};

/// As many as the trace has, or some more, because not all threads of a stage are used.
size_t events_of(const predict::StepTimeline& timeline, const Counters& counters) {
  size_t sum = 3 * timeline.messages.size();
  for (const StageTimeline& stage : timeline.stages)
    sum += stage.work.size() + stage.passes.size() - hidden_passes(stage) + 10 +
           counters.memory[stage.stage].size() + counters.watts[stage.stage].size();
  return sum;
}

}  // namespace

size_t write_step_trace(const std::string& path, const predict::DryStages& stages,
                        std::span<const plan::RunPlan* const> plans, size_t most) {
  int64_t shown = 2 * stages.layout().stages;
  predict::StepTimeline timeline;
  Counters counters;
  const auto fits = [&](Detail detail) {
    timeline = predict::step_timeline(stages, shown, detail);
    counters = counters_of(stages, plans, timeline);
    return events_of(timeline, counters) <= most;
  };
  if (!fits(Detail::all) && !fits(Detail::dry_run))
    while (!fits(Detail::none) && shown > 1) shown /= 2;
  StepTrace trace(path, stages, timeline, counters);
  trace.write();
  return trace.events();
}

}  // namespace nrl::planner

// Predicted steps as trace events.

#include "apps/planner/timeline.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "apps/planner/predicted_memory.h"
#include "apps/planner/predicted_power.h"
#include "core/io/atomic_file.h"
#include "core/io/json.h"
#include "tests/catch.h"
#include "tests/planner/planned.h"

using namespace nrl;
using namespace nrl::planner;
using namespace nrl::test;

namespace {

struct Traced : Planned {
  using Planned::Planned;
  JsonValue trace(size_t most = most_trace_events) {
    events = write_step_trace(*this / "trace.json", *kept.stages, by_stage, most);
    return read_json(*this / "trace.json");
  }
  size_t events = 0;
};

struct Slice {
  std::string name;
  double begin, end;  // microseconds
  double seconds;
};
using Thread = std::pair<int64_t, int64_t>;

std::map<Thread, std::vector<Slice>> slices_of(const JsonValue& trace) {
  std::map<Thread, std::vector<Slice>> out;
  for (const JsonValue& e : trace.at("traceEvents").items()) {
    if (e.get_string("ph") != "X") continue;
    const double begin = e.get_double("ts");
    const JsonValue* seconds = e.at("args").find("seconds");
    out[{e.get_int("pid"), e.get_int("tid")}].push_back(
        {e.get_string("name"), begin, begin + e.get_double("dur"), seconds ? seconds->as_double() : 0});
  }
  for (auto& [thread, slices] : out)
    std::stable_sort(slices.begin(), slices.end(),
                     [](const Slice& a, const Slice& b) { return a.begin < b.begin; });
  return out;
}

/// Bytes of the buffers that are alive at once in the training program.
int64_t most_alive(const plan::RunPlan& plan) {
  const auto steps = static_cast<int>(plan.decoder->program(memory::training).steps.size());
  int64_t most = 0;
  for (int tick = 0; tick < steps; ++tick) {
    int64_t sum = 0;
    for (const auto& buffer : plan.memory.buffers())
      if (buffer.tier == memory::Tier::device &&
          (buffer.always() ||
           std::any_of(buffer.lifetimes.begin(), buffer.lifetimes.end(),
                       [&](const auto& life) { return life.first <= tick && tick <= life.last; })))
        sum += buffer.bytes;
    most = std::max(most, sum);
  }
  return most;
}

constexpr int64_t passes_thread = 1, compute_thread = 2;

struct Layout {
  int world;
  std::vector<std::string> keys;
  bool splits = false;
};
const std::vector<Layout> layouts{
    {1, {"policy.train_micro_batch_size=4"}},
    {8, {"distributed.shard_strategy=optim_grads_params", "distributed.overlap_param_gather=true"}},
    {8, {"distributed.tensor_parallel_size=4", "distributed.shard_strategy=optim"}},
    {4, {"distributed.pipeline_parallel_size=4"}},
    {8,
     {"distributed.pipeline_parallel_size=4", "distributed.virtual_pipeline_size=2",
      "distributed.shard_strategy=optim"}},
    {4, {"distributed.pipeline_parallel_size=2", "distributed.pipeline_schedule=zb_h1"}, true},
    {2,
     {"distributed.pipeline_parallel_size=2", "policy.recompute.granularity=full",
      "policy.train_micro_batch_size=8"}},
    {4,
     {"distributed.pipeline_parallel_size=2", "policy.offload_activations=true",
      "policy.offload_optimizer=true"}}};

}  // namespace

TEST_CASE("slices of a thread follow each other, and their calls take the estimated time", "[timeline]") {
  for (const Layout& layout : layouts) {
    CAPTURE(fmt::format("{}", fmt::join(layout.keys, " ")));
    Traced planned(layout.world, layout.keys);
    const auto slices = slices_of(planned.trace());
    CHECK(planned.events <= most_trace_events);
    double longest = 0, end = 0;
    for (const auto& [thread, of_thread] : slices) {
      CAPTURE(thread.first, thread.second);
      double seconds = 0;
      for (size_t i = 0; i < of_thread.size(); ++i) {
        CHECK(of_thread[i].end >= of_thread[i].begin);
        if (i > 0 && of_thread[i].begin < of_thread[i - 1].end - 1e-4)
          FAIL_CHECK(of_thread[i].name << " at " << of_thread[i].begin << " us, before the end of "
                                       << of_thread[i - 1].name << " at " << of_thread[i - 1].end);
        seconds += of_thread[i].seconds;
        end = std::max(end, of_thread[i].end);
      }
      if (thread.second == compute_thread) longest = std::max(longest, seconds);
    }
    const predict::StepEstimate& e = planned.estimate.likely;
    CHECK(longest == Approx(e.compute + e.update).epsilon(2e-3));
    // Spread is not drawn; passes that wait for weights may end later than in the schedule alone.
    CHECK(end * 1e-6 == Approx(e.step - e.spread).epsilon(0.02));
  }
}

TEST_CASE("every pass of the schedule is in the trace, those in the middle as a number", "[timeline]") {
  for (const Layout& layout : layouts) {
    CAPTURE(fmt::format("{}", fmt::join(layout.keys, " ")));
    Traced planned(layout.world, layout.keys);
    const JsonValue trace = planned.trace();
    std::map<int64_t, int64_t> passes;
    for (const JsonValue& e : trace.at("traceEvents").items())
      if (e.get_string("ph") == "X" && e.get_int("tid") == passes_thread)
        passes[e.get_int("pid")] += e.at("args").get_int("passes", 1);
    CHECK(std::ssize(passes) == planned.kept.stages->layout().stages);
    for (const auto& [process, count] : passes)
      CHECK(count == planned.kept.stages->microbatches() * planned.kept.stages->layout().chunks *
                         (layout.splits ? 3 : 2));
  }
}

TEST_CASE("copies to and from the host have threads of their own", "[timeline]") {
  Traced planned(1, {"policy.offload_activations=true", "policy.offload_optimizer=true"});
  const JsonValue trace = planned.trace();
  std::map<int64_t, std::string> threads;
  std::map<std::string, std::set<std::string>> names;
  std::map<std::string, int64_t> bytes;
  for (const JsonValue& e : trace.at("traceEvents").items()) {
    if (e.get_string("name") == "thread_name")
      threads[e.get_int("tid")] = e.at("args").get_string("name");
    else if (e.get_string("ph") == "X" && e.get_string("cat") == "copy")
      names[threads.at(e.get_int("tid"))].insert(e.get_string("name")),
          bytes[e.get_string("name")] += e.at("args").get_int("bytes");
  }
  CHECK(names == std::map<std::string, std::set<std::string>>{{"to host", {"offload"}},
                                                              {"from host", {"fetch"}},
                                                              {"host CPUs", {"offloaded_update"}}});
  CHECK(bytes["offload"] > bytes["fetch"]);  // gradients do not come back
  CHECK(bytes["offloaded_update"] > 0);
}

TEST_CASE("arrows lead from a pass that sends to a later one that receives", "[timeline]") {
  Traced planned(8, {"distributed.pipeline_parallel_size=4", "distributed.virtual_pipeline_size=2"});
  const JsonValue trace = planned.trace();
  const auto slices = slices_of(trace);
  struct Ends {
    int starts = 0, ends = 0;
    double from = 0, to = 0;
  };
  std::map<int64_t, Ends> arrows;
  for (const JsonValue& e : trace.at("traceEvents").items()) {
    const std::string phase = e.get_string("ph");
    if (phase != "s" && phase != "f") continue;
    Ends& ends = arrows[e.get_int("id")];
    const double at = e.get_double("ts");
    (phase == "s" ? ends.starts : ends.ends) += 1;
    (phase == "s" ? ends.from : ends.to) = at;
    const auto& of_thread = slices.at({e.get_int("pid"), e.get_int("tid")});
    CHECK(std::any_of(of_thread.begin(), of_thread.end(),
                      [&](const Slice& s) { return s.begin <= at + 1e-4 && at <= s.end; }));
  }
  CHECK(arrows.size() > 32);
  for (const auto& [id, ends] : arrows) {
    CHECK(ends.starts == 1);
    CHECK(ends.ends == 1);
    CHECK(ends.from <= ends.to);
  }
  // All messages are in the trace, of forward and of backward passes.
  const auto all = planned.kept.stages->microbatches() * (4 * 2 - 1) * 2;
  CHECK(std::ssize(arrows) <= all);
  if (planned.kept.stages->microbatches() <= 16) CHECK(std::ssize(arrows) == all);
}

TEST_CASE("the memory of a predicted step reaches the planned peak", "[timeline]") {
  for (const Layout& layout : layouts) {
    CAPTURE(fmt::format("{}", fmt::join(layout.keys, " ")));
    Traced planned(layout.world, layout.keys);
    const JsonValue trace = planned.trace();
    const auto timeline = predict::step_timeline(*planned.kept.stages, 1000, predict::Detail::all);
    for (const predict::StageTimeline& stage : timeline.stages) {
      const plan::RunPlan* const of = plan_of(*planned.kept.stages, planned.by_stage, stage);
      REQUIRE(of);
      const plan::RunPlan& plan = *of;
      CHECK(plan.layout.stage == stage.stage);
      const profile::MemoryUse use = predicted_memory(plan, stage);
      CHECK(use.peak <= plan.memory.total_bytes());
      CHECK(use.peak == most_alive(plan));
      for (size_t i = 1; i < use.curve.size(); ++i) CHECK(use.curve[i].first >= use.curve[i - 1].first);
      // The counters of the trace have the same peak.
      std::map<std::string, int64_t> now;
      int64_t most = 0;
      const int64_t process = layout.world / planned.kept.stages->layout().stages * stage.stage + 1;
      double time = -1;
      for (const JsonValue& e : trace.at("traceEvents").items()) {
        if (e.get_string("ph") != "C" || e.get_int("pid") != process || e.get_string("name") == "watts")
          continue;
        const int64_t sum = std::accumulate(now.begin(), now.end(), int64_t{0},
                                            [](int64_t s, const auto& n) { return s + n.second; });
        if (e.get_double("ts") > time) most = std::max(most, sum);
        time = e.get_double("ts");
        now[e.get_string("name")] = e.at("args").get_int("bytes");
      }
      const int64_t last = std::accumulate(now.begin(), now.end(), int64_t{0},
                                           [](int64_t s, const auto& n) { return s + n.second; });
      CHECK(std::max(most, last) == use.peak);
    }
  }
}

TEST_CASE("the power of a predicted step is that of its calls", "[timeline]") {
  for (const Layout& layout : layouts) {
    CAPTURE(fmt::format("{}", fmt::join(layout.keys, " ")));
    Traced planned(layout.world, layout.keys);
    const predict::DryStages& stages = *planned.kept.stages;
    const predict::PowerModel power = predict::power_of(stages.device().model());
    const auto timeline = predict::step_timeline(stages, 1000, predict::Detail::all);
    for (const predict::StageTimeline& stage : timeline.stages) {
      constexpr size_t parts = 300;
      const std::vector<double> watts = predicted_power(power, stage, timeline.end, parts);
      REQUIRE(watts.size() == parts);
      double joules = 0, calls = power.idle * timeline.end, links = 0;
      for (const double w : watts) {
        CHECK(w >= power.idle * (1 - 1e-9));
        CHECK(w <= power.limit * (1 + 1e-9));
        joules += w * timeline.end / parts;
      }
      for (const predict::WorkSpan& w : stage.work) {
        const double seconds = w.span.end - w.span.begin;
        if (w.call)
          calls += seconds * ((w.call->cost.work == ops::Work::gemm        ? power.gemm
                               : w.call->cost.work == ops::Work::attention ? power.attention
                                                                           : power.memory) -
                              power.idle);
        else if (w.alone > 0)
          links += seconds * (power.links - power.idle);
      }
      // Links beside GEMMs draw nothing, because these are at the limit.
      CHECK(joules >= calls * (1 - 1e-9));
      CHECK(joules <= (calls + links) * (1 + 1e-9));
      CHECK(predicted_power({}, stage, timeline.end, parts).empty());
    }
    // The trace has it, once for each stage at least.
    std::map<int64_t, int> counters;
    const JsonValue trace = planned.trace();
    for (const JsonValue& e : trace.at("traceEvents").items())
      if (e.get_string("ph") == "C" && e.get_string("name") == "watts") {
        ++counters[e.get_int("pid")];
        CHECK(e.at("args").get_int("W") <= std::llround(power.limit));
      }
    CHECK(counters.size() == timeline.stages.size());
  }
}

TEST_CASE("the longest path holds up the step", "[timeline]") {
  for (const Layout& layout : layouts) {
    CAPTURE(fmt::format("{}", fmt::join(layout.keys, " ")));
    const Planned planned(layout.world, layout.keys);
    const predict::DryStages& stages = *planned.kept.stages;
    const auto timeline = predict::step_timeline(stages, stages.microbatches(), predict::Detail::none);
    const std::vector<predict::PassIndex> path = predict::longest_path(timeline);
    REQUIRE(!path.empty());
    double end = 0, last = 0, within = 0;
    for (const predict::StageTimeline& stage : timeline.stages) end = std::max(end, stage.passes.back().end);
    for (const predict::PassIndex& at : path) {
      const predict::PassSpan& pass = timeline.stages[at.stage].passes[at.pass];
      CHECK(pass.begin >= last * (1 - 1e-9));
      within += pass.end - pass.begin;
      last = pass.end;
    }
    CHECK(last == end);
    CHECK(timeline.stages[path.front().stage].passes[path.front().pass].begin == 0);
    // The rest is messages.
    CHECK(within > 0.97 * end);
    if (timeline.stages.size() == 1) CHECK(path.size() == timeline.stages[0].passes.size());
  }
}

TEST_CASE("a trace of many events has fewer calls, then fewer microbatches", "[timeline]") {
  Traced planned(8, {"distributed.pipeline_parallel_size=4"});
  const auto with_calls = [](const JsonValue& trace) {
    std::set<int64_t> processes;
    for (const auto& [thread, slices] : slices_of(trace))
      if (thread.second == compute_thread) processes.insert(thread.first);
    return processes.size();
  };
  CHECK(with_calls(planned.trace()) == 4);
  const size_t all = planned.events;
  CHECK(with_calls(planned.trace(all - 1)) == 3);
  CHECK(planned.events < all);
  const size_t some = planned.events;
  CHECK(with_calls(planned.trace(some - 1)) == 0);
  const size_t none = planned.events;
  planned.trace(none / 2);
  CHECK(planned.events <= none / 2);
}

TEST_CASE("a trace that cannot be written leaves nothing behind", "[timeline]") {
  Traced planned(1, {"policy.train_micro_batch_size=8"});
  CHECK_THROWS_WITH(write_step_trace(planned / "missing/trace.json", *planned.kept.stages),
                    ContainsSubstring("missing"));
  CHECK(list_directory(planned / ".") == std::vector<std::string>{"run.yaml"});
}

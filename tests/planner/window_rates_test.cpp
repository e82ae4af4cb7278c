// Rates of a window: times of its calls and messages, and of GEMMs in other shapes.

#include "apps/planner/window_rates.h"

#include <cmath>
#include <map>
#include <utility>

#include "apps/plan/parts.h"
#include "apps/planner/gemm_times.h"
#include "tests/planner/planned.h"

using namespace nrl;
using machine::CallKey;
using machine::MeasuredCall;

namespace {

// How much slower than the model the operations of a test's window are.
double slower(const std::string& op) {
  return op.starts_with("attention") ? 3 : 2;
}

// A window in which every operation takes its modeled time, times slower().
profile::Profile window_of(const predict::DryStages& stages) {
  const machine::CallTimes times = stages.call_times();
  profile::Profile window;
  window.facts.stages = window.facts.world = static_cast<int>(stages.stages().size());
  for (const auto& stage : stages.stages()) {
    const planner::StageCalls calls = planner::calls_of(stages, stage);
    struct Sum {
      double calls = 0, seconds = 0;
    };
    std::map<std::pair<std::string, std::string>, Sum> sums;
    for (const ops::Call& call : calls.step.calls) {
      const std::string_view part = plan::part_of(call.op, call.range);
      Sum& sum = sums[{call.op, std::string(part.empty() ? std::string_view(plan::other_ops) : part)}];
      sum.calls += calls.count(call);
      sum.seconds += calls.count(call) * times.of(call).value * slower(call.op);
    }
    profile::RankProfile rank;
    rank.rank = stage.stage;
    rank.split.wall = 1;
    for (const auto& [names, sum] : sums)
      rank.operations.push_back({.name = names.first,
                                 .part = names.second,
                                 .calls = std::llround(sum.calls),
                                 .seconds = sum.seconds});
    window.ranks.push_back(std::move(rank));
  }
  return window;
}

}  // namespace

TEST_CASE("a window gives the times of its calls, also in estimates", "[advice]") {
  const test::Planned planned(2, {"distributed.pipeline_parallel_size=2"});
  const predict::DryStages& stages = *planned.kept.stages;
  const profile::Profile window = window_of(stages);
  const planner::WindowRates rates = planner::window_rates(window, stages, "h100");
  CHECK(rates.left_out.empty());
  CHECK(rates.profile.links.empty());
  REQUIRE(rates.profile.calls.size() > 20);
  const machine::CallTimes modeled = stages.call_times(), measured(stages.device().model(), &rates.profile);
  for (const auto& stage : stages.stages())
    for (const ops::Call& call : stage.step.calls) {
      if (modeled.of(call).value <= 0) continue;
      CAPTURE(call.op);
      CHECK(measured.of(call).value == Approx(slower(call.op) * modeled.of(call).value).epsilon(0.02));
    }
}

TEST_CASE("messages between stages take the time that receivers saw", "[advice]") {
  const test::Planned planned(2, {"distributed.pipeline_parallel_size=2"});
  profile::Profile window = window_of(*planned.kept.stages);
  profile::GroupTime g;
  g.group = "pp";
  g.operation = "recv";
  g.calls = 4;
  g.bytes = 4 << 20;
  g.wire = 0.012;
  g.late = 0.5;  // the sender was not there yet
  window.ranks[1].groups = {g};
  g.operation = "send";  // waits for the receiver
  g.wire = 0.8;
  window.ranks[0].groups = {g};
  const machine::Profile profile = planner::window_rates(window, *planned.kept.stages, "h100").profile;
  REQUIRE(profile.links.size() == 2);
  for (const machine::MeasuredOperation& m : profile.links) {
    CHECK((m.op == comm::Op::send || m.op == comm::Op::recv));
    CHECK(m.bytes == 1 << 20);
    CHECK(m.seconds == Approx(0.003));
  }
}

TEST_CASE("GEMMs in other shapes are timed and put in relation to the window's", "[advice]") {
  KernelsConfig kernels;
  planner::GemmTimes times(kernels, 1);
  const auto key = [](const char* op, int64_t rows, int64_t columns, int64_t inner) {
    return CallKey{.op = op, .gemm = {rows, columns, inner}};
  };
  const auto call = [](const CallKey& k) {
    ops::Cost cost;
    cost.work = ops::Work::gemm;
    cost.operands = k.operands;
    cost.gemm = k.gemm;
    cost.flops = 2.0 * static_cast<double>(k.gemm[0] * k.gemm[1] * k.gemm[2]);
    return ops::Call{.op = k.op.c_str(), .cost = cost};
  };
  const CallKey few = key("linear_forward", 16, 128, 96), many = key("linear_forward", 64, 128, 96);
  for (const CallKey& k :
       {few, many, key("linear_backward_data", 16, 96, 128), key("linear_backward_weight", 128, 96, 16)}) {
    CHECK(times.of(k) > 0);
    CHECK(times.of(k) == times.of(k));  // once
  }
  CHECK(times.of(key("norm_forward", 0, 0, 0)) == 0);
  CHECK(times.of(key("linear_forward", 65536, 4096, 4096)) == 0);  // too long

  machine::Profile profile;
  const ops::Call wanted[] = {call(many), call(few), call(key("attention_forward", 0, 0, 0))};
  CHECK_FALSE(planner::add_gemms(wanted, times, profile));  // nothing to relate it to
  profile.calls = {{.key = few, .work = ops::Work::gemm, .flops = 1, .seconds = 3 * times.of(few)}};
  REQUIRE(planner::add_gemms(wanted, times, profile));
  REQUIRE(profile.calls.size() == 2);
  CHECK(profile.calls[1].key == many);
  CHECK(profile.calls[1].seconds == Approx(3 * times.of(many)));
  CHECK_FALSE(planner::add_gemms(wanted, times, profile));
}

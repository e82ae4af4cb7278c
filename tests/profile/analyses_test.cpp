// Operations, memory, communication and ranks of windows of known answers.

#include "apps/profile/analyses.h"

#include <vector>

#include "apps/profile/analyze.h"
#include "memory/plan.h"
#include "tests/catch.h"
#include "tests/profile/synthetic.h"

using namespace nrl;
using namespace nrl::test;
using memory::Category;
using profile::Bound;
using trace::Kind;

namespace {

constexpr int64_t us = Synthetic::us;

}  // namespace

TEST_CASE("operations have their own time, cost and limit", "[profile]") {
  Synthetic s(2);
  for (int step = 0; step < 2; ++step) {
    const size_t layer = s.open("layer_0", Kind::layer);
    const size_t gemm =
        s.open("linear_forward", Kind::op, s.cost(30'000, 4'000, 6'000));  // 30 us at 1 GFLOP/s
    s.idle(40 * us);
    s.range("activation_forward", Kind::op, 12 * us, s.cost(0, 8'000, 2'000));  // 10 us at 1 GB/s
    s.close(gemm);
    s.range("linear_forward", Kind::op, 20 * us, s.cost(30'000, 4'000, 6'000, DType::bf16));
    s.close(layer);
    const size_t head = s.open("loss_computation", Kind::phase);
    s.range("linear_forward", Kind::op, 50 * us, s.cost(10'000, 20'000, 20'000));
    s.close(head);
    s.end_step();
  }
  const auto all = profile::analyze(s.recorded).operations;
  REQUIRE(all.size() == 3);
  CHECK(all[0].part == "layer GEMMs, forward");
  CHECK(all[0].calls == 2);
  CHECK(all[0].seconds == Approx(60e-6));
  CHECK(all[0].shortest == Approx(20e-6));
  CHECK(all[0].longest == Approx(40e-6));
  CHECK(all[0].attainable == Approx(45e-6));
  CHECK(all[0].arithmetic == Approx(45e-6));
  CHECK(all[0].flops == 60'000);
  CHECK(all[0].bytes == 20'000);
  CHECK(all[0].written == 12'000);
  CHECK(all[0].bound == Bound::arithmetic);
  CHECK(all[1].part == "head GEMM, forward");
  CHECK(all[1].lost() == Approx(10e-6));
  CHECK(all[1].bound == Bound::memory);
  CHECK(all[1].attainable == Approx(40e-6));
  CHECK(all[1].arithmetic == Approx(10e-6));
  CHECK(all[2].part == "activation, forward");
  CHECK(all[2].lost() == Approx(2e-6));

  std::vector<profile::Operation> twice = all;
  twice.insert(twice.end(), all.begin(), all.end());
  const auto merged = profile::merge_operations(twice);
  REQUIRE(merged.size() == 3);
  CHECK(merged[0].calls == 4);
  CHECK(merged[0].seconds == Approx(120e-6));
  CHECK(merged[0].longest == Approx(40e-6));
}

TEST_CASE("the peak of memory is the planned one to the byte", "[profile]") {
  memory::MemoryPlan plan;
  (void)plan.add("weights", Category::weights, 1024);
  (void)plan.add("a", Category::activations, 512, {{0, 2}});
  (void)plan.add("b", Category::activations, 768, {{1, 1}, {4, 5}});
  (void)plan.add("scratch", Category::workspace, 256, {{2, 4}});
  (void)plan.add("kept on the host", Category::activations, 1 << 20, {{0, 5}}, memory::Tier::host);
  plan.solve();
  Synthetic s;
  s.recorded.buffers = plan.buffers();
  s.recorded.arena_bytes = plan.bytes(memory::Tier::device);
  s.idle(10 * us);
  for (const int32_t tick : {0, 1, 2, 5}) {  // 3 and 4 have no event: they begin with 5
    const size_t op = s.open("norm_forward", Kind::op, trace::no_call, tick);
    s.idle(10 * us);
    s.close(op);
  }
  s.end_step();
  const profile::MemoryUse m = profile::analyze(s.recorded).memory;
  CHECK(m.peak == 1024 + 512 + 768);
  CHECK(m.peak_at == Approx(20e-6));
  CHECK(m.arena == s.recorded.arena_bytes);
  CHECK(m.buffers == 4);
  CHECK(m.intervals == 5);
  REQUIRE(m.at_peak.size() == 3);
  CHECK(m.at_peak[0].name == "weights");
  CHECK(m.at_peak[0].from == 0);
  CHECK(m.at_peak[0].to == Approx(50e-6));
  CHECK(m.at_peak[1].name == "b");
  CHECK(m.at_peak[1].from == Approx(20e-6));
  CHECK(m.at_peak[1].to == Approx(30e-6));
  CHECK(m.at_peak[2].name == "a");
  // weights: 50 us; a: 30 us; b: 10 + 10 us; scratch: 10 us (ticks 2 to 4, of which 3 and 4 take no time).
  CHECK(static_cast<double>(m.mean) == Approx((1024 * 50 + 512 * 30 + 768 * 20 + 256 * 10) / 50.0).margin(1));
  REQUIRE(m.curve.size() == 6);
  CHECK(m.curve[2].second[static_cast<size_t>(Category::activations)] == 512 + 768);
}

TEST_CASE("communication by group and operation", "[profile]") {
  Synthetic s(2);
  for (int step = 0; step < 2; ++step) {
    s.collective(10 * us, 30 * us);
    s.collective(0, 20 * us);
    s.receive(5 * us, 5 * us);
    s.end_step();
  }
  const profile::RankProfile rank = profile::analyze(s.recorded);
  REQUIRE(rank.groups.size() == 2);
  const profile::GroupTime& dp = rank.groups[0];
  CHECK(dp.group == "dp");
  CHECK(dp.operation == "all_reduce");
  CHECK(dp.ranks == 2);
  CHECK(dp.calls == 2);
  CHECK(dp.bytes == 8000);
  CHECK(dp.wire_bytes == Approx(8000));  // 2 (n - 1) / n of the bytes
  CHECK(dp.busy == Approx(60e-6));
  CHECK(dp.late == Approx(10e-6));
  CHECK(dp.wire == Approx(50e-6));
  CHECK(dp.exposed == Approx(60e-6));
  CHECK(rank.groups[1].operation == "recv");
  // This rank was the last one in the second collective of each step.
  CHECK(rank.arrived_last == 2);
  CHECK(rank.caused_waiting == 0);
  s.recorded.waited[1] = 7 * us;
  CHECK(profile::analyze(s.recorded).caused_waiting == Approx(7e-6));
}

TEST_CASE("a straggler is known by its own work", "[profile]") {
  profile::Profile all;
  std::vector<profile::RankProfile>& ranks = all.ranks;
  ranks.resize(3);
  for (int r = 0; r < 3; ++r) {
    ranks[r].rank = r;
    ranks[r].split = {.wall = 100, .compute = 60};
    ranks[r].split.wire = 40;
  }
  ranks[1].split = {.wall = 100, .compute = 62, .data = 28};
  ranks[1].split.wire = 10;
  const auto s = profile::standings(all);
  CHECK(s[0].score == 1);
  CHECK(s[0].severity == profile::Severity::low);
  CHECK(s[0].longer == nullptr);
  CHECK(s[1].score == Approx(60.0 / 90));
  CHECK(s[1].severity == profile::Severity::high);
  CHECK(std::string(s[1].longer) == "data");
  CHECK(s[1].longer_s == 28);
  ranks[1].split.data = 20;
  ranks[1].split.wire = 18;
  CHECK(profile::standings(all)[1].severity == profile::Severity::medium);
  const profile::Profile merged = profile::merge({ranks[2], ranks[1], ranks[0]}, {});
  CHECK(merged.ranks[0].rank == 0);
  CHECK(merged.split.data == 20);
}

TEST_CASE("ranks of different pipeline stages have different work", "[profile]") {
  profile::Profile all;
  all.ranks.resize(4);
  for (int r = 0; r < 4; ++r) all.ranks[r].split = {.wall = 100, .compute = 50};
  all.ranks[2].split = all.ranks[3].split = {.wall = 100, .compute = 100};
  for (int r = 0; r < 4; ++r) all.ranks[r].split.imbalance = 100 - all.ranks[r].split.compute;
  CHECK(profile::standings(all)[3].score == 0.5);
  all.facts.stages = 2;
  CHECK(profile::standings(all)[3].score == 1);
  CHECK(profile::stage_work(all) == std::vector<double>{50, 100});
  all.facts.stages = 3;  // of a damaged file
  CHECK(profile::stage_work(all) == std::vector<double>{75});
}

TEST_CASE("the latency of a group is the time of its small operations", "[profile]") {
  Synthetic s;
  s.recorded.peaks.link = 2e9;
  s.recorded.peaks.network = 1e9;
  for (const int64_t wire : {40, 30, 90}) s.collective(5 * us, wire * us);
  s.recorded.messages.back().bytes = 1 << 20;
  s.end_step();
  const profile::RankProfile rank = profile::analyze(s.recorded);
  CHECK(rank.groups.at(0).latency == Approx(35e-6));
  CHECK(rank.groups.at(0).link == 2e9);
  s.recorded.groups[0].nodes = 2;
  CHECK(profile::analyze(s.recorded).groups.at(0).link == 1e9);
}

TEST_CASE("operations by layer", "[profile]") {
  Synthetic s;
  for (const int16_t layer : {0, 1, 0}) {
    const size_t visit = s.open(layer == 0 ? "embedding" : "layer 0", trace::Kind::layer);
    s.recorded.window.events[visit].tag.layer = layer;
    for (const int64_t length : {10, 20}) {
      const size_t op = s.range("linear_forward", trace::Kind::op, length * us, s.cost(1e4, 1, 1));
      s.recorded.window.events[op].tag.layer = layer;
    }
    s.close(visit);
  }
  s.range("adamw", trace::Kind::op, 5 * us);
  s.end_step();
  const profile::Profile p = profile::merge({profile::analyze(s.recorded)}, {});
  REQUIRE(p.layers.size() == 3);
  CHECK(p.layers[0].name == "embedding");
  CHECK(p.layers[0].calls == 4);
  CHECK(p.layers[0].seconds == Approx(60e-6));
  CHECK(p.layers[0].attainable == Approx(40e-6));
  CHECK(p.layers[1].name == "layer 0");
  CHECK(p.layers[2].name == "no layer");
  CHECK(p.layers[2].seconds == Approx(5e-6));
}

TEST_CASE("reading counts on all threads", "[profile]") {
  Synthetic s(2);
  for (int step = 0; step < 2; ++step) {
    s.range("data", trace::Kind::data, 10 * us);
    s.range("read samples", trace::Kind::data, 30 * us);
    s.recorded.window.events.back().row = 1;
    s.end_step();
  }
  s.recorded.counters.starved = 8;
  CHECK(profile::analyze(s.recorded).read_seconds == Approx(30e-6));
  CHECK(profile::analyze(s.recorded).starved == 4);
}

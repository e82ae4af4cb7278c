#include <algorithm>

#include "core/base/philox.h"
#include "tests/catch.h"
#include "tests/pipeline/legal.h"

using namespace nrl;
using namespace nrl::pipeline;

namespace {

using Kind = ActionKind;

/// Costs without a pattern, all chunks different.
Costs random_costs(const ScheduleOptions& o, uint64_t seed = 7) {
  const PhiloxStream stream(seed, "costs");
  Costs out;
  for (int chunk = 0; chunk < o.stages * o.chunks_per_stage; ++chunk) {
    const auto cost = [&](uint64_t which) {
      return 1 + stream.bits(4 * static_cast<uint64_t>(chunk) + which) % 9;
    };
    out.push_back({static_cast<double>(cost(0)), static_cast<double>(cost(1)), static_cast<double>(cost(2)),
                   static_cast<double>(cost(3))});
  }
  return out;
}

/// Time in which the busiest stage does not compute.
double idle(const Simulation& s) {
  return *std::min_element(s.bubble.begin(), s.bubble.end()) * s.makespan;
}

Schedule& remove(Schedule& s, Kind kind, int microbatch) {
  const auto found = std::find_if(s.actions.begin(), s.actions.end(), [&](const Action& a) {
    return a.kind == kind && a.microbatch == microbatch;
  });
  REQUIRE(found != s.actions.end());
  s.actions.erase(found);
  return s;
}

}  // namespace

TEST_CASE("no schedule deadlocks, and stashes are minimal", "[simulate]") {
  for (const ScheduleKind kind : all_kinds)
    for (const ScheduleOptions& o : all_options(kind)) {
      INFO(text(o));
      const std::vector<Schedule> stages = all_stages(o);
      for (const Costs& costs : {Costs{{}}, random_costs(o)}) {
        const Simulation s = simulate(stages, costs);
        REQUIRE(s.deadlock == "");
        size_t actions = 0;
        for (const Schedule& list : stages) actions += list.actions.size();
        REQUIRE(s.order.size() == actions);
        REQUIRE(s.visits <= 3 * actions);
        for (size_t stage = 0; stage < stages.size(); ++stage)
          if (o.group == 0 && s.peak_stashes[stage] != stages[stage].stashes.counts())
            CHECK(s.peak_stashes[stage] == stages[stage].stashes.counts());
      }
    }
}

TEST_CASE("bubbles are the published ones", "[simulate]") {
  for (const ChunkCosts& c :
       {ChunkCosts{1, 1, 1}, ChunkCosts{2, 3, 2}, ChunkCosts{2, 3, 1}, ChunkCosts{3, 3, 3}}) {
    const Costs costs{c};
    const double f = c.forward, d = c.backward_data, w = c.backward_weight, b = d + w;
    for (const ScheduleOptions& o : sizes(ScheduleKind::one_f_one_b)) {
      INFO(text(o));
      const int p = o.stages, n = o.microbatches;
      for (const double bubble : simulate(all_stages(o), costs).bubble)
        CHECK(bubble == (p - 1) * (f + b) / (n * (f + b) + (p - 1) * (f + b)));
    }
    for (const ScheduleOptions& o : sizes(ScheduleKind::interleaved)) {
      INFO(text(o));
      // Costs are those of a chunk, a V-th of a stage. Where N < P, a chunk waits for the ones before it.
      const int p = o.stages, v = o.chunks_per_stage, n = o.microbatches;
      const double waits = p - 1 + (v - 1) * std::max(0, p - n);
      for (const double bubble : simulate(all_stages(o), costs).bubble)
        CHECK(bubble == waits * (f + b) / (n * v * (f + b) + waits * (f + b)));
    }
    for (const ScheduleOptions& o : sizes(ScheduleKind::zb_h1)) {
      INFO(text(o));
      const int p = o.stages, n = o.microbatches;
      const Simulation s = simulate(all_stages(o), costs);
      // (P-1)(f+d-w) of the paper, with too few microbatches for all late weight parts otherwise.
      const double late = std::min(n, p) - 1;
      CHECK(s.makespan == n * (f + b) + (p - 1) * (f + d) - late * w);
      const Simulation plain = simulate(all_stages({ScheduleKind::one_f_one_b, p, 1, n}), costs);
      if (p > 1) CHECK(idle(s) < idle(plain));
    }
    for (const ScheduleOptions& o : sizes(ScheduleKind::forward_only)) {
      if (o.microbatches % o.stages != 0) continue;
      INFO(text(o));
      CHECK(simulate(all_stages(o), costs).makespan ==
            f * (o.microbatches * o.chunks_per_stage + o.stages - 1));
    }
  }
}

TEST_CASE("messages take time, one after the other on a FIFO", "[simulate]") {
  const Costs costs{{1, 1, 1, 1}};
  CHECK(simulate(all_stages({ScheduleKind::one_f_one_b, 2, 1, 1}), costs).makespan == 8);
  // Sent at 1 and 2, arrived at 6 and 11.
  CHECK(simulate(all_stages({ScheduleKind::forward_only, 2, 1, 2}), Costs{{1, 1, 1, 5}}).makespan == 12);
  // By chunk of the model: F 1, 3; message 4; B 6, 2; message 5.
  CHECK(simulate(all_stages({ScheduleKind::one_f_one_b, 2, 1, 1}), Costs{{1, 1, 1, 4}, {3, 2, 4, 5}})
            .makespan == 21);
}

TEST_CASE("the first and the last microbatch may have costs of their own", "[simulate]") {
  const auto makespan = [](const ScheduleOptions& o, const MicrobatchCosts& costs) {
    return simulate(all_stages(o), costs).makespan;
  };
  const Costs middle{{1, 2, 3}}, first{{10, 20, 30}}, last{{100, 200, 300}};
  const ScheduleOptions one{.microbatches = 1}, three{.microbatches = 3};
  CHECK(makespan(three, {first, middle, last}) == 60 + 6 + 600);
  CHECK(makespan(one, {first, middle, last}) == 10 + 200 + 300);
  // Two stages: F 10, 1, 100 of the first one; messages of the last microbatch take 7.
  const Costs late{{100, 0, 0, 7}}, early{{10, 0, 0}}, between{{1, 0, 0}};
  CHECK(makespan({ScheduleKind::forward_only, 2, 1, 3}, {early, between, late}) == 111 + 7 + 100);
  for (const ScheduleOptions& o : sizes(ScheduleKind::interleaved)) {
    const Costs costs = random_costs(o);
    CHECK(makespan(o, {costs, costs, costs}) == simulate(all_stages(o), costs).makespan);
  }
}

TEST_CASE("makespans alone are those of simulations, and have a lower bound", "[simulate]") {
  size_t equal = 0, all = 0;
  for (const ScheduleKind kind : all_kinds)
    for (const ScheduleOptions& o : all_options(kind))
      for (const uint64_t seed : {1, 2, 3}) {
        INFO(text(o));
        const MicrobatchCosts costs{random_costs(o, 3 * seed), random_costs(o, 3 * seed + 1),
                                    random_costs(o, 3 * seed + 2)};
        const std::vector<Schedule> stages = all_stages(o);
        const double seconds = makespan(stages, costs);
        REQUIRE(seconds == simulate(stages, costs).makespan);
        if (kind == ScheduleKind::forward_only) continue;
        const double least = least_makespan(o, costs);
        REQUIRE(least <= seconds);
        ++all;
        if (least == seconds) ++equal;
      }
  CHECK(equal > all / 20);
  // Stages with equal passes and many microbatches have no other bubble.
  for (const ScheduleOptions& o : sizes(ScheduleKind::one_f_one_b)) {
    const Costs costs{{1, 2, 3}};
    CHECK(least_makespan(o, {costs, costs, costs}) == simulate(all_stages(o), costs).makespan);
  }
  std::vector<Schedule> stages = all_stages({ScheduleKind::one_f_one_b, 2, 1, 2});
  remove(stages[1], Kind::receive_forward, 0);
  CHECK_THROWS(makespan(stages, {{{}}, {{}}, {{}}}));
}

TEST_CASE("a stage computes one pass at a time, for its costs", "[simulate]") {
  for (const ScheduleKind kind : all_kinds)
    for (const ScheduleOptions& o : sizes(kind)) {
      const std::vector<Schedule> stages = all_stages(o);
      const Costs costs = random_costs(o);
      std::vector<double> now(stages.size(), 0);
      for (const Simulation::Completed& c : simulate(stages, costs).order) {
        const Action& a = stages[c.stage].actions[c.action];
        const ChunkCosts& cost = costs[a.chunk * o.stages + c.stage];
        REQUIRE(c.begin >= now[c.stage]);
        now[c.stage] = c.end;
        REQUIRE(c.end - c.begin == (a.kind == Kind::forward    ? cost.forward
                                    : a.kind == Kind::backward ? cost.backward_data + cost.backward_weight
                                    : a.kind == Kind::backward_data   ? cost.backward_data
                                    : a.kind == Kind::backward_weight ? cost.backward_weight
                                                                      : 0));
      }
    }
}

TEST_CASE("wrong lists end in an explained deadlock", "[simulate]") {
  const ScheduleOptions o{ScheduleKind::one_f_one_b, 2, 1, 3};
  const auto deadlock = [&](auto&& change) {
    std::vector<Schedule> stages = all_stages(o);
    REQUIRE(simulate(stages, Costs{{}}).deadlock == "");
    change(stages);
    return simulate(stages, Costs{{}}).deadlock;
  };
  SECTION("a receive out of order") {
    CHECK(deadlock([](auto& s) {
            for (Action& a : s[1].actions)
              if (a.kind == Kind::receive_forward && a.microbatch < 2) a.microbatch = 1 - a.microbatch;
          }) ==
          "stage 0 waits at action 4, receive_backward(chunk 0, microbatch 0); stage 1 waits at action 0, "
          "receive_forward(chunk 0, microbatch 1); the next message to stage 1 is the input of chunk 0, "
          "microbatch 0");
  }
  SECTION("each waits for the other") {
    CHECK_THAT(
        deadlock([](auto& s) {
          auto& first = s[0].actions;
          const auto received = std::find_if(
              first.begin(), first.end(), [](const Action& a) { return a.kind == Kind::receive_backward; });
          std::rotate(first.begin(), received, received + 1);
        }),
        ContainsSubstring("stage 0 waits at action 0, receive_backward(chunk 0, microbatch 0); stage 1 "
                          "waits at action 0, receive_forward(chunk 0, microbatch 0)"));
  }
  SECTION("a send is missing") {
    CHECK_THAT(deadlock([](auto& s) { remove(remove(s[0], Kind::send_forward, 2), Kind::finish_send, 2); }),
               ContainsSubstring("receive_forward(chunk 0, microbatch 2)"));
  }
  SECTION("a send is finished before the other stage can receive it") {
    CHECK_THAT(deadlock([](auto& s) {
                 // Stage 1 receives microbatch 1 only after it has sent the gradient of microbatch 0, and
                 // waits until stage 0 has received that.
                 auto& first = s[0].actions;
                 auto& second = s[1].actions;
                 remove(s[0], Kind::finish_send, 1);
                 const auto sent = std::find_if(first.begin(), first.end(), [](const Action& a) {
                   return a.kind == Kind::send_forward && a.microbatch == 1;
                 });
                 first.insert(sent + 1, {Kind::finish_send, 0, 1, 1});
                 remove(s[1], Kind::finish_send, 0);
                 const auto back = std::find_if(second.begin(), second.end(), [](const Action& a) {
                   return a.kind == Kind::send_backward;
                 });
                 second.insert(back + 1, {Kind::finish_send, 0, 0, 0});
               }),
               ContainsSubstring("finish_send(chunk 0, microbatch 1)"));
  }
  SECTION("a backward without its forward, a weight part before its data part") {
    CHECK_THAT(deadlock([](auto& s) { remove(s[1], Kind::forward, 0); }),
               ContainsSubstring("stage 1 waits at action 1, receive_backward") ||
                   ContainsSubstring("stage 1 waits at action 1, backward(chunk 0, microbatch 0)"));
    CHECK_THAT(deadlock([](auto& s) { s[1].actions.insert(s[1].actions.begin(), {Kind::backward_weight}); }),
               ContainsSubstring("stage 1 waits at action 0, backward_weight(chunk 0, microbatch 0)"));
  }
  SECTION("a message that nobody receives") {
    std::vector<Schedule> stages = all_stages({ScheduleKind::forward_only, 2});
    remove(stages[0], Kind::finish_send, 0);
    stages[1].actions.clear();
    CHECK(simulate(stages, Costs{{}}).deadlock ==
          "the next message to stage 1 is the input of chunk 0, microbatch 0");
  }
}

TEST_CASE("a merged schedule has the order of the simulation", "[simulate]") {
  const std::vector<Schedule> stages = all_stages({ScheduleKind::one_f_one_b, 2, 1, 2});
  const Schedule merged = merge(stages, simulate(stages, Costs{{}}));
  CHECK(merged.stashes.counts() == std::vector<int>{2, 1});
  CHECK(merged.actions == std::vector<Action>{{Kind::forward, 0, 0, 0},
                                              {Kind::receive_forward, 1, 0, 0},
                                              {Kind::forward, 0, 1, 1},
                                              {Kind::forward, 1, 0, 0},
                                              {Kind::backward, 1, 0, 0},
                                              {Kind::receive_backward, 0, 0, 0},
                                              {Kind::receive_forward, 1, 1, 0},
                                              {Kind::forward, 1, 1, 0, true},
                                              {Kind::backward, 0, 0, 0},
                                              {Kind::backward, 1, 1, 0, true},
                                              {Kind::receive_backward, 0, 1, 1},
                                              {Kind::backward, 0, 1, 1, true},
                                              {Kind::finish_reduce},
                                              {Kind::step}});
}

TEST_CASE("merged schedules obey the rules of one rank with all chunks", "[simulate]") {
  for (const ScheduleKind kind : all_kinds)
    for (const ScheduleOptions& o : sizes(kind)) {
      INFO(text(o));
      const std::vector<Schedule> stages = all_stages(o);
      for (const Costs& costs : {Costs{{}}, random_costs(o)}) {
        const Schedule merged = merge(stages, simulate(stages, costs));
        const ScheduleOptions whole{kind, 1, o.stages * o.chunks_per_stage, o.microbatches};
        const std::string wrong = violation(merged, whole, 0, kind != ScheduleKind::forward_only);
        if (!wrong.empty()) FAIL(wrong);
        CHECK(simulate(std::vector<Schedule>{merged}, Costs{{}}).deadlock == "");
      }
    }
}

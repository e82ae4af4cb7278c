#include <algorithm>

#include "core/base/error.h"
#include "tests/catch.h"
#include "tests/pipeline/legal.h"

using namespace nrl;
using namespace nrl::pipeline;

namespace {

/// A new schedule needs this function, an enumerator and a row of the table; here GPipe.
std::vector<Action> gpipe(const ScheduleOptions& o) {
  std::vector<Action> out;
  for (int m = 0; m < o.microbatches; ++m) out.push_back({ActionKind::forward, 0, m});
  for (int m = 0; m < o.microbatches; ++m) out.push_back({ActionKind::backward, 0, m});
  return out;
}

std::vector<int> all_stashes(const std::vector<Schedule>& stages) {
  std::vector<int> out;
  for (const Schedule& s : stages)
    out.insert(out.end(), s.stashes.counts().begin(), s.stashes.counts().end());
  return out;
}

}  // namespace

TEST_CASE("schedules obey the rules for all sizes", "[schedule]") {
  for (const ScheduleKind kind : all_kinds)
    for (const ScheduleOptions& o : all_options(kind))
      for (int stage = 0; stage < o.stages; ++stage) {
        INFO(text(o) << " stage " << stage);
        const std::string wrong =
            violation(make_schedule(o, stage), o, stage, kind != ScheduleKind::forward_only);
        if (!wrong.empty()) FAIL(wrong);
      }
}

TEST_CASE("one stage runs each microbatch's backward after its forward", "[schedule]") {
  const Schedule s = make_schedule({.microbatches = 2}, 0);
  CHECK(s.actions == std::vector<Action>{{ActionKind::forward, 0, 0, 0},
                                         {ActionKind::backward, 0, 0, 0},
                                         {ActionKind::forward, 0, 1, 0, true},
                                         {ActionKind::backward, 0, 1, 0, true},
                                         {ActionKind::finish_reduce},
                                         {ActionKind::step}});
  CHECK(s.stashes.counts() == std::vector<int>{1});
  // Chunks of one rank exchange by copies.
  CHECK(make_schedule({.chunks_per_stage = 2}, 0).actions ==
        std::vector<Action>{{ActionKind::forward, 0},
                            {ActionKind::receive_forward, 1, 0, 1},
                            {ActionKind::forward, 1, 0, 1, true},
                            {ActionKind::backward, 1, 0, 1, true},
                            {ActionKind::receive_backward, 0},
                            {ActionKind::backward, 0, 0, 0, true},
                            {ActionKind::finish_reduce},
                            {ActionKind::step}});
}

TEST_CASE("1f1b keeps min(N, P - p) stashes, zb_h1 never more than min(N, P)", "[schedule]") {
  for (const ScheduleOptions& o : sizes(ScheduleKind::one_f_one_b)) {
    INFO(text(o));
    std::vector<int> expected;
    for (int stage = 0; stage < o.stages; ++stage)
      expected.push_back(std::min(o.microbatches, o.stages - stage));
    CHECK(all_stashes(all_stages(o)) == expected);
  }
  for (const ScheduleOptions& o : sizes(ScheduleKind::zb_h1)) {
    INFO(text(o));
    for (const int stashes : all_stashes(all_stages(o))) CHECK(stashes <= std::min(o.microbatches, o.stages));
  }
}

TEST_CASE("interleaved 1f1b holds Megatron-LM's number of stashes", "[schedule]") {
  // The warm-up of a stage and one more, over all its chunks.
  for (const ScheduleOptions& o : sizes(ScheduleKind::interleaved)) {
    if (o.microbatches % o.stages != 0) continue;
    INFO(text(o));
    for (int stage = 0; stage < o.stages; ++stage) {
      const int in_flight = std::min(o.microbatches * o.chunks_per_stage,
                                     2 * (o.stages - 1 - stage) + (o.chunks_per_stage - 1) * o.stages + 1);
      CHECK(make_schedule(o, stage).stashes.counts() == std::vector<int>{in_flight});
    }
  }
  for (const int p : {8, 16})
    for (const int v : {2, 3, 8})
      for (const int stage : {0, p / 2, p - 1}) {
        const ScheduleOptions o{ScheduleKind::interleaved, p, v, 4 * p};
        INFO(text(o) << " stage " << stage);
        CHECK(make_schedule(o, stage).stashes.count(0) == 2 * (p - 1 - stage) + (v - 1) * p + 1);
      }
}

namespace {

/// The most items of each pool whose activations are held at once, from the passes alone: from a forward
/// pass, or the pass before it if the input is received then, to the last backward pass.
std::vector<int> most_in_flight(const Schedule& s, int stage, const ScheduleOptions& o) {
  std::vector<Action> passes;
  for (const Action& a : s.actions)
    if (a.kind == ActionKind::forward || a.kind == ActionKind::backward ||
        a.kind == ActionKind::backward_data || a.kind == ActionKind::backward_weight)
      passes.push_back(a);
  std::vector<int> live(s.stashes.counts().size()), most = live;
  const auto begins = [&](size_t i) { return i < passes.size() && passes[i].kind == ActionKind::forward; };
  const auto early = [&](size_t i) {
    return o.overlap_messages && i > 0 && (stage > 0 || passes[i].chunk > 0);
  };
  const auto add = [&](size_t i) {
    const int pool = s.stashes.pool(passes[i].chunk);
    most[pool] = std::max(most[pool], ++live[pool]);
  };
  for (size_t i = 0; i < passes.size(); ++i) {
    if (begins(i) && !early(i)) add(i);
    if (begins(i + 1) && early(i + 1)) add(i + 1);
    if (passes[i].kind == ActionKind::backward || passes[i].kind == ActionKind::backward_weight)
      --live[s.stashes.pool(passes[i].chunk)];
  }
  return most;
}

}  // namespace

TEST_CASE("a pool has a stash for every microbatch in flight and no other", "[schedule]") {
  for (const ScheduleKind kind : all_kinds) {
    if (kind == ScheduleKind::forward_only) continue;
    for (ScheduleOptions o : all_options(kind))
      for (const bool mixed : {false, true}) {
        // Every third chunk has other blocks.
        if (mixed && o.chunks_per_stage == 1) continue;
        for (int c = 0; mixed && c < o.chunks_per_stage; ++c) o.pools.push_back(c % 3 == 1 ? 1 : 0);
        for (int stage = 0; stage < o.stages; ++stage) {
          INFO(text(o) << " stage " << stage << (mixed ? " mixed" : ""));
          const Schedule s = make_schedule(o, stage);
          // Long groups delay gradients to the last stage (complete.cpp).
          if (stage > 0 || o.group < 2 * o.stages) CHECK(s.stashes.counts() == most_in_flight(s, stage, o));
          const std::string wrong = violation(s, o, stage, true);
          if (!wrong.empty()) FAIL(wrong);
        }
      }
  }
}

TEST_CASE("groups of microbatches have the given size, and a rest that fills the pipeline", "[schedule]") {
  const ScheduleOptions o{ScheduleKind::interleaved, 2, 2, 8, 3};
  std::vector<std::pair<int, int>> order;
  for (const Action& a : make_schedule(o, 0).actions)
    if (a.kind == ActionKind::forward) order.emplace_back(a.chunk, a.microbatch);
  const std::vector<std::pair<int, int>> groups{{0, 0}, {0, 1}, {0, 2}, {1, 0}, {1, 1}, {1, 2},
                                                {0, 3}, {0, 4}, {0, 5}, {1, 3}, {1, 4}, {1, 5},
                                                {0, 6}, {0, 7}, {1, 6}, {1, 7}};
  CHECK(order == groups);
  for (const auto& [stages, microbatches, group] : {std::tuple(4, 8, 3), {2, 4, 5}, {4, 9, 8}, {2, 7, 3}}) {
    const ScheduleOptions bad{ScheduleKind::interleaved, stages, 2, microbatches, group};
    INFO(text(bad));
    CHECK_THROWS_WITH(make_schedule(bad, 0), ContainsSubstring("microbatch_group_size_per_vp_stage"));
  }
}

TEST_CASE("with overlap every message is posted a pass before it is needed", "[schedule]") {
  const auto pass = [](const Action& a) {
    return a.kind == ActionKind::forward || a.kind == ActionKind::backward ||
           a.kind == ActionKind::backward_data || a.kind == ActionKind::backward_weight;
  };
  for (const ScheduleKind kind : {ScheduleKind::one_f_one_b, ScheduleKind::interleaved, ScheduleKind::zb_h1})
    for (ScheduleOptions o : sizes(kind)) {
      if (o.stages == 1) continue;
      for (int stage = 0; stage < o.stages; ++stage) {
        INFO(text(o) << " stage " << stage);
        o.overlap_messages = false;
        const Schedule plain = make_schedule(o, stage);
        o.overlap_messages = true;
        const Schedule s = make_schedule(o, stage);
        const auto is_post = [](const Action& a) {
          return a.kind == ActionKind::post_forward || a.kind == ActionKind::post_backward;
        };
        CHECK(std::none_of(plain.actions.begin(), plain.actions.end(), is_post));
        // The same passes and messages, with one stash more at most.
        std::vector<std::pair<ActionKind, int>> before, after;
        for (const Action& a : plain.actions)
          if (a.kind != ActionKind::finish_send) before.emplace_back(a.kind, a.microbatch);
        for (const Action& a : s.actions)
          if (a.kind != ActionKind::finish_send && !is_post(a)) after.emplace_back(a.kind, a.microbatch);
        CHECK(before == after);
        CHECK(s.stashes.count(0) >= plain.stashes.count(0));
        CHECK(s.stashes.count(0) <= plain.stashes.count(0) + 1);
        // Only the first receive, and a gradient right after its forward pass, are not posted.
        const Action* last = nullptr;
        std::vector<Action> posted;
        for (size_t i = 0; i < s.actions.size(); ++i) {
          const Action& a = s.actions[i];
          if (pass(a)) last = &a;
          if (is_post(a)) posted.push_back(a);
          if (a.kind != ActionKind::receive_forward && a.kind != ActionKind::receive_backward) continue;
          const bool early = std::any_of(posted.begin(), posted.end(), [&](const Action& p) {
            return (p.kind == ActionKind::post_forward) == (a.kind == ActionKind::receive_forward) &&
                   p.chunk == a.chunk && p.microbatch == a.microbatch;
          });
          const bool own = last && last->kind == ActionKind::forward && last->chunk == a.chunk &&
                           last->microbatch == a.microbatch && a.kind == ActionKind::receive_backward;
          CHECK(early == (last != nullptr && !own));
        }
      }
    }
}

TEST_CASE("evaluation sends one microbatch while it computes the next", "[schedule]") {
  CHECK(all_stashes(all_stages({ScheduleKind::forward_only, 3, 1, 8})) == std::vector<int>{2, 2, 1});
  CHECK(all_stashes(all_stages({ScheduleKind::forward_only, 3, 1, 1})) == std::vector<int>{1, 1, 1});
  CHECK(all_stashes(all_stages({ScheduleKind::forward_only, 2, 2, 8})) == std::vector<int>{2, 2, 2, 1});
  CHECK(all_stashes(all_stages({ScheduleKind::forward_only, 1, 2, 8})) == std::vector<int>{1, 1});
}

TEST_CASE("sizes that a schedule does not support are refused with the reason", "[schedule]") {
  for (const ScheduleKind kind : all_kinds)
    for (int p = 1; p <= 3; ++p)
      for (int v = 1; v <= 3; ++v) {
        const ScheduleOptions o{kind, p, v, 4};
        if (supported(o)) continue;
        INFO(text(o));
        try {
          make_schedule(o, 0);
          FAIL("not refused");
        } catch (const Error& error) {
          CHECK(error.code() == Exit::config);
          CHECK_THAT(std::string(error.what()), ContainsSubstring("Fix: use"));
        }
      }
}

TEST_CASE("a schedule is added by its order of computation alone", "[schedule]") {
  for (const ScheduleOptions& o : sizes(ScheduleKind::one_f_one_b)) {
    INFO("gpipe " << text(o));
    std::vector<Schedule> stages;
    for (int stage = 0; stage < o.stages; ++stage) {
      stages.push_back(complete_schedule(gpipe(o), o, stage));
      const std::string wrong = violation(stages.back(), o, stage, true);
      if (!wrong.empty()) FAIL(wrong);
      CHECK(stages.back().stashes.counts() == std::vector<int>{o.microbatches});
    }
    const Simulation s = simulate(stages, Costs{{}});
    CHECK(s.deadlock == "");
    CHECK(s.makespan == 3 * (o.microbatches + o.stages - 1));
  }
}

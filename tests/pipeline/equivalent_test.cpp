#include "parallel/pipeline/equivalent.h"

#include <algorithm>

#include "tests/catch.h"
#include "tests/pipeline/legal.h"

using namespace nrl;
using namespace nrl::pipeline;

TEST_CASE("a schedule with a period covers the whole one and stops growing", "[schedule]") {
  for (const ScheduleKind kind : all_kinds)
    for (ScheduleOptions o : all_options(kind)) {
      if (o.microbatches != 13 || (o.group > 0 && o.stages > 3)) continue;
      for (const int microbatches : {1, 2, 3, 7, 13, 30, 61, 64}) {
        if (o.overlap_messages && microbatches != 7 && microbatches != 30) continue;
        o.microbatches = microbatches;
        if (!unsupported_reason(o).empty()) continue;
        for (int stage = 0; stage < o.stages; ++stage) {
          INFO(text(o) << " stage " << stage);
          const Schedule whole = make_schedule(o, stage), shorter = shortest_equivalent(o, stage);
          REQUIRE(covers(shorter, whole));
          REQUIRE(unrolled(shorter).actions == whole.actions);
          CHECK(pipeline::microbatches(shorter) == microbatches);
          const auto forwards =
              std::count_if(shorter.actions.begin(), shorter.actions.end(),
                            [](const Action& a) { return a.kind == ActionKind::forward && a.chunk == 0; });
          CHECK(forwards >= std::min(microbatches, 2));
          // Chunks with stashes of many periods need long schedules.
          const int in_flight = std::max(o.stages, whole.stashes.count(0)) + (o.overlap_messages ? 1 : 0);
          if (o.chunks_per_stage == 1) CHECK(forwards <= std::min(microbatches, 4 * in_flight + 3));
        }
      }
    }
}

TEST_CASE("the list of an interleaved schedule stops growing", "[schedule]") {
  int exchanged = 0;
  for (const int stages : {2, 4})
    for (const int chunks : {2, 3, 4, 6, 12})
      for (const int stage : {0, stages - 1}) {
        ScheduleOptions o{ScheduleKind::interleaved, stages, chunks, 128 * stages};
        const Schedule whole = make_schedule(o, stage), shorter = shortest_equivalent(o, stage);
        INFO(text(o) << " stage " << stage);
        REQUIRE(covers(shorter, whole));
        REQUIRE(unrolled(shorter).actions == whole.actions);
        const auto forwards =
            std::count_if(shorter.actions.begin(), shorter.actions.end(),
                          [](const Action& a) { return a.kind == ActionKind::forward && a.chunk == 0; });
        CHECK(forwards <= 12 * stages);
        exchanged += shorter.period.exchanges_stashes ? 1 : 0;
        // The model's first or last chunk has other blocks than the rest.
        o.pools.assign(static_cast<size_t>(chunks), 0);
        (stage == 0 ? o.pools.front() : o.pools.back()) = 1;
        for (int& pool : o.pools) pool = stage == 0 ? 1 - pool : pool;  // numbered in order
        const Schedule ends = make_schedule(o, stage), of_ends = shortest_equivalent(o, stage);
        REQUIRE(covers(of_ends, ends));
        REQUIRE(unrolled(of_ends).actions == ends.actions);
        CHECK(of_ends.actions.size() <= ends.actions.size() / 4);
      }
  CHECK(exchanged > 10);
}

TEST_CASE("a schedule whose last chunk has other blocks has a short list", "[schedule]") {
  // The stashes of the other chunks change places for longer than a list may be.
  for (const int stage : {0, 1}) {
    ScheduleOptions o{ScheduleKind::interleaved, 2, 8, 512};
    o.pools = {0, 0, 0, 0, 0, 0, 0, 1};
    INFO("stage " << stage);
    const Schedule whole = make_schedule(o, stage), shorter = shortest_equivalent(o, stage);
    REQUIRE(covers(shorter, whole));
    REQUIRE(unrolled(shorter).actions == whole.actions);
    CHECK(shorter.actions.size() <= whole.actions.size() / 4);
  }
}

TEST_CASE("schedules of fewer microbatches are those of their number", "[schedule]") {
  for (const ScheduleKind kind : all_kinds)
    for (ScheduleOptions o : all_options(kind)) {
      if (o.microbatches != 13 || o.stages > 2) continue;
      o.microbatches = 8 * o.stages + 14;
      if (!unsupported_reason(o).empty()) o.microbatches = o.stages * 12;
      if (!unsupported_reason(o).empty()) continue;
      for (int stage = 0; stage < o.stages; ++stage) {
        const std::vector<Schedule> fewer = equivalents_of_fewer(o, stage);
        REQUIRE(static_cast<int>(fewer.size()) == o.microbatches - 1);
        for (ScheduleOptions own = o; const Schedule& s : fewer) {
          own.microbatches = static_cast<int>(&s - fewer.data()) + 1;
          INFO(text(own) << " stage " << stage);
          if (!unsupported_reason(own).empty()) {
            CHECK(s.actions.empty());
            continue;
          }
          const Schedule whole = make_schedule(own, stage);
          REQUIRE(unrolled(s).actions == whole.actions);
          REQUIRE(covers(s, whole));
          CHECK(same_but_times(s, s));
        }
      }
    }
}

TEST_CASE("a schedule in which other buffers meet does not cover", "[schedule]") {
  const ScheduleOptions o{ScheduleKind::one_f_one_b, 3, 1, 8};
  const Schedule whole = make_schedule(o, 0);
  CHECK(covers(whole, whole));
  // The stash of microbatch 0 and that of 2 are not in use together.
  ScheduleOptions fewer = o;
  fewer.microbatches = 2;
  CHECK_FALSE(covers(make_schedule(fewer, 0), whole));
  // One gradient is received at another point, beside other stashes.
  Schedule late = whole;
  const auto first = std::find_if(late.actions.begin(), late.actions.end(),
                                  [](const Action& a) { return a.kind == ActionKind::receive_backward; });
  std::rotate(first, first + 1, first + 2);
  CHECK_FALSE(covers(whole, late));
  // A copy between chunks of one rank is a use of both.
  const ScheduleOptions chunks{ScheduleKind::single, 1, 2, 2};
  Schedule copied = make_schedule(chunks, 0);
  CHECK(covers(copied, copied));
  std::erase_if(copied.actions, [](const Action& a) { return a.kind == ActionKind::receive_backward; });
  CHECK_FALSE(covers(copied, make_schedule(chunks, 0)));
}

// From evidence to a verdict, and the culprit of a hang.

#include "parallel/control/verdict.h"

#include <string>
#include <vector>

#include "parallel/control/protocol.h"
#include "tests/catch.h"

using namespace nrl;
using namespace nrl::control;

namespace {

std::string_view name_of_phase(uint8_t phase) {
  return phase == 1 ? "backward" : phase == 2 ? "evaluate" : "forward";
}

Topology four_ranks(int rank = 0) {
  return make_topology(rank, {0, 0, 1, 1});
}

Suspicion suspicion(Evidence evidence, Kind kind, int rank, Nanos when, std::string_view text = "") {
  Suspicion s;
  s.evidence = evidence;
  s.kind = kind;
  s.rank = rank;
  s.when = when;
  s.step = 12;
  s.phase = 1;
  s.text.assign(text);
  return s;
}

Answer working(int rank, bool over_limit, uint8_t phase = 1) {
  Answer a;
  a.rank = rank;
  a.sample.step = 12;
  a.sample.phase = phase;
  a.sample.in_phase = 70_s;
  a.sample.over_limit = over_limit;
  return a;
}

Answer waiting(int rank, uint64_t group, uint64_t sequence, uint32_t ranks, uint32_t operation = 1) {
  Answer a = working(rank, true);
  a.sample.wait.group = group;
  a.sample.wait.sequence = sequence;
  a.sample.wait.ranks = ranks;
  a.sample.wait.operation = operation;
  a.sample.wait.bytes = 4096;
  a.sample.wait.waiting = 61_s;
  a.sample.wait.text.assign(operation == 1 ? "all_reduce of dp" : "all_gather of dp");
  return a;
}

std::optional<Verdict> judge(const std::vector<Answer>& answers) {
  std::vector<int> scratch(answers.size());
  return judge_hang(answers, scratch, four_ranks(), name_of_phase);
}

std::string text_of(const Verdict& v) {
  return std::string(v.text.view());
}

std::vector<int> culprits(const Verdict& v) {
  return {v.culprits().begin(), v.culprits().end()};
}

}  // namespace

TEST_CASE("the tree of leaders reaches every rank once") {
  for (int size : {1, 2, 5, 64, 700})
    for (int per_node : {1, 3, 8}) {
      std::vector<int> nodes, reached(static_cast<size_t>(size));
      for (int r = 0; r < size; ++r) nodes.push_back(100 - r / per_node);  // any numbers
      for (int r = 0; r < size; ++r) {
        const Topology t = make_topology(r, nodes, 4);
        CHECK(t.node_of_rank(r) == r / per_node);
        CHECK(t.leader() == (r % per_node == 0));
        for (size_t i = 0; i < t.links.size(); ++i) {
          const Link& link = t.links[i];
          CHECK(link.up == (i == 0 && r > 0));
          CHECK(link.local == (link.rank / per_node == r / per_node));
          if (!link.up) ++reached[static_cast<size_t>(link.rank)];
        }
        CHECK(t.depth >= 1);
      }
      for (int r = 0; r < size; ++r) CHECK(reached[static_cast<size_t>(r)] == (r > 0 ? 1 : 0));
    }
  CHECK(make_topology(0, std::vector<int>(5, 0), 4).depth == 1);
}

TEST_CASE("the strongest class decides, and within it the earliest") {
  const std::vector<Suspicion> evidence = {
      suspicion(Evidence::secondary, Kind::error, 1, 1_s, "lost rank 2"),
      suspicion(Evidence::rank_silent, Kind::rank_stopped, 3, 2_s),
      suspicion(Evidence::process_exit, Kind::rank_exited, 0, 5_s),
      suspicion(Evidence::process_exit, Kind::rank_killed, 2, 4_s, "by signal 9")};
  const Verdict v = decide(evidence, four_ranks(), {}, name_of_phase, 6_s);
  CHECK(v.kind == Kind::rank_killed);
  CHECK(culprits(v) == std::vector<int>{2});
  CHECK(v.node == 1);
  CHECK(v.exit_code == 80);
  CHECK(v.others().size() == 3);
  CHECK(text_of(v) == "rank 2 (node 1) was killed at step 12 in backward: by signal 9 (2.0 s ago)");
}

TEST_CASE("every kind has its own sentence") {
  StatusSample own;
  own.wait.ranks = 4;
  own.wait.sequence = 5120;
  own.wait.waiting = 9_s;
  own.wait.text.assign("all_reduce of dp");
  const auto text = [&](Evidence e, Kind k, int rank, std::string_view what) {
    const std::vector<Suspicion> one = {suspicion(e, k, rank, 0, what)};
    return text_of(decide(one, four_ranks(), own, name_of_phase, 1_s));
  };
  CHECK(text(Evidence::rank_silent, Kind::rank_stopped, 3, "no heartbeat for 10.0 s") ==
        "rank 3 (node 1) stopped responding at step 12 in backward: no heartbeat for 10.0 s (1.0 s ago). "
        "Rank 0 waits in "
        "all_reduce of dp #5120 since 9.0 s");
  CHECK(text(Evidence::node_silent, Kind::node_lost, 2, "no control traffic for 30.0 s") ==
        "node 1 (ranks 2-3) is unreachable since step 12: no control traffic for 30.0 s (1.0 s ago). Rank 0 "
        "waits in "
        "all_reduce of dp #5120 since 9.0 s");
  CHECK(text(Evidence::error, Kind::error, 1, "x.yaml: disk full. Fix: free some") ==
        "rank 1 (node 0): x.yaml: disk full. Fix: free some");
  for (int k = 1; k <= static_cast<int>(last_kind); ++k) CHECK(!remedy_of(static_cast<Kind>(k)).empty());
}

TEST_CASE("an error keeps its exit code; wrong results have their own") {
  std::vector<Suspicion> one = {suspicion(Evidence::error, Kind::error, 1, 0, "disk full")};
  one[0].exit_code = 74;
  CHECK(decide(one, four_ranks(), {}, name_of_phase, 0).exit_code == 74);
  one[0].kind = Kind::silent_corruption;
  CHECK(decide(one, four_ranks(), {}, name_of_phase, 0).exit_code == 81);
  one[0].kind = Kind::launcher_lost;
  CHECK(decide(one, four_ranks(), {}, name_of_phase, 0).exit_code == 80);
}

TEST_CASE("a rank that does not wait is the culprit of a hang") {
  const auto v = judge({waiting(0, 7, 5, 4), waiting(1, 7, 5, 4), waiting(2, 7, 5, 4), working(3, true)});
  REQUIRE(v);
  CHECK(v->kind == Kind::rank_hung);
  CHECK(culprits(*v) == std::vector<int>{3});
  CHECK(text_of(*v) ==
        "rank 3 (node 1) hangs for 70.0 s at step 12 in backward. ranks 0-2 wait: rank 0 waits in all_reduce "
        "of dp (4096 "
        "B) #5 since 61.0 s");
  const auto two = judge({working(0, true), waiting(1, 7, 5, 4), waiting(2, 7, 5, 4), working(3, true)});
  REQUIRE(two);
  CHECK(culprits(*two) == std::vector<int>{0, 3});
}

TEST_CASE("a rank within its limit excuses all that wait for it") {
  CHECK(!judge({working(0, false, 2), waiting(1, 7, 5, 4), waiting(2, 7, 5, 4), waiting(3, 7, 5, 4)}));
  // The last one has come just now.
  Answer late = waiting(0, 7, 5, 4);
  late.sample.over_limit = 0;
  CHECK(!judge({late, waiting(1, 7, 5, 4), waiting(2, 7, 5, 4), waiting(3, 7, 5, 4)}));
  CHECK(!judge(
      {Answer{}, waiting(1, 7, 5, 4), waiting(2, 7, 5, 4), waiting(3, 7, 5, 4)}));  // one did not answer
}

TEST_CASE("members that call different things are a mismatch") {
  const auto v =
      judge({waiting(0, 7, 77, 2, 1), waiting(1, 7, 77, 2, 2), waiting(2, 8, 5, 2), waiting(3, 8, 5, 2)});
  REQUIRE(v);
  CHECK(v->kind == Kind::mismatch);
  CHECK(culprits(*v) == std::vector<int>{0, 1});
  CHECK_THAT(text_of(*v), ContainsSubstring("ranks disagree on call #77: rank 0 waits in all_reduce of dp"));
  auto sizes = std::vector<Answer>{waiting(0, 7, 77, 2), waiting(1, 7, 77, 2), waiting(2, 8, 5, 2),
                                   waiting(3, 8, 5, 2)};
  sizes[1].sample.wait.bytes = 8;
  CHECK(judge(sizes)->kind == Kind::mismatch);
}

TEST_CASE("a circle of waiting ranks is a mismatch") {
  const auto v = judge({waiting(0, 7, 5, 2), waiting(1, 8, 3, 2), waiting(2, 9, 1, 3), waiting(3, 10, 1, 3)});
  REQUIRE(v);
  CHECK(v->kind == Kind::mismatch);
  CHECK_THAT(text_of(*v), ContainsSubstring("wait for each other"));
}

TEST_CASE("a call that all have entered and none leaves is the network") {
  const auto v = judge({waiting(0, 7, 5, 2), waiting(1, 8, 9, 3), waiting(2, 7, 6, 2), waiting(3, 8, 9, 3)});
  REQUIRE(v);
  CHECK(v->kind == Kind::network);
  CHECK(culprits(*v) == std::vector<int>{0, 2});
}

TEST_CASE("texts are cut at a character") {
  Text<4> text;
  text.assign("ab\xc3\xa9z");
  CHECK(text.view() == "ab\xc3\xa9");
  text.assign("abc\xc3\xa9");
  CHECK(text.view() == "abc");
}

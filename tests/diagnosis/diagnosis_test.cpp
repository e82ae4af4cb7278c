#include "apps/diagnosis/diagnosis.h"

#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::diagnosis;
using comm::LogEntry;
using comm::Op;
using comm::Progress;
using test::contains;

namespace {

constexpr int64_t second = 1'000'000'000;

// Ranks of a run, all alive at 100 s of the clock.
class Fleet {
 public:
  explicit Fleet(int ranks) {
    for (int r = 0; r < ranks; ++r) {
      Rank rank;
      rank.life = Life::alive;
      rank.now_ns = 100 * second;
      rank.flight.identity.rank = r;
      rank.flight.identity.ranks = ranks;
      rank.flight.identity.host = "node" + std::to_string(r / 2);
      rank.flight.phase = status::Phase::computing;
      rank.flight.step = 7;
      list.push_back(rank);
    }
  }
  Rank& operator[](int r) { return list[static_cast<size_t>(r)]; }

  void group(const std::string& name, const std::vector<int>& members) {
    for (const int r : members)
      (*this)[r].flight.groups.push_back({name, name + "[..]", static_cast<int>(members.size()), members});
  }
  /// Issues a collective of the rank's group `g`; `waits`: and waits for it since 90 s.
  LogEntry& call(int r, uint32_t g, Op op, int64_t bytes, bool waits = false) {
    comm::Flight& f = (*this)[r].flight;
    LogEntry e;
    e.id = f.entries.size();
    e.group = g;
    for (const LogEntry& other : f.entries) e.seq += other.group == g ? 1 : 0;
    e.op = op;
    e.dtype = DType::f32;
    e.bytes = bytes;
    e.enqueued_ns = 80 * second;
    e.progress = waits ? Progress::running : Progress::done;
    f.entries.push_back(e);
    if (waits) {
      f.wait_id = e.id;
      f.wait_since_ns = 90 * second;
    }
    return f.entries.back();
  }
  void message(int r, uint32_t g, Op op, int peer, int64_t number, bool waits) {
    LogEntry& e = call(r, g, op, 64, waits);
    e.peer = peer;
    e.lane = 0;
    e.message = number;
  }

  std::vector<Rank> list;
};

}  // namespace

TEST_CASE("a rank that has not begun what the others wait for is named", "[diagnosis]") {
  Fleet fleet(4);
  fleet.group("dp", {0, 1, 2, 3});
  for (int r = 0; r < 4; ++r) fleet.call(r, 0, Op::all_reduce, 4);
  for (const int r : {0, 1, 3}) fleet.call(r, 0, Op::reduce_scatter, 1 << 20, true);
  const Diagnosis d = diagnose(fleet.list);
  CHECK(d.cause == Cause::late);
  CHECK(d.culprits == std::vector<int>{2});
  REQUIRE(d.missing.size() == 1);
  CHECK(d.missing[0].waiting == std::vector<int>{0, 1, 3});
  CHECK(d.missing[0].missing == std::vector<int>{2});
  const std::string text = text_of(d, fleet.list);
  CHECK(contains(text, "cause: rank_hung, rank 2\n"));
  CHECK(contains(
      text, "reduce_scatter #1 of dp[..] (f32, 1.00 MiB): waited for by 0,1,3 for 10.0 s; not begun by 2"));
  CHECK(text.find("rank 2 (node1") < text.find("rank 0 (node0"));
}

TEST_CASE("waits are followed through other groups to the rank that waits for nobody", "[diagnosis]") {
  Fleet fleet(4);
  fleet.group("tp", {0, 1});
  fleet.group("tp", {2, 3});
  fleet.group("dp", {0, 2});
  fleet.group("dp", {1, 3});
  // 3 hangs; 2 waits for it in tp, 0 waits for 2 in dp, 1 waits for 0 in tp.
  fleet.call(2, 0, Op::all_gather, 64, true);
  fleet.call(0, 1, Op::all_reduce, 64, true);
  fleet.call(1, 0, Op::all_gather, 64, true);
  const Diagnosis d = diagnose(fleet.list);
  CHECK(d.cause == Cause::late);
  CHECK(d.culprits == std::vector<int>{3});
  CHECK(d.missing.size() == 3);
}

TEST_CASE("a message waits for its sender", "[diagnosis]") {
  Fleet fleet(3);
  fleet.group("pp", {0, 1, 2});
  for (int64_t i = 0; i < 2; ++i) fleet.message(0, 0, Op::send, 1, i, false);
  fleet.message(1, 0, Op::recv, 0, 0, false);
  fleet.message(1, 0, Op::recv, 0, 1, false);
  fleet.message(2, 0, Op::recv, 1, 0, true);
  Diagnosis d = diagnose(fleet.list);
  CHECK(d.culprits == std::vector<int>{1});
  CHECK(contains(text_of(d, fleet.list), "recv from rank 1 of pp"));
  // Rank 1 has sent it and waits for the next one of rank 0.
  fleet.message(1, 0, Op::send, 2, 0, false);
  fleet.message(1, 0, Op::recv, 0, 2, true);
  d = diagnose(fleet.list);
  CHECK(d.culprits == std::vector<int>{0});
}

TEST_CASE("different calls of one number are a mismatch, which the smaller party made", "[diagnosis]") {
  Fleet fleet(3);
  fleet.group("dp", {0, 1, 2});
  for (int r = 0; r < 3; ++r) fleet.call(r, 0, Op::all_reduce, 4);
  for (int r = 0; r < 3; ++r) fleet.call(r, 0, Op::all_reduce, r == 1 ? 8 : 16, true);
  const Diagnosis d = diagnose(fleet.list);
  CHECK(d.cause == Cause::mismatch);
  CHECK(d.culprits == std::vector<int>{1});
  REQUIRE(d.mismatches.size() == 1);
  CHECK(contains(d.mismatches[0],
                 "dp #1: all_reduce of 16 B f32 on ranks 0,2; all_reduce of 8 B f32 on ranks 1"));
}

TEST_CASE("processes that ended or stopped count before those that wait", "[diagnosis]") {
  Fleet fleet(3);
  fleet.group("dp", {0, 1, 2});
  fleet.call(0, 0, Op::all_reduce, 4, true);
  fleet.call(1, 0, Op::all_reduce, 4, true);
  fleet[2].life = Life::ended;
  CHECK(diagnose(fleet.list).cause == Cause::ended);
  CHECK(diagnose(fleet.list).culprits == std::vector<int>{2});
  fleet[2].life = Life::stopped;
  CHECK(diagnose(fleet.list).cause == Cause::stopped);
  // All are gone: the one that the others waited for.
  for (Rank& r : fleet.list) {
    r.life = Life::ended;
    r.now_ns = 0;
  }
  const Diagnosis d = diagnose(fleet.list);
  CHECK(d.cause == Cause::lost);
  CHECK(d.culprits == std::vector<int>{2});
  CHECK(!contains(text_of(d, fleet.list), " for 0.0 s"));
}

TEST_CASE("a run that makes progress has no culprit", "[diagnosis]") {
  Fleet fleet(2);
  fleet.group("dp", {0, 1});
  // Both have begun it: the operation itself runs.
  fleet.call(0, 0, Op::all_reduce, 4, true);
  fleet.call(1, 0, Op::all_reduce, 4);
  const Diagnosis d = diagnose(fleet.list);
  CHECK(d.cause == Cause::none);
  CHECK(d.culprits.empty());
  CHECK(diagnose({}).cause == Cause::none);
}

TEST_CASE("ranks without records are named, and do not count as hung", "[diagnosis]") {
  Fleet fleet(4);
  fleet.group("dp", {0, 1, 2, 3});
  for (int r = 0; r < 3; ++r) fleet.call(r, 0, Op::all_reduce, 4, true);
  fleet.list.pop_back();
  const Diagnosis d = diagnose(fleet.list);
  CHECK(d.cause == Cause::none);
  CHECK(d.unheard == std::vector<std::string>{"rank 3"});
  CHECK(json_of(d, fleet.list).get_string("cause") == "none");
}

TEST_CASE("numbers before the ring begins do not count as missing or different", "[diagnosis]") {
  Fleet fleet(2);
  fleet.group("dp", {0, 1});
  for (int i = 0; i < 5; ++i) fleet.call(0, 0, Op::all_reduce, i);
  for (int i = 0; i < 5; ++i) fleet.call(1, 0, Op::all_reduce, i);
  fleet[1].flight.entries.erase(fleet[1].flight.entries.begin(), fleet[1].flight.entries.begin() + 3);
  CHECK(diagnose(fleet.list).mismatches.empty());
}

TEST_CASE("a rank that died of a fatal signal is the cause, whatever the launcher did to the others",
          "[diagnosis]") {
  Fleet fleet(3);
  fleet.group("dp", {0, 1, 2});
  for (const int r : {0, 2}) fleet.call(r, 0, Op::all_reduce, 4, true);
  for (int r = 0; r < 3; ++r) fleet[r].life = Life::ended;
  fleet[1].flight.signal = 11;
  fleet[1].flight.signal_at = 0x10;
  fleet[1].flight.layer = 3;
  fleet[1].flight.backward = true;
  const Diagnosis d = diagnose(fleet.list);
  CHECK(d.cause == Cause::ended);
  CHECK(d.culprits == std::vector<int>{1});
  CHECK(contains(text_of(d, fleet.list),
                 "rank 1 (node0, pid 0, ended by signal 11 (SIGSEGV), address 0x10): "
                 "computing of step 7, backward of layer 3\n"));
  CHECK(contains(json_of(d, fleet.list).dump(), "\"signal\":11"));
}

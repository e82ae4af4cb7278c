#include "apps/launch/policy.h"

#include "tests/catch.h"
#include "tests/io/io_test_util.h"

using namespace nrl;
using namespace nrl::launch;
using test::contains;

namespace {

constexpr double now = 1e6;

LaunchState on_hosts() {
  return {.run_id = "0a", .attempt = 3, .hosts = {"node0", "node1"}, .spares = {"node2"}};
}

// An outcome with a failure of rank 2 on node1 in step 37, and the exit code of a verdict.
Outcome failed(const std::string& kind, int code = 80) {
  monitor::Failure f;
  f.kind = kind;
  f.exit_code = code;
  f.attempt = 3;
  f.rank = 2;
  f.host = "node1";
  f.step = 37;
  return {.code = 1, .failure = f, .saved_before = 10, .saved = 20};
}

Decision decided(const LaunchState& state, const Outcome& outcome, int max_restarts = 100) {
  return decide(state, ended_by(state, outcome, now), max_restarts);
}

Ended past(const std::string& kind, const std::string& host, int64_t step, bool progress, double age,
           int code = 80) {
  return {.attempt = 1,
          .code = code,
          .kind = kind,
          .host = host,
          .rank = 2,
          .step = step,
          .progress = progress,
          .time = now - age};
}

}  // namespace

TEST_CASE("the policy is this table", "[launch]") {
  struct Row {
    const char* kind;  // of failure.json; null: it left none
    int code;
    bool restart;
    int returned;  // without a restart
    double delay;
    bool may_live;
    Check check;
  };
  const Row rows[] = {
      {nullptr, 0, false, 0, 0, false, Check::none},
      {nullptr, 75, false, 75, 0, false, Check::none},
      {nullptr, 64, false, 64, 0, false, Check::none},
      {nullptr, 65, false, 65, 0, false, Check::none},
      {nullptr, 66, false, 66, 0, false, Check::none},
      {nullptr, 69, false, 69, 0, false, Check::none},
      {nullptr, 73, false, 73, 0, false, Check::none},
      {nullptr, 78, false, 78, 0, false, Check::none},
      {"config", 78, false, 78, 0, false, Check::none},
      {"internal", 70, false, 70, 0, false, Check::none},
      {nullptr, 70, false, 70, 0, false, Check::none},
      {"diverged", 79, false, 79, 0, false, Check::none},
      {"out_of_memory", 71, true, 0, 30, false, Check::none},
      {"io", 74, true, 0, 30, false, Check::none},
      {nullptr, 74, true, 0, 30, false, Check::none},
      {"rank_killed", 80, true, 0, 0, false, Check::none},
      {"rank_exited", 80, true, 0, 0, false, Check::one},
      {"rank_hung", 80, true, 0, 0, false, Check::none},
      {"mismatch", 80, true, 0, 0, false, Check::none},
      {"launcher_lost", 80, true, 0, 0, false, Check::none},
      {"start_timeout", 80, true, 0, 0, false, Check::none},
      {"node_lost", 80, true, 0, 0, false, Check::all},
      {"network", 80, true, 0, 0, false, Check::all},
      {"gpu", 80, true, 0, 0, false, Check::one},
      {"rank_stopped", 80, true, 0, 0, false, Check::one},
      {"silent_corruption", 81, true, 0, 0, false, Check::one},
      {"peer_lost", 80, true, 0, 0, false, Check::all},
      {"a kind of later versions", 80, true, 0, 0, false, Check::all},
      {nullptr, 80, true, 0, 0, true, Check::all},
      {nullptr, 1, true, 0, 0, true, Check::all},
      {nullptr, 137, true, 0, 0, true, Check::all},
  };
  for (const Row& row : rows) {
    Outcome outcome = failed(row.kind ? row.kind : "", row.code);
    if (!row.kind) outcome.failure.reset(), outcome.code = row.code;
    const Decision d = decided(on_hosts(), outcome);
    INFO((row.kind ? row.kind : "no failure.json") << " " << row.code << ": " << d.why);
    CHECK(d.restart == row.restart);
    if (!row.restart) CHECK(d.code == row.returned);
    CHECK(d.delay_seconds == row.delay);
    CHECK(d.ranks_may_live == row.may_live);
    CHECK(d.check == row.check);
    if (row.check == Check::one) {
      CHECK(d.node == 1);
      // The driver says that the GPU must be reset first, and the hashes that the node computes wrongly.
      CHECK(d.replace == (std::string(row.kind) != "rank_stopped" && std::string(row.kind) != "rank_exited"));
    }
    CHECK(!d.why.empty());
    // One host: nothing to examine.
    LaunchState alone = on_hosts();
    alone.hosts.clear();
    CHECK(decided(alone, outcome).check == Check::none);
  }
}

TEST_CASE("an error of memory or files is tried twice", "[launch]") {
  LaunchState state = on_hosts();
  state.history = {past("io", "node1", 37, false, 60, 74)};
  Outcome outcome = failed("io", 74);
  CHECK(decided(state, outcome).restart);  // a checkpoint was saved in between
  outcome.saved = outcome.saved_before;
  CHECK(!decided(state, outcome).restart);
  CHECK(decided(state, outcome).code == 74);
}

TEST_CASE("three failures without a new checkpoint end the run, after pauses that grow", "[launch]") {
  LaunchState state = on_hosts();
  Outcome outcome = failed("rank_killed");
  outcome.saved = outcome.saved_before;
  CHECK(decided(state, outcome).delay_seconds == 1);
  state.history = {past("rank_killed", "node1", 5, true, 60)};
  CHECK(decided(state, outcome).delay_seconds == 1);
  state.history.push_back(past("rank_killed", "node1", 5, false, 50));
  CHECK(decided(state, outcome).delay_seconds == 10);
  state.history.push_back(past("rank_killed", "node1", 5, false, 40));
  const Decision d = decided(state, outcome);
  CHECK((!d.restart && d.code == 80));
  CHECK(contains(d.why, "3 failures without a new checkpoint"));
  outcome.saved = 30;
  CHECK(decided(state, outcome).restart);
}

TEST_CASE("the number of restarts is limited", "[launch]") {
  LaunchState state = on_hosts();
  state.restarts = 4;
  CHECK(decided(state, failed("rank_killed"), 5).restart);
  CHECK(!decided(state, failed("rank_killed"), 4).restart);
}

TEST_CASE("the same step of the same rank on another node is software", "[launch]") {
  LaunchState state = on_hosts();
  state.history = {past("rank_killed", "node0", 37, true, 50)};
  const Decision d = decided(state, failed("rank_killed"));
  CHECK((!d.restart && d.code == 80));
  CHECK(contains(d.why, "as on node0 in attempt 1: the program or its data is the cause"));
  CHECK(decided(state, failed("node_lost")).restart);  // the network does not count steps
  state.history = {past("rank_killed", "node0", 36, true, 50)};
  CHECK(decided(state, failed("rank_killed")).restart);
  state.history = {past("rank_killed", "node1", 37, true, 50)};  // the node may be the cause
  CHECK(decided(state, failed("rank_killed")).restart);
}

TEST_CASE("a node that fails twice in an hour is replaced although it is healthy", "[launch]") {
  LaunchState state = on_hosts();
  CHECK(!decided(state, failed("rank_stopped")).replace);
  state.history = {past("rank_killed", "node1", 5, true, 3500)};
  CHECK(decided(state, failed("rank_stopped")).replace);
  CHECK(!decided(state, failed("rank_killed")).replace);
  state.history = {past("rank_killed", "node1", 5, true, 3700)};
  CHECK(!decided(state, failed("rank_stopped")).replace);
  state.history = {past("rank_killed", "node0", 5, true, 10)};
  CHECK(!decided(state, failed("rank_stopped")).replace);
}

TEST_CASE("a node that computes wrong results is not used again", "[launch]") {
  const Decision d = decided(on_hosts(), failed("silent_corruption", 81));
  CHECK((d.replace && d.unfit && d.node == 1));
  LaunchState alone = on_hosts();
  alone.hosts.clear();
  CHECK(!decided(alone, failed("silent_corruption", 81)).restart);
  Outcome of_two = failed("silent_corruption", 81);
  of_two.failure->rank.reset();  // the host is the writer's
  CHECK(ended_by(on_hosts(), of_two, now).host.empty());
  CHECK(decided(on_hosts(), of_two).code == 81);
}

TEST_CASE("a spare takes the number of the node that it replaces", "[launch]") {
  LaunchState state = on_hosts();
  REQUIRE(replace_node(state, 0, false));
  CHECK(state.hosts == std::vector<std::string>{"node2", "node1"});
  CHECK(state.retired == std::vector<std::string>{"node0"});
  CHECK(!replace_node(state, 1, true));
  CHECK(state.barred.empty());
  // It comes back as a spare; a host that computes wrongly does not.
  CHECK(may_return(state) == std::vector<std::string>{"node0"});
  take_back(state, "node0");
  CHECK((state.retired.empty() && state.spares == std::vector<std::string>{"node0"}));
  REQUIRE(replace_node(state, 1, true));
  CHECK((state.retired == std::vector<std::string>{"node1"} && state.barred == state.retired));
  CHECK(may_return(state).empty());
  CHECK(state.hosts == std::vector<std::string>{"node2", "node0"});
}

TEST_CASE("hosts are found by long and short names", "[launch]") {
  const std::vector<std::string> hosts{"node1.cluster", "node10", "10.0.0.1", "10.0.0.2"};
  CHECK(node_of(hosts, "node1") == 0);
  CHECK(node_of(hosts, "node10.cluster") == 1);
  CHECK(node_of(hosts, "10.0.0.2") == 3);
  for (const char* none : {"", "node", "node1.other", "10.0.0.3", "node1."}) {
    INFO(none);
    CHECK(node_of(hosts, none) == -1);
  }
}

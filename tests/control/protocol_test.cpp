// The state machine by single calls, and its use in a simulated run without random faults.

#include "parallel/control/protocol.h"

#include <cmath>
#include <csignal>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/base/philox.h"
#include "tests/catch.h"
#include "tests/control/simulator.h"

using namespace nrl;
using namespace nrl::test;

namespace {

std::string_view any_phase(uint8_t) {
  return "forward";
}

struct Recorded : Actions {
  struct Sent {
    size_t link;
    Message message;
  };
  std::vector<Sent> sent;
  std::vector<Verdict> verdicts;
  int notices = 0;
  void send(size_t link, const Message& message) override { sent.push_back({link, message}); }
  void leave(const Verdict& verdict) override { verdicts.push_back(verdict); }
  void notice(Notice, int) override { ++notices; }
  int count(FrameType type) const {
    return static_cast<int>(
        std::ranges::count_if(sent, [&](const Sent& s) { return s.message.type == type; }));
  }
};

// Rank 0 of a node of three, and node 1.
struct Root {
  Recorded actions;
  Protocol protocol{make_topology(0, {0, 0, 0, 1}), {}, any_phase, 0};
  Nanos now = 0;
  void tick_until(Nanos end, Nanos step = 100_ms, bool hear = true) {
    for (; now <= end; now += step) {
      protocol.on_local({}, now);
      if (hear)
        for (size_t i = 0; i < 3; ++i) protocol.on_message(i, {}, now, actions);  // malformed, but heard
      protocol.on_tick(now, step, actions);
    }
  }
};

SimulationOptions two_by_two() {
  SimulationOptions o;
  o.nodes = 2;
  o.ranks_per_node = 2;
  return o;
}

// The time from a fault to the last living rank's end; -1 if one stays.
Nanos gone_after(Simulation& s, Nanos fault, Nanos wait) {
  s.run_until(fault + wait);
  Nanos last = 0;
  for (int r = 0; r < s.size(); ++r) {
    const auto& p = s.process(r);
    if (p.alive && !p.left) return -1;
    if (p.alive) last = std::max(last, p.left_at);
  }
  return last - fault;
}

}  // namespace

TEST_CASE("stronger evidence within the window replaces a consequence") {
  Root root;
  root.tick_until(2_s);
  Suspicion lost;
  lost.evidence = Evidence::secondary;
  lost.when = root.now;
  lost.text.assign("MPI lost rank 2");
  root.protocol.on_failure(lost, root.now, root.actions);
  root.tick_until(root.now + 700_ms);
  CHECK(root.actions.verdicts.empty());  // waits a second for the cause
  CHECK(root.protocol.state() == State::suspecting);
  root.protocol.on_closed(1, {}, root.now, root.actions);
  root.tick_until(root.now + 600_ms);
  REQUIRE(root.actions.verdicts.size() == 1);
  const Verdict& v = root.actions.verdicts[0];
  CHECK(v.kind == Kind::rank_exited);
  CHECK(v.ranks[0] == 2);
  CHECK(v.others().size() == 1);
  CHECK(root.protocol.state() == State::leaving);
  CHECK(root.actions.count(FrameType::verdict) == 2);  // not to the closed link
  root.tick_until(root.now + 5_s);
  CHECK(root.actions.verdicts.size() == 1);
}

TEST_CASE("an own pause moves all deadlines") {
  Root root;
  root.tick_until(5_s);
  root.now += 40_s;
  root.protocol.on_tick(root.now, 40_s, root.actions);
  root.tick_until(root.now + 3_s, 100_ms, false);
  CHECK(root.actions.verdicts.empty());
  root.tick_until(root.now + 12_s, 100_ms, false);
  CHECK(root.actions.verdicts.size() == 1);
}

TEST_CASE("a completed step proves a silent rank alive; a stopped process needs no further proof") {
  for (const bool stopped : {false, true}) {
    Root root;
    StatusSample sample;
    for (Nanos t = 0; t < 25_s && root.actions.verdicts.empty(); t += 500_ms) {
      sample.step = 1 + t / 2_s;
      root.protocol.on_local(sample, t);
      root.protocol.on_message(0, {}, t, root.actions);
      root.protocol.on_message(2, {}, t, root.actions);
      if (stopped && t > 2_s) root.protocol.on_process_state(1, 'T');
      root.protocol.on_tick(t, 500_ms, root.actions);
    }
    CHECK(root.actions.verdicts.size() == (stopped ? 1 : 0));
    if (!stopped) continue;
    CHECK(root.actions.verdicts[0].kind == Kind::rank_stopped);
    CHECK(root.actions.verdicts[0].step == sample.step);  // not 0, which the rank has told
  }
}

TEST_CASE("a slow step lengthens the silence that is allowed") {
  Root root;
  StatusSample sample;
  sample.median_step = 20_s;
  Nanos t = 0;
  for (; t < 60_s && root.actions.verdicts.empty(); t += 500_ms) {
    root.protocol.on_local(sample, t);
    root.protocol.on_message(0, {}, t, root.actions);
    root.protocol.on_message(2, {}, t, root.actions);
    root.protocol.on_tick(t, 500_ms, root.actions);
  }
  CHECK(t > 29_s);
  CHECK(t < 33_s);
}

TEST_CASE("a process that waits in the kernel is named so") {
  Root root;
  for (Nanos t = 0; t < 15_s && root.actions.verdicts.empty(); t += 500_ms) {
    root.protocol.on_message(0, {}, t, root.actions);
    root.protocol.on_message(2, {}, t, root.actions);
    if (t > 2_s) root.protocol.on_process_state(1, 'D');
    root.protocol.on_tick(t, 500_ms, root.actions);
  }
  REQUIRE(root.actions.verdicts.size() == 1);
  CHECK_THAT(std::string(root.actions.verdicts[0].text.view()),
             ContainsSubstring("no step completed, process state D"));
}

TEST_CASE("the last words of a process are in the verdict, whoever hears them") {
  for (int rank = 0; rank < 6; ++rank) {
    SimulationOptions o;
    o.nodes = 3;
    o.ranks_per_node = 2;
    o.arity = 2;
    Simulation s(o);
    s.at(5_s, [&] { s.crash(rank, "by signal 11 (SIGSEGV), address 0x10, in backward of layer 3"); });
    s.run_until(20_s);
    for (int r = 0; r < s.size(); ++r) {
      if (r == rank) continue;
      const auto& p = s.process(r);
      CAPTURE(rank, r, std::string(p.verdict.text.view()));
      REQUIRE(p.left);
      CHECK(p.left_at < 6_s);
      CHECK(p.verdict.kind == Kind::rank_killed);
      CHECK(p.verdict.exit_code == 80);
      CHECK(p.verdict.ranks[0] == rank);
      CHECK(p.verdict.also_count == 0);
      CHECK_THAT(
          std::string(p.verdict.text.view()),
          ContainsSubstring("in forward: by signal 11 (SIGSEGV), address 0x10, in backward of layer 3"));
    }
  }
}

TEST_CASE("a parent tells of its own end only") {
  Recorded actions;
  Protocol child(make_topology(1, {0, 0, 0}), {}, any_phase, 0);
  Suspicion s;
  s.evidence = Evidence::process_exit;
  s.kind = Kind::rank_killed;
  const auto hear = [&](int rank, Evidence evidence) {
    s.rank = rank;
    s.evidence = evidence;
    Message m;
    m.type = FrameType::suspect;
    m.length = sizeof s;
    std::memcpy(m.payload.data(), &s, sizeof s);
    child.on_message(0, m, 1_s, actions);
    return child.evidence().size();
  };
  CHECK(hear(2, Evidence::process_exit) == 0);
  CHECK(hear(0, Evidence::error) == 0);
  CHECK(hear(0, Evidence::process_exit) == 1);
}

TEST_CASE("a process that the kernel killed for memory is named so") {
  for (const int status : {-1, int{SIGKILL}, int{SIGTERM}}) {
    Root root;
    root.tick_until(1_s);
    root.protocol.on_closed(1, {.wait_status = status, .out_of_memory = true}, root.now, root.actions);
    root.tick_until(root.now + 600_ms);
    REQUIRE(root.actions.verdicts.size() == 1);
    const std::string text(root.actions.verdicts[0].text.view());
    CAPTURE(text);
    CHECK(root.actions.verdicts[0].kind == Kind::rank_killed);
    CHECK((text.find("by the kernel, because memory ran out") != std::string::npos) == (status != SIGTERM));
    CHECK((text.find("by signal 9 (SIGKILL)") != std::string::npos) == (status == SIGKILL));
  }
}

TEST_CASE("the root gets the pace of every rank, once in a window") {
  for (const int nodes : {1, 40, 120}) {
    SimulationOptions o;
    o.nodes = nodes;
    o.ranks_per_node = 3;
    o.arity = 3;
    o.step = 250_ms;
    o.limits.pace = 10_s;
    Simulation s(o);
    s.slow_down(2, 1.5);
    s.run_until(45_s);
    for (int r = 0; r < s.size(); ++r) {
      const auto& paces = s.process(r).paces;
      CAPTURE(nodes, r);
      REQUIRE(paces.size() >= 3);
      CHECK(paces.size() <= 4);
      for (const float pace : paces) CHECK(std::abs(pace - (r == 2 ? 0.1875F : 0.125F)) < 1e-4F);
    }
    CHECK(s.largest_message <= max_payload);
  }
  Simulation off(two_by_two());
  off.run_until(40_s);
  CHECK(off.process(1).paces.empty());
}

TEST_CASE("frames of paces that are none are left out") {
  Root root;
  struct Paces : Recorded {
    int count = 0;
    void pace(const Pace&) override { ++count; }
  } actions;
  const auto hear = [&](std::vector<Pace> paces, size_t cut) {
    Message m;
    m.type = FrameType::pace;
    m.length = static_cast<uint16_t>(paces.size() * sizeof(Pace) - cut);
    std::memcpy(m.payload.data(), paces.data(), m.length);
    root.protocol.on_message(0, m, 1_s, actions);
    return std::exchange(actions.count, 0);
  };
  CHECK(hear({{1, 0.5F, 0}, {2, 0.5F, 0}}, 0) == 2);
  CHECK(hear({{1, 0.5F, 0}, {2, 0.5F, 0}}, 1) == 0);
  CHECK(hear({{-1, 0.5F, 0}, {4, 0.5F, 0}, {3, 0.5F, 0}}, 0) == 1);
  CHECK(hear({{1, std::numeric_limits<float>::quiet_NaN(), 0}}, 0) == 0);
}

TEST_CASE("without a launcher all leave at once") {
  for (const int rank : {0, 3}) {
    Simulation s(two_by_two());
    Suspicion lost;
    lost.kind = Kind::launcher_lost;
    s.at(5_s, [&] { s.fail(rank, lost); });
    const Nanos gone = gone_after(s, 5_s, 5_s);
    CHECK(gone >= 0);
    CHECK(gone < 50_ms);
    CHECK(s.process(1).verdict.kind == Kind::launcher_lost);
  }
}

TEST_CASE("a debugger suspends the limits of the whole run") {
  Simulation s(two_by_two());
  s.at(5_s, [&] { s.debug(3); });
  s.run_until(300_s);
  for (int r = 0; r < 3; ++r) CHECK(!s.process(r).left);
  CHECK(s.process(0).notices == 1);
  CHECK(s.process(1).notices == 1);
}

TEST_CASE("a run that finishes leaves without a word") {
  SimulationOptions o = two_by_two();
  o.nodes = 9;
  o.arity = 2;
  Simulation s(o);
  for (int r = 0; r < s.size(); ++r) s.at(3_s + (r * 7 % 18) * 1_s, [&s, r] { s.finish(r); });
  s.run_until(60_s);
  for (int r = 0; r < s.size(); ++r) {
    CHECK(s.process(r).protocol->state() == State::gone);
    CHECK(s.process(r).notices == 0);
    CHECK(s.process(r).protocol->evidence().empty());
  }
}

TEST_CASE("a rank that dies while the others finish is noticed") {
  Simulation s(two_by_two());
  for (int r = 0; r < 3; ++r) s.at(3_s, [&s, r] { s.finish(r); });
  s.at(4_s, [&] { s.kill(3); });
  s.run_until(10_s);
  CHECK(s.process(0).left);
  CHECK(s.process(0).verdict.ranks[0] == 3);
  CHECK(s.process(1).protocol->state() == State::gone);  // had no children to wait for
}

TEST_CASE("a rank that never finishes is named") {
  Simulation s(two_by_two());
  for (int r = 0; r < 3; ++r) s.at(3_s, [&s, r] { s.finish(r); });
  s.run_until(122_s);
  CHECK(!s.process(0).left);
  s.run_until(126_s);
  CHECK(s.process(0).verdict.kind == Kind::rank_hung);
  CHECK(s.process(3).left);
}

TEST_CASE("times to a verdict") {
  SimulationOptions o = two_by_two();
  o.nodes = 3;
  Simulation killed(o);
  killed.at(20_s, [&] { killed.kill(3); });
  const Nanos death = gone_after(killed, 20_s, 30_s);
  CHECK(death > 0);
  CHECK(death < 500_ms);

  Simulation leader(o);
  leader.at(20_s, [&] { leader.kill(2); });
  const Nanos leader_death = gone_after(leader, 20_s, 30_s);
  CHECK(leader_death > 0);
  CHECK(leader_death <= 1_s);

  Simulation stopped(o);
  stopped.at(20_s, [&] { stopped.pause(3); });
  const Nanos stop = gone_after(stopped, 20_s, 30_s);
  CHECK(stop > 9_s);
  CHECK(stop <= 12_s);
  CHECK(stopped.process(3).left);  // woken up, it leaves as well

  Simulation lost(o);
  lost.at(20_s, [&] { lost.node_down(2); });
  const Nanos loss = gone_after(lost, 20_s, 60_s);
  CHECK(loss > 29_s);
  CHECK(loss <= 33_s);

  Simulation hung(o);
  hung.at(20_s, [&] { hung.hang(5); });
  const Nanos hang = gone_after(hung, 20_s, 90_s);
  CHECK(hang > 59_s);
  CHECK(hang <= 65_s);
}

TEST_CASE("a hang that a rank reports of itself ends the run") {
  Simulation s(two_by_two());
  Suspicion stuck;
  stuck.evidence = Evidence::hang;
  stuck.kind = Kind::rank_hung;
  stuck.text.assign("the GPU does not finish step 3");
  s.at(10_s, [&] { s.hang(2), s.fail(2, stuck); });
  const Nanos time = gone_after(s, 10_s, 20_s);
  CHECK(time > 0);
  CHECK(time < 12_s);
  CHECK(s.process(0).verdict.ranks[0] == 2);
}

TEST_CASE("an error leaves with its own exit code everywhere") {
  Simulation s(two_by_two());
  Suspicion error;
  error.exit_code = 74;
  error.text.assign("disk full");
  s.at(10_s, [&] { s.fail(3, error); });
  CHECK(gone_after(s, 10_s, 5_s) < 500_ms);
  for (int r = 0; r < 4; ++r) CHECK(s.process(r).verdict.exit_code == 74);
}

TEST_CASE("a process alone decides at once") {
  SimulationOptions o;
  o.nodes = 1;
  Simulation s(o);
  s.run_until(3_s);
  CHECK(s.has_lease());
  s.fail(0, Suspicion{});
  s.run_until(3_s + 10_ms);
  CHECK(s.process(0).left);
}

TEST_CASE("payloads of a peer that are not valid do nothing") {
  const PhiloxStream random(3, "control payloads");
  uint64_t element = 0;
  for (int round = 0; round < 20000; ++round) {
    Root root;
    root.tick_until(100_ms);
    root.actions.sent.clear();
    Message m;
    m.type = static_cast<FrameType>(1 + random.bits(element++) % 9);
    const size_t sizes[] = {
        0, 4, 8, 24, sizeof(Answer), sizeof(Suspicion), sizeof(Verdict), random.bits(element++) % 1024};
    m.length = static_cast<uint16_t>(sizes[random.bits(element++) % 8]);
    for (size_t i = 0; i < m.length; ++i)
      m.payload[i] = static_cast<std::byte>(random.bits(element + i / 4) >> (8 * (i % 4)));
    element += 300;
    root.protocol.on_message(random.bits(element++) % 3, m, root.now, root.actions);
    root.tick_until(root.now + 1_s);
    // Random ranks and lengths are not of this run: no verdict and no suspicion survives.
    CHECK(root.actions.verdicts.empty());
    CHECK(root.protocol.evidence().empty());
  }
}

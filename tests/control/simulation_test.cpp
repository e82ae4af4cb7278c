// Random faults on a virtual clock, from a seed each. CONTROL_SEEDS=FIRST:COUNT tries others; control_tests
// "[table]" prints what a failure costs at 10, 1,000 and 10,000 nodes.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>

#include <spdlog/fmt/fmt.h>

#include "tests/catch.h"
#include "tests/control/simulator.h"

using namespace nrl;
using namespace nrl::test;

namespace {

// A scenario of one seed: faults, and what may be said about them.
class Scenario {
 public:
  // `nodes`: of one rank each, and the fatal faults come after `quiet`; 0: few nodes of several ranks.
  explicit Scenario(uint64_t seed, int nodes = 0, Nanos quiet = 0)
      : seed_(seed), quiet_(quiet), random_(seed, "control scenario") {
    SimulationOptions o;
    o.seed = seed;
    o.nodes = 1 + draw(14);
    o.ranks_per_node = 1 + draw(4);
    if (nodes > 0) o.nodes = nodes, o.ranks_per_node = 1;
    o.arity = 2 + draw(3);
    o.loss = draw(2) * 0.01;
    o.step = 20_ms + draw(2000) * 1_ms;
    options_ = o;
    simulation_ = std::make_unique<Simulation>(o);
  }

  void run() {
    const int harmless = draw(4), fatal = draw(3) == 0 ? 0 : 1 + draw(8) / 7;
    Nanos latest = std::max(5_s, quiet_);
    for (int i = 0; i < harmless; ++i) latest = std::max(latest, add_harmless());
    const Nanos begin = latest;  // no fault hides another
    fatal_ = fatal;
    for (int i = 0; i < fatal; ++i) add_fatal(begin + draw(3000) * 1_ms * i);
    const Nanos end = begin + 100_s;
    bool lease_seen = false;
    for (Nanos t = 0; t <= end; t += 500_ms) {
      simulation_->run_until(t);
      if (!simulation_->has_lease()) continue;
      lease_seen = true;
      if (cut_at_ != 0 && root_minority_ && t > cut_at_ + options_.limits.network / 2 + 2_s)
        complain(fmt::format("a lease without a majority at {:.1f} s", in_seconds(t)));
      if (simulation_->process(0).left) complain("a lease after a verdict");
    }
    if (!lease_seen && fatal == 0) complain("never a lease");
    check_verdicts(fatal > 0);
    if (harmless == 0 && fatal == 0)
      for (int r = 0; r < simulation_->size(); ++r)
        if (simulation_->process(r).notices > 0) complain("a notice without a fault");
    if (simulation_->largest_message > max_payload) complain("a message is too large");
    if (simulation_->most_in_flight > 200) complain("a queue grows");
  }

  const std::string& complaints() const { return complaints_; }
  int64_t events() const { return simulation_->events; }

 private:
  int draw(int below) { return static_cast<int>(random_.bits(drawn_++) % static_cast<uint32_t>(below)); }
  int any_rank() { return draw(simulation_->size()); }
  void complain(const std::string& text) {
    complaints_ += fmt::format("CONTROL_SEEDS={}:1: {} [{}]\n", seed_, text, story_);
  }
  void tell(const std::string& what) { story_ += (story_.empty() ? "" : ", ") + what; }

  // Shorter than every limit. Returns the time at which it is over.
  Nanos add_harmless() {
    const Nanos start = 5_s + draw(static_cast<int>(std::max(20_s, quiet_ - 130_s) / 1_ms)) * 1_ms;
    Simulation& s = *simulation_;
    switch (draw(4)) {
      case 0: {  // also of the root: a slow root
        const int rank = draw(3) == 0 ? 0 : any_rank();
        const Nanos length = 500_ms + draw(4500) * 1_ms;
        tell(fmt::format("rank {} pauses at {:.3f} s for {:.3f} s", rank, in_seconds(start),
                         in_seconds(length)));
        s.at(start, [&s, rank] { s.pause(rank); });
        s.at(start + length, [&s, rank] { s.resume(rank); });
        return start + length + 1_s;
      }
      case 1: {
        const Nanos length = 1_s + draw(20) * 1_s;
        const int node = draw(options_.nodes);
        tell(fmt::format("node {} is cut off for {:.0f} s", node, in_seconds(length)));
        if (options_.nodes == 1 || cut_used_) return start;
        cut_used_ = true;
        s.at(start, [&s, node] { s.partition({node}); });
        s.at(start + length, [&s] { s.partition({}); });
        return start + length + 2_s;
      }
      case 2: {
        const int node = draw(options_.nodes);
        if (node == 0) return start;
        const int leader = node * options_.ranks_per_node;
        tell(fmt::format("a frame to rank {} is damaged", leader));
        s.at(start, [&s, leader] { s.damage(leader); });
        return start + 3_s;
      }
      default: {  // for which all others wait; also the root
        const int rank = draw(2) == 0 ? 0 : any_rank();
        const Nanos length = 30_s + draw(90) * 1_s;
        tell(fmt::format("rank {} evaluates for {:.0f} s", rank, in_seconds(length)));
        s.at(start, [&s, rank] { s.evaluate(rank, true); });
        s.at(start + length, [&s, rank] { s.evaluate(rank, false); });
        return start + length + 2_s;
      }
    }
  }

  void add_fatal(Nanos start) {
    Simulation& s = *simulation_;
    const int rank = any_rank();
    const int kind = draw(6);
    tell(fmt::format("fatal {} of rank {} at {:.3f} s", kind, rank, in_seconds(start)));
    if (kind == 0) {
      const int status = draw(2) == 0 ? 9 : -1;
      s.at(start, [&s, rank, status] { s.kill(rank, status); });
      expect(rank, {Kind::rank_exited, Kind::rank_killed});
    } else if (kind == 1 && options_.nodes > 1) {
      const int node = s.node_of(rank);
      s.at(start, [&s, node] { s.node_down(node); });
      expect(node * options_.ranks_per_node, {Kind::node_lost});
    } else if (kind == 2) {
      s.at(start, [&s, rank] { s.pause(rank); });
      expect(rank, {Kind::rank_stopped, Kind::node_lost});
      stopped_.insert(rank);
    } else if (kind == 3) {
      s.at(start, [&s, rank] { s.hang(rank); });
      expect(rank, {Kind::rank_hung});
    } else if (kind == 4 && options_.nodes > 1 && cut_at_ == 0) {
      std::vector<int> side;
      for (int n = 0; n < options_.nodes; ++n)
        if (draw(2) == 0) side.push_back(n);
      if (side.empty() || static_cast<int>(side.size()) == options_.nodes) side = {options_.nodes - 1};
      s.at(start, [&s, side] { s.partition(side); });
      cut_at_ = start;
      const bool root_in = side.front() == 0;
      const int with_root =
          root_in ? static_cast<int>(side.size()) : options_.nodes - static_cast<int>(side.size());
      root_minority_ = 2 * with_root <= options_.nodes;
      for (int n = 0; n < options_.nodes; ++n) expect(n * options_.ranks_per_node, {Kind::node_lost});
    } else {
      Suspicion error;
      error.evidence = draw(3) == 0 ? Evidence::secondary : Evidence::error;
      error.exit_code = error.evidence == Evidence::error ? 74 : 80;
      error.text.assign("disk full");
      s.at(start, [&s, rank, error] { s.fail(rank, error); });
      expect(rank, {Kind::error});
    }
  }
  void expect(int rank, const std::set<Kind>& kinds) {
    for (Kind kind : kinds) truth_.insert({rank, kind});
  }

  void check_verdicts(bool fatal) {
    Simulation& s = *simulation_;
    // Components of processes that can reach each other.
    std::vector<int> component(static_cast<size_t>(s.size()), -1);
    for (int r = 0; r < s.size(); ++r) component[static_cast<size_t>(r)] = r;
    const auto find = [&](int r) {
      while (component[static_cast<size_t>(r)] != r) r = component[static_cast<size_t>(r)];
      return r;
    };
    for (int r = 0; r < s.size(); ++r)
      for (size_t i = 0; i < s.topology(r).links.size(); ++i)
        if (s.connected(r, i) && !stopped_.contains(r) && !stopped_.contains(s.topology(r).links[i].rank))
          component[static_cast<size_t>(find(r))] = find(s.topology(r).links[i].rank);
    std::vector<const Simulation::Process*> first(static_cast<size_t>(s.size()));
    for (int r = 0; r < s.size(); ++r) {
      const auto& p = s.process(r);
      if (!p.alive || (p.paused && !p.left)) continue;
      if (p.left != fatal) {
        complain(p.left ? fmt::format("a false verdict of rank {} at {:.3f} s: {}", r, in_seconds(p.left_at),
                                      p.verdict.text.view())
                        : fmt::format("rank {} stays", r));
        return;
      }
      if (!p.left) continue;
      bool named = false;
      for (int culprit : p.verdict.culprits()) named |= truth_.contains({culprit, p.verdict.kind});
      if (!named) return complain(fmt::format("rank {} blames the wrong one: {}", r, p.verdict.text.view()));
      const auto& leader = first[static_cast<size_t>(find(r))];
      if (leader == nullptr) {
        first[static_cast<size_t>(find(r))] = &p;
      } else if (truth_.size() <= 2 || cut_at_ == 0) {
        if (std::abs(p.left_at - leader->left_at) > 2_s)
          return complain(
              fmt::format("ranks left {:.1f} s apart", in_seconds(std::abs(p.left_at - leader->left_at))));
        if (p.verdict.exit_code != leader->verdict.exit_code)
          return complain("ranks leave with different codes");
        if (p.verdict.issuer == leader->verdict.issuer &&
            p.verdict.text.view() != leader->verdict.text.view())
          return complain("one issuer, two verdicts");
        if (fatal_ == 1 &&
            (p.verdict.kind != leader->verdict.kind || p.verdict.ranks != leader->verdict.ranks))
          return complain("ranks that can reach each other leave with different verdicts");
      }
    }
  }

  uint64_t seed_, drawn_ = 0;
  Nanos quiet_;
  PhiloxStream random_;
  SimulationOptions options_;
  std::unique_ptr<Simulation> simulation_;
  std::set<std::pair<int, Kind>> truth_;
  std::set<int> stopped_;
  Nanos cut_at_ = 0;
  int fatal_ = 0;
  bool root_minority_ = false, cut_used_ = false;
  std::string complaints_, story_;
};

}  // namespace

TEST_CASE("simulated runs end with the right verdict, or with none", "[simulation]") {
  unsigned long long first = 1, count = 150;
  if (const char* wanted = std::getenv("CONTROL_SEEDS"))
    REQUIRE(std::sscanf(wanted, "%llu:%llu", &first, &count) == 2);
  int64_t events = 0;
  std::string complaints;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    Scenario scenario(seed);
    scenario.run();
    events += scenario.events();
    complaints += scenario.complaints();
    if (complaints.size() > 3000) break;
  }
  INFO(events << " events\n" << complaints);
  CHECK(complaints.empty());
}

TEST_CASE("ten minutes of 40 nodes end with the right verdict, or with none", "[simulation]") {
  unsigned long long first = 1, count = 60;
  if (const char* wanted = std::getenv("CONTROL_SEEDS"))
    REQUIRE(std::sscanf(wanted, "%llu:%llu", &first, &count) == 2);
  const auto begin = std::chrono::steady_clock::now();
  int64_t events = 0;
  std::string complaints;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    Scenario scenario(seed, 40, 500_s);
    scenario.run();
    events += scenario.events();
    complaints += scenario.complaints();
    if (complaints.size() > 3000) break;
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (count >= 500)
    fmt::print("{} seeds, {:.1f} million events, {:.1f} s\n", count, static_cast<double>(events) * 1e-6,
               seconds);
  INFO(complaints);
  CHECK(complaints.empty());
}

TEST_CASE("the cost of a failure at 10, 1,000 and 10,000 nodes", "[.][table]") {
  fmt::print("{:>6} {:>7} {:>7} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>10}\n", "nodes", "root/s", "node/s",
             "killed", "leader", "stopped", "node lost", "hang", "false", "machine");
  for (const int nodes : {10, 1000, 10000}) {
    const auto begin = std::chrono::steady_clock::now();
    SimulationOptions o;
    o.nodes = nodes;
    o.limits.pace = 10_s;
    o.ranks_per_node = nodes > 1000 ? 1 : 2;
    const int last = nodes * o.ranks_per_node - 1;
    Simulation quiet(o);
    quiet.run_until(2_s);
    const int64_t root = quiet.root_messages, all = quiet.messages;
    quiet.run_until(12_s);
    const double root_rate = static_cast<double>(quiet.root_messages - root) / 10;
    const double node_rate = static_cast<double>(quiet.messages - all) / 10 / nodes;
    const auto time = [&](const std::function<void(Simulation&)>& fault, Nanos wait) {
      Simulation s(o);
      s.at(5_s, [&] { fault(s); });
      s.run_until(5_s + wait);
      Nanos end = 0;
      for (int r = 0; r < s.size(); ++r)
        if (s.process(r).runs())
          end = 1'000'000_s;  // not the stopped one, if nothing on its node wakes it up
        else if (s.process(r).left)
          end = std::max(end, s.process(r).left_at);
      return in_seconds(end - 5_s);
    };
    const double killed = time([&](Simulation& s) { s.kill(last); }, 5_s);
    const double leader = time([&](Simulation& s) { s.kill(o.ranks_per_node); }, 5_s);
    const double stopped = time([&](Simulation& s) { s.pause(last); }, 35_s);
    const double lost = time([&](Simulation& s) { s.node_down(nodes - 1); }, 35_s);
    const double hang = time([&](Simulation& s) { s.hang(last); }, 70_s);

    // Ten minutes (two for the largest) with 1 % of the packets lost and a pause of 5 s of some process each
    // second.
    const int length = nodes > 1000 ? 120 : 600;
    o.loss = 0.01;
    Simulation noisy(o);
    for (int i = 0; i < length - 10; ++i) {
      const int rank = i % 10 == 0 ? 0 : 1 + i * 7 % last;  // no process twice in a row
      noisy.at(2_s + i * 1_s, [&noisy, rank] { noisy.pause(rank); });
      noisy.at(7_s + i * 1_s, [&noisy, rank] { noisy.resume(rank); });
    }
    noisy.run_until(length * 1_s);
    int wrong = 0;
    for (int r = 0; r < noisy.size(); ++r) wrong += noisy.process(r).left;
    CHECK(wrong == 0);
    const double machine = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    fmt::print("{:>6} {:>7.0f} {:>7.1f} {:>8.2f}s {:>8.2f}s {:>8.2f}s {:>8.2f}s {:>8.2f}s {:>9} {:>9.1f}s\n",
               nodes, root_rate, node_rate, killed, leader, stopped, lost, hang, wrong, machine);
    std::fflush(stdout);
  }
}

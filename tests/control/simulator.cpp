#include "tests/control/simulator.h"

#include <algorithm>

namespace nrl::test {

namespace {

std::string_view phase_name(uint8_t phase) {
  return phase == 0 ? "forward" : "evaluate";
}

constexpr Nanos drain_time = 100_ms;  // of a process that leaves

}  // namespace

class Simulation::Recorder : public Actions {
 public:
  Recorder(Simulation& simulation, int rank) : simulation_(simulation), rank_(rank) {}
  void send(size_t link, const Message& message) override { simulation_.send(rank_, link, message); }
  void leave(const Verdict& verdict) override { simulation_.on_left(rank_, verdict); }
  void notice(Notice, int) override { ++simulation_.at_rank(rank_).notices; }
  void pace(const Pace& pace) override { simulation_.at_rank(pace.rank).paces.push_back(pace.seconds); }

 private:
  Simulation& simulation_;
  int rank_;
};

Simulation::Simulation(const SimulationOptions& options)
    : options_(options), random_(options.seed, "control simulation") {
  const int size = options.nodes * options.ranks_per_node;
  std::vector<int> nodes;
  for (int r = 0; r < size; ++r) nodes.push_back(r / options.ranks_per_node);
  partition_.assign(static_cast<size_t>(options.nodes), 0);
  processes_.resize(static_cast<size_t>(size));
  waiting_.resize(static_cast<size_t>(size));
  const Topology root = make_topology(0, nodes, options.arity);
  for (int r = 0; r < size; ++r) {
    topologies_.push_back(make_topology(r, nodes, options.arity));
    topologies_.back().node_of = root.node_of;
  }
  for (int r = 0; r < size; ++r) {
    const auto& links = topology(r).links;
    directions_.emplace_back(links.size());
    peers_.emplace_back();
    for (const Link& link : links) {
      uint32_t back = 0;
      if (link.up) {
        const auto& theirs = topology(link.rank).links;
        while (theirs[back].rank != r) ++back;
      }
      peers_.back().emplace_back(link.rank, back);
    }
    Process& p = at_rank(r);
    p.ran = static_cast<Nanos>(uniform() * 1e9);  // beats of different ranks are not in step
    p.protocol = std::make_unique<Protocol>(topology(r), options.limits, phase_name, p.ran);
    p.tick_at = p.ran;
    push(p.ran, What::tick, r);
  }
  push(options.step, What::step, 0);
}

void Simulation::push(Nanos time, What what, int process, uint32_t link, uint32_t index, uint8_t how) {
  queue_.push({time, order_++, what, how, process, link, index});
}

void Simulation::at(Nanos time, std::function<void()> action) {
  actions_.push_back(std::move(action));
  push(time, What::action, 0, 0, static_cast<uint32_t>(actions_.size() - 1));
}

void Simulation::run_until(Nanos time) {
  while (!queue_.empty() && queue_.top().time <= time) {
    const Event event = queue_.top();
    queue_.pop();
    now_ = event.time;
    ++events;
    handle(event);
  }
  now_ = time;
}

void Simulation::handle(const Event& event) {
  if (event.what == What::action) return actions_[event.index]();
  if (event.what == What::step) {
    // A rank that was held up enters the step late.
    bool complete = std::ranges::all_of(partition_, [&](char side) { return side == partition_[0]; });
    for (Process& p : processes_) {
      if (p.alive && !p.paused && !p.hung && !p.evaluating) p.entered = step_;
      complete &= p.entered == step_;
    }
    if (complete) ++step_, stepped_ = now_;
    return push(now_ + options_.step, What::step, 0);
  }
  Process& p = at_rank(event.process);
  if (!p.alive || p.left) return;
  if (p.paused) {
    if (event.what != What::tick) waiting_[static_cast<size_t>(event.process)].push_back(event);
    return;
  }
  switch (event.what) {
    case What::tick:
      if (event.time != p.tick_at) return;  // superseded
      call(event.process, [&](Protocol& protocol, Actions& actions) {
        const auto& links = topology(event.process).links;
        for (size_t i = 0; i < links.size(); ++i) {
          const Process& other = process(links[i].rank);
          if (links[i].local && protocol.silence(i, now_) > 2_s && other.alive && other.paused)
            protocol.on_process_state(i, other.debugged ? 't' : 'T');
        }
        const Nanos gap = now_ - p.ran;
        p.ran = now_;
        protocol.on_tick(now_, gap, actions);
      });
      return;
    case What::message:
      return deliver(event.process, event.link, event.index);
    case What::closed:
      return call(event.process, [&](Protocol& protocol, Actions& actions) {
        protocol.on_closed(event.link,
                           {static_cast<Closed::How>(event.how), static_cast<int>(event.index) - 1}, now_,
                           actions);
      });
    case What::connected:
      return call(event.process, [&](Protocol& protocol, Actions& actions) {
        protocol.on_connected(event.link, now_, actions);
      });
    default:
      return;
  }
}

void Simulation::call(int rank, const std::function<void(Protocol&, Actions&)>& function) {
  Process& p = at_rank(rank);
  Recorder recorder(*this, rank);
  p.protocol->on_local(sample(rank), now_);
  function(*p.protocol, recorder);
  schedule_tick(rank);
}

void Simulation::schedule_tick(int rank) {
  Process& p = at_rank(rank);
  if (p.left) return;
  const Nanos at = std::max(p.protocol->deadline(), now_ + 1_ms);
  if (p.tick_at <= now_ || at < p.tick_at) {
    p.tick_at = at;
    if (at < 1'000'000'000_s) push(at, What::tick, rank);
  }
}

StatusSample Simulation::sample(int rank) const {
  const Process& p = process(rank);
  StatusSample s;
  s.step = step_;
  s.progress = static_cast<uint64_t>(step_);
  s.median_step = options_.step;
  s.own = static_cast<Nanos>(0.5 * p.slowness * static_cast<double>(step_ * options_.step));
  s.phase = p.evaluating ? 1 : 0;
  s.in_phase = now_ - stepped_;
  const Nanos late = now_ - stepped_ - options_.step;
  s.over_limit = std::min(late, now_ - p.evaluated) > options_.hang_limit && !p.evaluating;
  if (late > 100_ms && p.entered == step_) {
    s.wait.group = 1;
    s.wait.ranks = static_cast<uint32_t>(size());
    s.wait.sequence = static_cast<uint64_t>(step_);
    s.wait.waiting = late;
    s.wait.text.assign("all_reduce of dp");
  }
  return s;
}

Nanos Simulation::delay(bool local) {
  if (local) return 20'000 + static_cast<Nanos>(uniform() * 1e6);
  Nanos d = 100'000 + static_cast<Nanos>(uniform() * 5e6);
  if (options_.loss > 0)
    for (Nanos again = 200_ms; uniform() < options_.loss; again *= 2) d += again;
  return d;
}

bool Simulation::cut(int a, int b) const {
  return partition_[static_cast<size_t>(node_of(a))] != partition_[static_cast<size_t>(node_of(b))];
}

bool Simulation::connected(int rank, size_t link) const {
  const int other = topology(rank).links[link].rank;
  return process(rank).alive && process(other).alive && !cut(rank, other);
}

void Simulation::send(int from, size_t link, const Message& message) {
  const auto [to, back] = peer(from, link);
  ++messages;
  if (to == 0) ++root_messages;
  largest_message = std::max<size_t>(largest_message, message.length);
  Direction& d = direction(to, back);
  if (!process(to).alive || process(to).left) return;
  uint32_t index;
  if (free_frames_.empty()) {
    index = static_cast<uint32_t>(frames_.size());
    frames_.emplace_back();
  } else {
    index = free_frames_.back();
    free_frames_.pop_back();
  }
  frames_[index].message = message;
  frames_[index].epoch = d.epoch;
  most_in_flight = std::max<size_t>(most_in_flight, ++d.in_flight);
  if (cut(from, to)) return d.held.push_back(index);
  d.arrived = std::max(d.arrived, now_ + delay(topology(from).links[link].local));
  push(d.arrived, What::message, to, back, index);
}

void Simulation::deliver(int rank, uint32_t link, uint32_t index) {
  Direction& d = direction(rank, link);
  --d.in_flight;
  const bool stale = frames_[index].epoch != d.epoch;
  const Message message = frames_[index].message;
  free_frames_.push_back(index);
  if (stale) return;
  if (!d.damaged)
    return call(rank, [&](Protocol& protocol, Actions& actions) {
      protocol.on_message(link, message, now_, actions);
    });
  // A refused frame: both ends close, and the child connects again.
  d.damaged = false;
  const auto [other, back] = peer(rank, link);
  ++d.epoch;
  ++direction(other, back).epoch;
  const Nanos again = now_ + 20_ms + static_cast<Nanos>(uniform() * 2e8);
  push(now_, What::closed, rank, link, 0, static_cast<uint8_t>(Closed::How::failed));
  push(now_ + 5_ms, What::closed, other, back, 0, static_cast<uint8_t>(Closed::How::ended));
  push(again, What::connected, rank, link);
  push(again, What::connected, other, back);
}

void Simulation::kill(int rank, int wait_status) {
  if (!process(rank).alive) return;
  at_rank(rank).alive = false;
  for (size_t i = 0; i < topology(rank).links.size(); ++i) {
    const auto [other, back] = peer(rank, i);
    if (cut(rank, other)) continue;
    Direction& d = direction(other, back);
    const bool local = topology(rank).links[i].local;
    d.arrived = std::max(d.arrived, now_ + delay(local));
    push(d.arrived, What::closed, other, back, local ? static_cast<uint32_t>(wait_status + 1) : 0,
         static_cast<uint8_t>(Closed::How::ended));
  }
}

void Simulation::node_down(int node) {
  for (int r = 0; r < size(); ++r)
    if (node_of(r) == node) at_rank(r).alive = false;
}

void Simulation::pause(int rank) {
  at_rank(rank).paused = true;
}

void Simulation::resume(int rank) {
  Process& p = at_rank(rank);
  if (!p.paused || !p.alive) return;
  p.paused = p.debugged = false;
  std::vector<Event> events = std::move(waiting_[static_cast<size_t>(rank)]);
  waiting_[static_cast<size_t>(rank)].clear();
  for (const Event& event : events) handle(event);  // drained before any deadline is judged
  p.tick_at = now_;
  push(now_, What::tick, rank);
}

void Simulation::hang(int rank) {
  at_rank(rank).hung = true;
}
void Simulation::evaluate(int rank, bool on) {
  at_rank(rank).evaluating = on;
  at_rank(rank).evaluated = now_;
}
void Simulation::debug(int rank) {
  at_rank(rank).debugged = true;
  pause(rank);
}
void Simulation::damage(int rank) {
  direction(rank, 0).damaged = true;
}

void Simulation::partition(const std::vector<int>& nodes) {
  std::ranges::fill(partition_, 0);
  for (int n : nodes) partition_[static_cast<size_t>(n)] = 1;
  if (!nodes.empty()) return;
  for (int r = 0; r < size(); ++r)
    for (size_t i = 0; i < directions_[static_cast<size_t>(r)].size(); ++i) {
      Direction& d = direction(r, i);
      const std::vector<uint32_t> held = std::move(d.held);
      d.held.clear();
      for (uint32_t index : held) {
        d.arrived = std::max(d.arrived, now_ + delay(false));
        push(d.arrived, What::message, r, static_cast<uint32_t>(i), index);
      }
    }
}

void Simulation::fail(int rank, const Suspicion& suspicion) {
  if (!process(rank).runs()) return;
  call(rank, [&](Protocol& protocol, Actions& actions) {
    Suspicion s = suspicion;
    s.when = now_;
    protocol.on_failure(s, now_, actions);
  });
}

void Simulation::crash(int rank, std::string_view words) {
  Suspicion last;
  last.evidence = Evidence::process_exit;
  last.kind = Kind::rank_killed;
  last.text.assign(words);
  fail(rank, last);
  at(now_ + 2_ms, [this, rank] { kill(rank, 11); });
}

void Simulation::finish(int rank) {
  if (process(rank).runs())
    call(rank, [&](Protocol& protocol, Actions& actions) { protocol.on_finish(now_, actions); });
}

void Simulation::on_left(int rank, const Verdict& verdict) {
  Process& p = at_rank(rank);
  p.left = true;
  p.left_at = now_;
  p.verdict = verdict;
  for (size_t i = 0; i < topology(rank).links.size(); ++i) {
    const auto [other, back] = peer(rank, i);
    if (topology(rank).links[i].local && process(other).paused && process(other).alive &&
        !process(other).debugged)
      at(now_ + 1_ms, [this, r = other] { resume(r); });  // SIGCONT
    if (cut(rank, other)) continue;
    Direction& d = direction(other, back);
    d.arrived = std::max(d.arrived, now_ + drain_time);
    push(d.arrived, What::closed, other, back, 0, static_cast<uint8_t>(Closed::How::ended));
  }
}

}  // namespace nrl::test

#pragma once
// A run of processes on a virtual clock, each with the product's Protocol: delays, loss, pauses, partitions,
// damaged frames and deaths from one seed. Links deliver in order, as TCP does: a lost packet delays those
// after it.

#include <functional>
#include <memory>
#include <queue>
#include <string>
#include <utility>
#include <vector>

#include "core/base/philox.h"
#include "parallel/control/protocol.h"

namespace nrl::test {

using namespace nrl::control;

struct SimulationOptions {
  int nodes = 4, ranks_per_node = 1, arity = tree_arity;
  uint64_t seed = 0;
  Nanos step = 500_ms;      ///< of training; a step completes only if every rank can take part
  Nanos hang_limit = 60_s;  ///< of the watchdog
  double loss = 0;          ///< share of lost packets between nodes
  Limits limits;
};

class Simulation {
 public:
  explicit Simulation(const SimulationOptions& options);

  /// Runs `action` at a time.
  void at(Nanos time, std::function<void()> action);
  void run_until(Nanos time);
  Nanos now() const { return now_; }
  int size() const { return static_cast<int>(processes_.size()); }

  // Faults, now.
  void kill(int rank, int wait_status = -1);
  void node_down(int node);  ///< power or cable: nothing closes its links
  void pause(int rank);      ///< SIGSTOP, or a process that gets no processor: no thread of it runs
  void resume(int rank);
  void hang(int rank);               ///< the main thread only
  void evaluate(int rank, bool on);  ///< a long phase within its limit, for which the others wait
  void debug(int rank);              ///< pause with process state t
  void partition(const std::vector<int>& nodes);  ///< cuts them from the rest; empty: heals
  void damage(int rank);  ///< the next frame to this leader from its parent is refused
  void fail(int rank, const Suspicion& suspicion);
  void crash(int rank, std::string_view words);  ///< tells its last words, and dies a little later
  void finish(int rank);

  struct Process {
    std::unique_ptr<Protocol> protocol;
    bool alive = true, paused = false, hung = false, evaluating = false, debugged = false, left = false;
    Nanos ran = 0, tick_at = 0, left_at = 0, evaluated = 0;
    Verdict verdict;
    int notices = 0;
    int64_t entered = 0;       // step of which the rank has entered the last collective
    double slowness = 1;       // times the own work of the others
    std::vector<float> paces;  // of the rank, as the root got them
    bool runs() const { return alive && !paused && !left; }
  };
  void slow_down(int rank, double factor) { at_rank(rank).slowness = factor; }
  const Process& process(int rank) const { return processes_[static_cast<size_t>(rank)]; }
  bool has_lease() const { return processes_[0].runs() && processes_[0].protocol->has_lease(now_); }
  bool connected(int rank, size_t link) const;  ///< both ends are alive and not cut from each other
  const Topology& topology(int rank) const { return topologies_[static_cast<size_t>(rank)]; }
  int node_of(int rank) const { return topologies_[0].node_of_rank(rank); }
  int64_t step() const { return step_; }

  int64_t messages = 0, events = 0, root_messages = 0;
  size_t largest_message = 0, most_in_flight = 0;  ///< payload bytes; frames of one direction of a link

 private:
  class Recorder;
  enum class What : uint8_t { tick, message, closed, connected, action, step };
  struct Event {
    Nanos time;
    uint64_t order;
    What what;
    uint8_t how;
    int32_t process;
    uint32_t link, index;
    bool operator>(const Event& other) const {
      return std::pair(time, order) > std::pair(other.time, other.order);
    }
  };
  struct Direction {  // frames to (process, link)
    Nanos arrived = 0;
    uint32_t epoch = 0, in_flight = 0;
    bool damaged = false;
    std::vector<uint32_t> held;  // by a partition: TCP sends them again
  };
  struct Frame {
    Message message;
    uint32_t epoch = 0;
  };

  double uniform() { return random_.uniform(drawn_++); }
  Nanos delay(bool local);
  void push(Nanos time, What what, int process, uint32_t link = 0, uint32_t index = 0, uint8_t how = 0);
  void handle(const Event& event);
  void deliver(int rank, uint32_t link, uint32_t index);
  void send(int from, size_t link, const Message& message);
  void schedule_tick(int rank);
  void call(int rank, const std::function<void(Protocol&, Actions&)>& function);
  void on_left(int rank, const Verdict& verdict);
  bool cut(int a, int b) const;
  StatusSample sample(int rank) const;
  Process& at_rank(int rank) { return processes_[static_cast<size_t>(rank)]; }
  Direction& direction(int rank, size_t link) { return directions_[static_cast<size_t>(rank)][link]; }
  std::pair<int, uint32_t> peer(int rank, size_t link) const {
    return peers_[static_cast<size_t>(rank)][link];
  }

  SimulationOptions options_;
  PhiloxStream random_;
  uint64_t drawn_ = 0, order_ = 0;
  Nanos now_ = 0, stepped_ = 0;
  int64_t step_ = 1;
  std::vector<Topology> topologies_;
  std::vector<Process> processes_;
  std::vector<std::vector<Direction>> directions_;
  std::vector<std::vector<std::pair<int, uint32_t>>> peers_;
  std::vector<std::vector<Event>> waiting_;  // of paused processes
  std::vector<char> partition_;              // by node
  std::vector<Frame> frames_;
  std::vector<uint32_t> free_frames_;
  std::vector<std::function<void()>> actions_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> queue_;
};

}  // namespace nrl::test

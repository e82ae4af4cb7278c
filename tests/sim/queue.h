#pragma once
// Items in the streams of a simulated device: pieces of work, events, captured graphs.

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/device/runtime.h"
#include "tests/sim/memory.h"
#include "tests/sim/stream_thread.h"

namespace nrl::sim {

using Closure = std::function<void()>;

/// The state of one record() of an event.
struct Point {
  bool done = false;
  double time_ms = 0;
};

/// Captured work: pieces, and the earlier pieces that each comes after.
struct Graph {
  struct Node {
    Closure work;
    Reach reach;
    std::vector<int> after;
  };
  std::vector<Node> nodes;
  std::shared_ptr<Point> last;  ///< end of the last launch: launches of one graph do not overlap
};

/// A capture, active or over.
struct Capture {
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
  std::thread::id thread;        ///< that began it
  const void* origin = nullptr;  ///< the stream where it began
  bool active = true;
  std::string broken;  ///< what invalidated it; empty: valid
  /// True when every node is one of `tail` or comes before one.
  bool joined(const std::vector<int>& tail) const;
};

/// A launch of a graph in flight.
class Replay {
 public:
  explicit Replay(std::shared_ptr<Graph> graph);
  bool over() const { return left_ == 0; }
  /// True when this holds the graph alone and will release its memory.
  bool last() const { return graph_.use_count() == 1; }
  /// One of the nodes that may run now.
  int take(std::mt19937_64& random);
  Graph::Node& node(int number) const { return graph_->nodes[number]; }
  void finish(int node);

 private:
  std::shared_ptr<Graph> graph_;
  std::vector<int> missing_;             // predecessors that have not run, by node
  std::vector<std::vector<int>> after_;  // successors by node
  std::vector<int> ready_;
  size_t left_;
};

struct Item {
  enum class Kind : uint8_t { work, wait, mark, graph };
  Kind kind = Kind::work;
  /// Work; freed by the stream, which the thread sanitizer models as a thread.
  std::unique_ptr<Closure> work;
  Reach reach;                     ///< work
  std::shared_ptr<Point> point;    ///< wait, mark
  std::unique_ptr<Replay> replay;  ///< graph
  std::unique_ptr<char> issued;    ///< thread sanitizer: what the host did before the call
};

struct Stream {
  uint64_t number = 0;
  std::deque<Item> queue;
  bool destroyed = false;  ///< goes when its queue is empty
  std::shared_ptr<Capture> capture;
  std::vector<int> tail;  ///< nodes that the next captured one comes after
  StreamThread thread;
};

struct EventState {
  device::EventKind kind = device::EventKind::order;
  std::shared_ptr<Point> last;       ///< null: never recorded
  std::shared_ptr<Capture> capture;  ///< its last record() was captured here
  std::vector<int> after;            ///< the nodes it comes after
};

/// Adds the elements of `more` that `nodes` lacks.
void merge(std::vector<int>& nodes, const std::vector<int>& more);

}  // namespace nrl::sim

#pragma once
// Telemetry of a run: a thread on the first rank of every node samples GPUs and host; rank 0 gets the samples
// of all nodes and the work of all ranks, and writes them to telemetry.jsonl.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "apps/monitor/host_stats.h"
#include "core/io/json.h"

namespace nrl::monitor {

inline constexpr const char* telemetry_file = "telemetry.jsonl";

/// A node at one time.
struct NodeSample {
  std::string host = {};
  Values values = {};                   ///< HostStats::node(), and "gpu.J.util", ... of its GPU number J
  std::vector<std::string> notes = {};  ///< "gpu 1: clock 1095 of 1980 MHz: temperature"
};

/// The work of a rank since the previous telemetry.
struct RankSample {
  int rank = 0, node = 0;
  double own_ms = 0;      ///< per step: of everything but waiting for other ranks
  double waiting_ms = 0;  ///< per step: exposed communication
  double score = 1;       ///< least own_ms of all ranks / own_ms; 1 if the latter is 0
  Values values = {};     ///< HostStats::process()
};

struct Telemetry {
  int64_t step = 0;
  double time = 0;  ///< seconds since the epoch
  std::vector<NodeSample> nodes = {};
  std::vector<RankSample> ranks = {};
};

/// A rank below `slow` is a straggler; below `slower` it holds the others up noticeably.
inline constexpr double slow_score = 0.9, slower_score = 0.7;

/// {"step", "time", "nodes": [{"host", "values": {...}, "notes": [...]}], "ranks": [{"rank", "node",
/// "own_ms", "waiting_ms", "score", "values": {...}}]}.
JsonValue to_json(const Telemetry& telemetry);
/// Throws Error(Exit::data) with the place for anything else. Unknown members are ignored.
Telemetry telemetry_from(const JsonValue& json);

/// One name for each number: "node.0.cpu", "node.0.gpu.1.util", "rank.3.score", ...; bytes as "_gb".
Values flat(const Telemetry& telemetry);

/// A rank's part of a gathering, as text; `node` is null except on the first rank of a node.
std::string contribution(const RankSample& rank, const NodeSample* node);
/// The telemetry of all ranks' texts, with scores. Throws Error(Exit::data) for a text that is none.
Telemetry joined_telemetry(int64_t step, double time, std::span<const std::string> contributions);

/// Samples a node in a thread of its own: a driver that hangs stops only that.
class NodeSampler {
 public:
  struct Options {
    double interval = 10;                               ///< seconds
    std::vector<std::string> gpus = {};                 ///< uuids; empty: NVML is not opened
    std::string host = {}, directory = {};              ///< HostStats
    std::string nvml = "libnvidia-ml.so.1", root = {};  ///< for tests
  };
  /// Starts the thread; the first sample follows immediately.
  explicit NodeSampler(Options options);
  /// Waits for the thread for at most a second; one that hangs in the driver is left to the end of the
  /// process.
  ~NodeSampler();
  NodeSampler(const NodeSampler&) = delete;
  NodeSampler& operator=(const NodeSampler&) = delete;

  /// The latest sample; without values before the first one.
  NodeSample latest() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace nrl::monitor

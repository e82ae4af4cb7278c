#pragma once
// communication.json: what a run communicated, by group and operation.

#include <string>
#include <vector>

#include "apps/monitor/facts.h"
#include "core/io/json.h"

namespace nrl::monitor {

/// In the run's log_dir; written at the end of a run of several ranks.
inline constexpr const char* communication_file = "communication.json";

struct Communication {
  int64_t steps = 0;  ///< in which the operations took place
  std::vector<CommFacts> operations = {};
};

JsonValue to_json(const Communication& communication);
/// Inverse of to_json(). Error(Exit::data), naming `where`, if the value is something else.
Communication communication_from(const JsonValue& json, const std::string& where);

/// A table, per step: calls, bytes, bytes sent, time, exposed time, hidden share, bus bandwidth, algorithm.
std::string text_table(const Communication& communication);

}  // namespace nrl::monitor

#pragma once
// nrl-train tune layout: the layouts that the search estimates to be fastest, measured on the ranks launched.

#include <string>
#include <vector>

#include "parallel/comm/world/world.h"

namespace nrl::tune {

struct LayoutArgs {
  std::string config;                  ///< a YAML file
  std::vector<std::string> overrides;  ///< "key=value"
  int measure = 5;                     ///< layouts to measure beside the configured one
  int rounds = 3;                      ///< in which all layouts are timed in turn
  int steps = 5;                       ///< timed in each round
  std::string json;                    ///< file to write; empty: none
};

/// Collective. Searches as `plan --search` does for the ranks of `world`, times steps of the best layouts and
/// of the configured one on random tokens, and prints estimate and measurement of each with the keys of the
/// fastest. Returns the exit code.
int tune_layout(comm::World& world, const LayoutArgs& args);

}  // namespace nrl::tune

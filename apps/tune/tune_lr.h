#pragma once
// nrl-train tune lr: a range test of the learning rate on the configured data.

#include <cstdint>
#include <string>
#include <vector>

#include "parallel/comm/world/world.h"

namespace nrl::tune {

struct LrArgs {
  std::string config;                  ///< a YAML file
  std::vector<std::string> overrides;  ///< "key=value"
  double from = 1e-7, to = 1e-1;       ///< learning rates as the optimizer gets them, after lr_scaling
  int64_t steps = 100;
  std::string json, html;  ///< files to write; empty: none
};

/// Collective. Trains from the configured weights on the configured data, with a learning rate that grows in
/// equal ratios, until the loss diverges or the steps are made. Writes no checkpoint and nothing in LOG_DIR.
/// Prints the curve, the rate where the loss falls most, the largest one to train with, and the line of
/// YAML. Returns the exit code: 79 where the loss never falls.
int tune_lr(comm::World& world, const LrArgs& args);

}  // namespace nrl::tune

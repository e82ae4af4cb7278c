#pragma once
// `nrl-train verify`: proves that a layout of ranks trains as one rank does.

#include <cstdint>
#include <string>
#include <vector>

#include "parallel/comm/world/world.h"

namespace nrl::verify {

/// all: every valid layout of the ranks instead of the configured one; list: their names only.
enum class Which : uint8_t { configured, all, list };

struct Options {
  std::string config;                  ///< YAML file
  std::vector<std::string> overrides;  ///< "key=value"
  int64_t steps = 2;
  /// > 0: so many steps as in training, compared when they are done, then a checkpoint and as many again
  /// (run_undisturbed_trial()); `steps` is not used.
  int64_t undisturbed = 0;
  bool random_tokens = false;  ///< also if the configured data exists
  Which layouts = Which::configured;
  int64_t sample = 0;  ///< of all layouts, so many valid ones, always the same; 0: all
};

/// Collective. Prints the comparison on rank 0. Returns Exit::ok, or Exit::internal if a layout differs, on
/// all ranks. Errors end in AgreedExit.
int verify(comm::World& world, const Options& options);

}  // namespace nrl::verify

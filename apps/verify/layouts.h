#pragma once
// The layouts of a number of ranks.

#include <string>
#include <vector>

#include "core/config/config.h"

namespace nrl::verify {

struct Layout {
  std::string name;                    ///< "tp 2 x dp 2  optim  overlap"
  std::vector<std::string> overrides;  ///< "key=value"
};

/// Every combination of axis sizes whose product is `ranks`, and of sizes of the expert grid, with the values
/// that the option table allows for the options of its axes, and with microbatches as configured and of one
/// sequence. Not all are valid: loading the configuration with the overrides decides.
std::vector<Layout> all_layouts(const Config& config, int64_t layers, int ranks);

}  // namespace nrl::verify

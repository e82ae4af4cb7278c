#pragma once
// The objective of each algorithm.

#include <memory>

#include "apps/engine/objective.h"
#include "core/config/config.h"

namespace nrl::engine {

/// The objective of a configuration.
std::shared_ptr<Objective> make_objective(const Config& config);

}  // namespace nrl::engine

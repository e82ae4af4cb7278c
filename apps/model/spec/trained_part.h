#pragma once
// Checks and counts of the part of a model that a run trains (adapters.h), from its parameters.

#include <string>
#include <vector>

#include "apps/model/spec/spec.h"

namespace nrl::model {

/// A problem of a pattern. `key`: "policy.freeze", ...
struct TrainedPartProblem {
  std::string key, text, fix;
};
/// Everything that is wrong with ModelSpec::trained: patterns that select nothing, or what cannot have an
/// adapter or be frozen alone.
std::vector<TrainedPartProblem> trained_part_problems(const ModelSpec& spec);

/// Counts what the FLOPs of a step depend on. Must be called when ModelSpec::trained has been set and has no
/// problems.
void count_trained(ModelSpec& spec);

}  // namespace nrl::model

#pragma once
// Rules of context parallelism that depend on the model.

#include "apps/model/spec.h"
#include "core/config/result.h"

namespace nrl::train {

/// Adds what context parallelism does not support with this model. Heads are judged per tensor-parallel rank.
void check_context_parallel(const ConfigResult& result, const model::ModelSpec& spec, Diagnostics& out);

}  // namespace nrl::train

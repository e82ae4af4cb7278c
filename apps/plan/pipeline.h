#pragma once
// The pipeline of a configuration: schedules of its stages, and what they cost.

#include <span>
#include <string>
#include <vector>

#include "apps/model/spec/layout.h"
#include "apps/model/spec/parameters.h"
#include "apps/model/spec/recompute_rule.h"
#include "core/config/load.h"
#include "parallel/pipeline/schedule.h"
#include "precision/recipe.h"

namespace nrl::plan {

/// The configured stages and chunks, from the first stage; not divided otherwise.
model::ModelLayout stages_of(const DistributedConfig& config);

/// The schedule of an optimizer step of `microbatches` in a layout made by model_layout().
pipeline::ScheduleOptions schedule_options(const Config& config, const model::ModelLayout& layout,
                                           int64_t microbatches);

/// ScheduleOptions::pools of a rank's stage: chunks share a pool if their blocks have the same slots in the
/// same order, and the same of these are kept, recomputed and offloaded. Embedding and head make no
/// difference. `parameters`: of the rank; the rules: by block of the model.
std::vector<int> stash_pools(const model::ModelSpec& spec, const model::ModelLayout& layout,
                             const model::ParameterList& parameters, const precision::Recipe& recipe,
                             std::span<const model::RecomputeRule> recompute,
                             std::span<const model::OffloadRule> offload);

/// The bubble of a schedule: the largest share of a step in which a stage computes nothing, if the passes of
/// every chunk take equal times, a dgrad and a wgrad each as long as a forward pass, and messages none.
double bubble(const pipeline::ScheduleOptions& options);

/// Problems of the layers of a model in the configured pipeline, at the key that is wrong.
Diagnostics check_pipeline(const ConfigResult& result, int64_t layers);

/// For messages: "2 stages of layers 0-5 | 6-11, 1f1b, bubble 11 %"; empty with one stage.
std::string pipeline_line(const Config& config, int64_t layers, int64_t microbatches);

}  // namespace nrl::plan

#pragma once
// Everything a training run will allocate, decided before anything is: the flat layout, the decoder's slots,
// the batch tensors. `nrl-train plan` prints it; the trainer allocates exactly it.

#include <memory>
#include <string>
#include <vector>

#include "apps/model/decoder.h"
#include "apps/plan/batch.h"
#include "apps/plan/grid_place.h"
#include "apps/plan/param_groups.h"
#include "core/config/load.h"
#include "memory/plan.h"

namespace nrl::plan {

/// Steps of an engine whose results are not collected yet (engine::StepScalars).
inline constexpr int max_steps_in_flight = 2;

struct RunPlan {
  model::ModelSpec spec;
  model::ParameterList parameters;
  BatchPlan batch;
  int64_t sequence_length = 0;
  DeviceType device = DeviceType::cpu;
  int threads = 1;  ///< Exec::partials()
  precision::Recipe recipe;
  std::vector<std::string> recompute_modules;

  memory::MemoryPlan memory;
  std::vector<ParamGroup> groups;
  memory::BufferId scalars = -1, host_scalars = -1, evaluation = -1;
  std::unique_ptr<BatchTensors> tensors;
  std::unique_ptr<model::Decoder> decoder;
};

/// The solved plan of the rank at `place` with `threads` CPU threads. The plan lives on the heap because the
/// decoder refers into it. `config` must have passed validate_for_world(). No device is needed for the plan
/// of one. `own_weights`: for an objective that computes the weights of tokens (BatchShape::weights).
std::unique_ptr<RunPlan> make_run_plan(const Config& config, model::ModelSpec spec, const BatchPlan& batch,
                                       const GridPlace& place, DeviceType device, int threads,
                                       bool own_weights = false);

/// How the rank at `place` holds the parameters of a group.
GroupOptions group_options(const Config& config, const BatchPlan& batch, const GridPlace& place,
                           const precision::Recipe& recipe);

/// policy.precision for this device: auto is bf16 on a GPU and f32 on a CPU, where bf16 saves memory only.
precision::Recipe recipe_for(const Config& config, DeviceType device);

/// Memory by category, for people: "weights 475 MiB  gradients ...  = 2.31 GiB".
std::string memory_line(const memory::MemoryPlan& plan);

}  // namespace nrl::plan

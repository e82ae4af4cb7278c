#pragma once
// The run that a layout is compared with: the same training on rank 0 alone, without parallelism, sharding,
// overlap or recomputation.

#include <memory>

#include "apps/engine/engine.h"
#include "apps/train/start/placement.h"

namespace nrl::verify {

/// The configuration of one rank: model, data, batch and precision of `config`, and nothing that divides,
/// delays or recomputes work.
ConfigResult reference_config(const ConfigResult& config);

/// The same global batch in the same microbatches, all of them on one rank. `global_aux_loss`: those of all
/// data-parallel ranks at a time are one, as that loss counts them together.
BatchPlan reference_batch(const BatchPlan& batch, bool global_aux_loss = false);

/// Fails with Exit::out_of_memory, naming the key that needs most, if the machine or the GPU does not have
/// room for the configured run (`plan` on each rank of the machine) and the reference.
std::unique_ptr<plan::RunPlan> make_reference_plan(const ConfigResult& config, const plan::RunPlan& plan,
                                                   const train::Placement& placement, int local_ranks);

/// The groups of one rank, on the device of a placement.
struct ReferenceGroups {
  std::unique_ptr<comm::Communicator> self;
  std::unique_ptr<parallel::Groups> groups;
};
/// Called by rank 0 alone. `world` and `placement` must outlive the groups.
ReferenceGroups make_reference_groups(comm::World& world, const train::Placement& placement);

/// Options of the reference's engine for those of the layout's.
engine::TrainingOptions reference_options(const engine::TrainingOptions& options);

}  // namespace nrl::verify

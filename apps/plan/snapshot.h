#pragma once
// The parts of a rank's memory that it saves in a checkpoint, and the memory of a copy of them, from which
// they are saved during the next steps.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "apps/model/spec/parameters.h"
#include "apps/plan/param_groups.h"
#include "apps/plan/run_plan.h"
#include "core/config/load.h"

namespace nrl::plan {

/// Contiguous bytes of one of a group's tensors that this rank saves, or needs to read what it saves.
struct SavedPart {
  enum class Of : uint8_t { weights, state, scales, errors, sum_errors };
  Of of = Of::weights;
  size_t state = 0;  ///< of state and scales: index into ParamGroup::state
  int64_t begin = 0, bytes = 0;
};
/// In the order of the tensors, disjoint. `adapters`: only weights of adapters are saved, else all others.
/// `optimizer`: the state is saved. Offloaded state is left out.
std::vector<SavedPart> saved_parts(const model::ParameterList& parameters, const ParamGroup& group,
                                   bool adapters, bool optimizer);

/// Bytes of a snapshot of these parts, each of which begins at a multiple of snapshot_align.
inline constexpr int64_t snapshot_align = 64;
int64_t snapshot_bytes(const Config& config, const RunPlan& plan);

/// False if checkpointing.is_async is false, or if no checkpoint is saved before the end of the run, or, for
/// auto, if the optimizer state is offloaded: its update and the copy would use the same bandwidth.
bool wants_snapshot(const Config& config);

}  // namespace nrl::plan

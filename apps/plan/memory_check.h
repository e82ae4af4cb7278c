#pragma once
// Does a run fit into the memory it will have? What does not is refused with the key that asks for too much.

#include <array>
#include <optional>

#include "apps/model/spec.h"
#include "apps/plan/run_plan.h"
#include "core/config/load.h"

namespace nrl::plan {

/// Bytes by memory::Category.
using CategoryBytes = std::array<double, memory::category_count>;

/// A lower bound of what a rank needs, from the sizes alone and in floating point: for configurations whose
/// plan could not even be made. The batches that the data loader reads ahead are counted with the data.
CategoryBytes least_memory(const Config& config, const model::ModelSpec& spec, const BatchPlan& batch,
                           DeviceType device);
/// What the plan of a rank takes, the data loader's buffers included where they share its memory.
CategoryBytes planned_memory(const Config& config, const RunPlan& plan);

/// A problem (exit 71) where `need` exceeds the `capacity` of `owner` ("this machine", "the GPU") that a rank
/// may use: it names the largest category, and the key in it that is furthest from what is usual.
std::optional<Diagnostic> memory_shortage(const ConfigResult& result, const model::ModelSpec& spec,
                                          const BatchPlan& batch, const CategoryBytes& need, double capacity,
                                          std::string_view owner);

/// Fails with that problem where the plan does not fit.
void require_memory(const ConfigResult& result, const RunPlan& plan, size_t capacity, std::string_view owner);

}  // namespace nrl::plan

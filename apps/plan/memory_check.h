#pragma once
// Checks whether a run fits into memory; if not, names the configuration key that most likely
// needs to change.

#include <array>
#include <optional>

#include "apps/model/spec/spec.h"
#include "apps/plan/run_plan.h"
#include "core/config/load.h"

namespace nrl::plan {

/// Bytes by memory::Category.
using CategoryBytes = std::array<double, memory::category_count>;

double total(const CategoryBytes& bytes);

/// A lower bound of a rank's memory, computed from the sizes in floating point: for configurations that are
/// too large to plan. Includes the batches that the data loader prefetches.
CategoryBytes minimum_memory(const Config& config, const model::ModelSpec& spec, const BatchPlan& batch,
                             DeviceType device);
/// The memory of a rank's plan, plus the data loader's buffers on a CPU and the snapshot of
/// checkpointing.is_async: true.
CategoryBytes planned_memory(const Config& config, const RunPlan& plan);

/// True if checkpoints are saved during the next steps, from a snapshot (checkpointing.is_async), on a rank
/// of which `capacity` bytes of the host's memory are available; 0: unknown, enough. auto does so where the
/// snapshot fits beside everything else.
bool takes_snapshot(const Config& config, const RunPlan& plan, double capacity);
/// The rest of `capacity` for it.
double room_for_snapshot(const Config& config, const RunPlan& plan, double capacity);

/// A problem (exit 71) if `need` exceeds `capacity`, the memory of `owner` ("this machine", "the
/// GPU") that is available to a rank. It names the largest category and, of its keys, the one with
/// the most unusual value.
std::optional<Diagnostic> memory_shortage(const ConfigResult& result, const model::ModelSpec& spec,
                                          const BatchPlan& batch, const CategoryBytes& need, double capacity,
                                          std::string_view owner);

/// The same of a microbatch that auto chose, which memory.max_memory of `memory` bytes limits: names that
/// key.
std::optional<Diagnostic> share_shortage(const ConfigResult& result, const model::ModelSpec& spec,
                                         const BatchPlan& batch, const CategoryBytes& need, double memory,
                                         std::string_view owner);

/// Puts changes with which the run fits into that problem, in place of the keys to lower.
void add_changes(Diagnostic& shortage, std::vector<std::string> changes);

}  // namespace nrl::plan

#pragma once
// The plans of one rank of each kind of pipeline stage.

#include <memory>
#include <optional>
#include <vector>

#include "apps/plan/run_plan.h"

namespace nrl::plan {

/// The plans of typical_ranks(), in their order.
struct StagePlans {
  std::vector<std::unique_ptr<RunPlan>> plans;

  /// Bytes of the rank that needs most.
  int64_t memory() const;
};

/// Plans typical_ranks() at once, on all cores. With `most`, the bytes that a rank's plan may have: one after
/// the other, up to the first that has more. All else is as for make_run_plan().
StagePlans plan_stages(const Config& config, const model::ModelSpec& spec, const BatchPlan& batch, int world,
                       DeviceType device, int threads, size_t memory,
                       const std::optional<double>& most = std::nullopt);

}  // namespace nrl::plan

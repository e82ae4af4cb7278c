#include "apps/plan/stage_plans.h"

#include <algorithm>

#include "core/base/jobs.h"
#include "core/device/cpu/parallel.h"

namespace nrl::plan {

int64_t StagePlans::memory() const {
  int64_t bytes = 0;
  for (const auto& plan : plans) bytes = std::max(bytes, plan->memory.total_bytes());
  return bytes;
}

StagePlans plan_stages(const Config& config, const model::ModelSpec& spec, const BatchPlan& batch, int world,
                       DeviceType device, int threads, size_t memory, const std::optional<double>& most) {
  const std::vector<int> ranks = typical_ranks(config, world);
  const auto plan_of = [&](int rank) {
    return make_run_plan(config, spec, batch, grid_position(config, world, rank), device, threads, {},
                         memory);
  };
  StagePlans out;
  if (most) {
    for (const int rank : ranks) {
      out.plans.push_back(plan_of(rank));
      if (static_cast<double>(out.memory()) > *most) break;
    }
    return out;
  }
  out.plans.resize(ranks.size());
  const int cores = ranks.size() > 1 ? cpu::available_cores() : 1;
  run_jobs(static_cast<size_t>(cores), ranks.size(), [&](size_t i) { out.plans[i] = plan_of(ranks[i]); });
  return out;
}

}  // namespace nrl::plan

#include "apps/engine/step_traffic.h"

namespace nrl::engine {

std::vector<plan::Traffic> step_traffic(std::unique_ptr<plan::RunPlan>& plan, const TrainingOptions& options,
                                        const ops::DryDevice& device) {
  if (plan->position.ranks() == 1) return {};
  Engine engine(std::move(plan), options, device.exec());
  std::vector<plan::Traffic> traffic = engine.dry_step(engine.objective()).traffic;
  plan = engine.release();
  return traffic;
}

}  // namespace nrl::engine

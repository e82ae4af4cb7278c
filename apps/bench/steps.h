#pragma once
// Steps of an engine on random tokens, timed.

#include <vector>

#include "apps/data/loader.h"
#include "apps/engine/engine.h"
#include "apps/train/lr_schedule.h"
#include "apps/train/report/start_phases.h"
#include "core/base/philox.h"
#include "parallel/comm/world/world.h"

namespace nrl::bench {

/// Microbatches of random tokens.
class RandomBatches {
 public:
  RandomBatches(int64_t tokens, int64_t vocab_size);
  const data::HostMicroBatch& next();

 private:
  uint64_t vocab_size_, block_ = 0;
  PhiloxStream stream_{3, "bench tokens"};
  data::HostMicroBatch batch_;
};

struct Step {
  double ms = 0, time = 0, lr = 0;  ///< `time`: wall-clock time of the result
  engine::StepResult result;
};

/// Runs `count` steps like training does: on a GPU results are collected one step late. `eager`: not as
/// graphs.
std::vector<Step> run_steps(nrl::comm::World& world, train::StartPhases& phases, engine::Engine& engine,
                            const train::LrSchedule& schedule, int64_t count, bool eager = false);

/// Of all steps but the first `warmup` ones.
double median_ms(const std::vector<Step>& steps, size_t warmup);

/// Overrides that make a configuration run `steps` steps on random tokens, without evaluations.
std::vector<std::string> random_token_overrides(int64_t steps);

}  // namespace nrl::bench

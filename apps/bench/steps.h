#pragma once
// Steps of an engine on random tokens, timed.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "apps/data/loader.h"
#include "apps/engine/engine.h"
#include "apps/monitor/start_phases.h"
#include "apps/plan/run_plan.h"
#include "apps/train/loop/lr_schedule.h"
#include "apps/train/start/placement.h"
#include "core/base/philox.h"
#include "core/io/json.h"
#include "memory/host_copies.h"
#include "parallel/comm/world/world.h"

namespace nrl::bench {

/// Microbatches of random tokens: as many as fit the plan's shape. Packed ones consist of sequences of the
/// longest length, so that a step has the plan's tokens per step, and the calls of a dry step. Numbers that
/// objectives read belong to a model for which all tokens are equally probable.
class RandomBatches {
 public:
  explicit RandomBatches(const plan::RunPlan& plan);
  const data::HostMicroBatch& next();

 private:
  void add_policy(const plan::RunPlan& plan);
  void add_teacher(int64_t topk);
  void add_sequences(const plan::RunPlan& plan);

  uint64_t vocab_size_, block_ = 0;
  PhiloxStream stream_{3, "bench tokens"};
  data::HostMicroBatch batch_;
};

struct Step {
  double ms = 0, time = 0, lr = 0;  ///< `time`: wall-clock time of the result
  engine::StepResult result;
};

/// Runs `count` steps like training does: on a GPU results are collected one step late, if they may be.
/// `eager`: not as graphs. `before` is called before each step.
std::vector<Step> run_steps(nrl::comm::World& world, monitor::StartPhases& phases, engine::Engine& engine,
                            const train::LrSchedule& schedule, int64_t count, bool eager = false,
                            const std::function<void()>& before = {});

/// Of all steps but the first `warmup` ones.
double median_ms(const std::vector<Step>& steps, size_t warmup);

/// Copies of offloaded activations in all steps but the first `warmup` ones.
struct CopySpeed {
  CopySpeed(const std::vector<Step>& steps, size_t warmup);
  int64_t steps = 0;
  memory::HostCopyStatistics sum;

  explicit operator bool() const { return sum.bytes() > 0; }
  /// Bytes and GB/s per direction, the time of copies and how much of it was exposed, per step.
  std::string text() const;
  JsonValue json() const;
};

/// HistoryEntry::machine of a run.
std::string machine_of(const train::Placement& placement, const nrl::comm::World& world);

/// What steps of a configuration took, the most of all ranks.
struct Trial {
  double step_ms = 0;       ///< median
  double used_bytes = 0;    ///< memory of the GPU, or resident memory of the process, while it trained
  CopySpeed copies{{}, 0};  ///< of this rank
};
inline constexpr int trial_warmup = 2;  ///< steps: kernel selection and page faults

/// Collective: trains `timed` steps after the warm-up ones in an engine of their own. `make_plan` runs on
/// every rank, under run_collectively().
Trial time_steps(nrl::comm::World& world, const train::Placement& placement, const ConfigResult& config,
                 const std::function<std::unique_ptr<plan::RunPlan>()>& make_plan, int64_t timed);

/// train::random_token_overrides() for `steps` steps without document boundaries.
std::vector<std::string> random_token_overrides(int64_t steps);
/// `given`, then what makes `steps` steps on random tokens at a constant learning rate of the configuration.
std::vector<std::string> trial_overrides(std::vector<std::string> given, int64_t steps);

}  // namespace nrl::bench

#pragma once
// One of the two runs of a trial: the layout on all ranks, or the reference on rank 0.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "apps/engine/engine.h"
#include "apps/plan/grid_position.h"
#include "apps/state/checkpoint.h"
#include "apps/state/resume.h"
#include "apps/train/loop/step_source.h"
#include "core/config/load.h"
#include "parallel/comm/world/world.h"

namespace nrl::verify {

/// What the report of a step says, the same on all ranks of the run.
struct Outcome {
  double loss = 0, norm = 0;
  double loss_scale = 0;  ///< of the next step; 0: none
  bool skipped = false;
  int64_t expert_rounds = 0;  ///< most exchanges of a layer with experts
};

class Learner {
 public:
  struct Setting {
    ConfigResult config;
    plan::GridPosition position;
    const parallel::Groups* groups = nullptr;
    engine::TrainingOptions options;
    ops::Exec exec;
    int threads = 1;
    std::function<std::unique_ptr<plan::RunPlan>()> make_plan;  ///< for another engine
  };
  /// Not collective: allocates the engine. `world`, `data` and the groups must outlive the learner.
  Learner(comm::World& world, Setting setting, const train::TrainData& data,
          std::unique_ptr<plan::RunPlan> plan);

  engine::Engine& engine() { return *engine_; }
  const plan::RunPlan& plan() const { return engine_->plan(); }
  const plan::GridPosition& position() const { return setting_.position; }

  /// Loads the initial weights, of which it verifies this share. Not collective.
  void initialize(train::VerifyShare share);

  /// Steps [first, first + count) follow: opens their data.
  void open(int64_t first, int64_t count);
  /// Reads the data of the next step. Collective over the run's ranks if documents mask losses.
  engine::StepInput next_step();
  /// Waits for the oldest step in flight.
  Outcome collect();
  /// Trains these steps as the step loop of training does: nothing waits for them or looks at them but the
  /// collection of their results, on a GPU one step late.
  std::vector<Outcome> train(int64_t first, int64_t count);
  engine::Objective& objective() { return engine_->objective(); }

  /// The mean loss of global batch `batch` of the data, from 1. Collective over the run's ranks.
  double evaluate(int64_t batch);

  /// Collective over `group`, which are the run's ranks. Saves a checkpoint in `store` and returns its path;
  /// fails with the same Error on all of them.
  std::string save(const std::string& store, const RankGroup& group);
  /// Not collective. Frees the engine, so that nothing of it is left, and allocates another one.
  void restart();
  /// Not collective. Resumes from a checkpoint, after restart().
  void load(const std::string& checkpoint);

 private:
  std::unique_ptr<train::StepSource> source(int64_t consumed_samples, int64_t steps) const;

  comm::World& world_;
  Setting setting_;
  const train::TrainData& data_;
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<train::StepSource> source_;
  int64_t next_ = 1;
  std::vector<train::StepSource::Totals> in_flight_;  // of the oldest first
  train::Position position_;
};

}  // namespace nrl::verify

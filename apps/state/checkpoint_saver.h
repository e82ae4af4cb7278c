#pragma once
// Saves the checkpoints of a run and locks the directories that it writes to.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "apps/engine/engine.h"
#include "apps/state/after_commit.h"
#include "apps/state/async_saver.h"
#include "apps/state/checkpoint.h"
#include "apps/state/resume.h"
#include "core/config/load.h"
#include "core/io/run_lock.h"
#include "core/io/slice_plan.h"
#include "parallel/comm/world/world.h"

namespace nrl::train {

class CheckpointSaver {
 public:
  /// Rank 0 locks the run's directories for the lifetime of the saver; fails as RunLocks. `world` and
  /// `config` must outlive the saver. `hf`: additional files of the model directory.
  CheckpointSaver(comm::World& world, const ConfigResult& config, const RunRecord& record, HfFiles hf);

  /// Null on ranks other than 0.
  const RunLocks* locks() const { return locks_.get(); }
  /// True once this rank knows that another run has taken one of the locks; rank 0 alone can know.
  bool lost_lock() const { return locks_ && !locks_->lost().empty(); }
  /// Not collective. Fails (73) on rank 0 if another run has taken a lock.
  void require_locks() const;

  /// `lease` tells if rank 0 may write in the name of the run: a save waits for it for a moment, and fails
  /// (80) without it. Called on rank 0 only; default: always.
  void set_lease(std::function<bool()> lease) { lease_ = std::move(lease); }

  /// Collective. Saves the engine's state and applies the retention policy. Returns the path; fails with the
  /// same Error on all ranks. No save may be in flight.
  std::string save(engine::Engine& engine, const Position& position);
  /// Waits on rank 0 for what follows the last save.
  void finish() {
    if (after_) after_->finish();
  }

  /// Collective: from now on saves may go on beside the steps of the engine of the snapshot. `device`: the
  /// engine's.
  void take_snapshots(std::unique_ptr<Snapshot> snapshot, device::Runtime* device);
  /// Null without take_snapshots().
  AsyncSaver* async() const { return async_.get(); }
  /// Collective. Does the same as save(), in a thread: async()->join() has the outcome. Fails with the same
  /// Error on all ranks if it cannot begin.
  void start(engine::Engine& engine, const Position& position);

 private:
  std::string write(const TrainState& state, const Position& position, const RankGroup& ranks);
  void may_publish() const;

  comm::World& world_;
  const ConfigResult& config_;
  SavePlans plans_;
  SaveOptions options_;
  std::unique_ptr<RunLocks> locks_;
  std::function<bool()> lease_;
  std::optional<AfterCommit> after_;   // on rank 0; ends before the locks are released
  std::unique_ptr<AsyncSaver> async_;  // on all ranks; its thread uses the others
};

}  // namespace nrl::train

#include "apps/state/checkpoint_saver.h"

#include <chrono>
#include <thread>
#include <utility>

#include "apps/state/rank_group.h"
#include "apps/state/run_state.h"
#include "parallel/comm/agreement.h"

namespace nrl::train {

CheckpointSaver::CheckpointSaver(comm::World& world, const ConfigResult& config, const RunRecord& record,
                                 HfFiles hf)
    : world_(world), config_(config) {
  const Config& c = config.config;
  options_.store = c.checkpointing.checkpoint_dir;
  options_.optimizer = c.checkpointing.save_optimizer;
  options_.resolved_config = dump_resolved(config);
  options_.run = record_to_json(record);
  options_.hf = std::move(hf);
  options_.base = c.policy.model_name.value_or("");
  if (world.rank() != 0) return;
  std::vector<std::string> directories{c.logger.log_dir};
  if (c.checkpointing.enabled) {
    directories.push_back(c.checkpointing.checkpoint_dir);
    after_.emplace(c.checkpointing, c.logger.log_dir);
  }
  locks_ = std::make_unique<RunLocks>(std::move(directories), supervised_identity());
}

// Another attempt may have begun while the files were written, or this rank may be cut off from the others.
void CheckpointSaver::may_publish() const {
  locks_->require_held();
  if (!lease_) return;
  // The control plane grants no lease in its first second.
  for (int waited_ms = 0; !lease_(); waited_ms += 50) {
    if (waited_ms >= 1500)
      fail(Exit::peer_lost,
           "rank 0 reaches no majority of the nodes, or a rank has failed: another attempt may write to {}. "
           "Fix: the same command resumes",
           options_.store);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

void CheckpointSaver::require_locks() const {
  if (locks_) locks_->require_held();
}

std::string CheckpointSaver::save(engine::Engine& engine, const Position& position) {
  std::unique_ptr<Staging> staging;
  const comm::ErrorConsensus consensus = comm::attempt_on_all(world_.comm(), [&] {
    engine.finish_gathers();
    staging = engine.staging();
  });
  if (consensus.code != Exit::ok) throw Error(consensus.code, consensus.message);
  return write(state_of(engine, staging.get()), position, rank_group(world_.comm()));
}

void CheckpointSaver::take_snapshots(std::unique_ptr<Snapshot> snapshot, device::Runtime* device) {
  async_ = std::make_unique<AsyncSaver>(world_, std::move(snapshot), device);
}

void CheckpointSaver::start(engine::Engine& engine, const Position& position) {
  const comm::ErrorConsensus consensus = comm::attempt_on_all(world_.comm(), [&] {
    // Gathers in flight end in memory that a snapshot reads.
    const TrainState state = state_of(engine, nullptr);
    async_->start(position.step, [this, state, position](Snapshot& snapshot, const RankGroup& ranks) {
      TrainState copy = state;
      copy.snapshot = &snapshot;
      return write(copy, position, ranks);
    });
  });
  async_->release(consensus.code == Exit::ok);
  if (consensus.code != Exit::ok) throw Error(consensus.code, consensus.message);
}

std::string CheckpointSaver::write(const TrainState& state, const Position& position,
                                   const RankGroup& ranks) {
  SaveOptions options = options_;
  options.plans = &plans_;
  if (locks_) options.before_commit = [this] { may_publish(); };
  const std::string path = save_checkpoint(state, position, options, ranks);
  if (after_) after_->committed(position.step, path);
  return path;
}

}  // namespace nrl::train

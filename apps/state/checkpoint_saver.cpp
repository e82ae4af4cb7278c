#include "apps/state/checkpoint_saver.h"

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
  locks_ = std::make_unique<RunLocks>(std::move(directories));
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
  options_.plans = &plans_;
  const std::string path =
      save_checkpoint(state_of(engine, staging.get()), position, options_, rank_group(world_.comm()));
  if (after_) after_->committed(position.step, path);
  return path;
}

}  // namespace nrl::train

#include "apps/verify/undisturbed.h"

#include <array>
#include <functional>
#include <span>
#include <utility>

#include "apps/state/rank_group.h"
#include "apps/train/launch/launch.h"
#include "apps/verify/trial_runs.h"
#include "core/base/log.h"
#include "core/io/atomic_file.h"

namespace nrl::verify {
namespace {

bool storage_error(Exit code) {
  return code == Exit::io || code == Exit::cannot_create;
}

// What a run reports of some steps and of an evaluation after them.
struct Report {
  std::vector<Outcome> steps;
  double evaluation = 0;
};

/// A directory of checkpoints; rank 0 removes it.
class Store {
 public:
  Store(const CheckpointChain& chain, std::string_view name, bool removes)
      : path_(join_path(chain.directory(), name)), removes_(removes) {}
  Store(const Store&) = delete;
  ~Store() {
    if (!removes_) return;
    try {
      remove_tree(path_);
    } catch (const Error& e) {
      log::warn("{}", e.what());
    }
  }
  const std::string& path() const { return path_; }
  void keep() { removes_ = false; }

 private:
  std::string path_;
  bool removes_;
};

class UndisturbedTrial {
 public:
  UndisturbedTrial(comm::World& world, const ConfigResult& config, const train::TrainData& data,
                   int64_t steps, CheckpointChain& chain)
      : world_(world), runs_(world, config, data, 2 * steps), steps_(steps), chain_(chain) {}

  TrialResult run() {
    Learner& layout = runs_.layout();
    const Report got = train(layout, 1);
    const Report want = train_reference(1);
    compare(Phase::trained, got, want);
    double trained = 0;
    for (const Outcome& step : want.steps) trained += step.skipped ? 0 : 1;
    world_.comm().broadcast(comm::View(std::span(&trained, 1)), 0);
    if (trained == 0)
      runs_.comparison().add({.kind = Kind::skipped,
                              .name = "",
                              .when = {.step = steps_},
                              .problem = "all steps are skipped, so that nothing is compared"});
    std::string text;
    if (runs_.comparison().ok()) text = checkpoints();
    TrialResult out = runs_.result();
    out.checkpoints = std::move(text);
    return out;
  }

 private:
  Report train(Learner& run, int64_t first) {
    Report out;
    out.steps = run.train(first, steps_);
    out.evaluation = run.evaluate(undisturbed_batches(steps_));
    return out;
  }

  Report train_reference(int64_t first) {
    if (runs_.reference()) return train(*runs_.reference(), first);
    return {.steps = std::vector<Outcome>(static_cast<size_t>(steps_))};
  }

  void compare(Phase phase, const Report& got, const Report& want) {
    Comparison& comparison = runs_.comparison();
    When when{.step = phase == Phase::trained ? 0 : steps_, .phase = phase};
    for (size_t i = 0; i < want.steps.size(); ++i) {
      ++when.step;
      comparison.step(when, got.steps[i], want.steps[i], true);
    }
    comparison.evaluation(when, got.evaluation, want.evaluation);
    // The resumed reference is compared with the layout: both may be at the limit.
    comparison.weights(when, runs_.compare_held(held_weights), phase == Phase::reference_resumed ? 2 : 1);
  }

  // Collective. Whether `work` failed on no rank; otherwise the message is a failed check. Errors of the
  // storage end in AgreedExit.
  bool attempt(Phase phase, const std::function<void()>& work) {
    const comm::ErrorConsensus consensus = train::attempt_collectively(world_, work);
    return agreed(phase, consensus);
  }
  bool agreed(Phase phase, const comm::ErrorConsensus& consensus) {
    if (consensus.code == Exit::ok) return true;
    if (storage_error(consensus.code)) train::require_agreed(world_, consensus);
    runs_.comparison().add({.kind = Kind::checkpoint,
                            .name = "",
                            .when = {.step = steps_, .phase = phase},
                            .rank = consensus.rank,
                            .problem = consensus.message});
    return false;
  }

  // Saves, and continues from checkpoints of others. Returns what was done.
  std::string checkpoints() {
    Learner& layout = runs_.layout();
    Learner* const reference = runs_.reference();
    const bool first = world_.rank() == 0;
    CheckpointChain::Saved& last = chain_.last(runs_.comparison().limits());
    Store own(chain_, chain_.next(), first);
    const Store alone(chain_, "reference", first);
    std::string saved, source = last.path, from = last.layout;
    comm::ErrorConsensus saving;
    try {
      saved = layout.save(own.path(), train::rank_group(world_.comm()));
    } catch (const Error& e) {  // the same on all ranks
      saving = {.code = e.code(), .rank = 0, .message = e.what()};
    }
    if (!agreed(Phase::trained, saving)) return {};
    if (source.empty()) {
      from = "one rank";
      if (!attempt(Phase::trained, [&] {
            if (reference) source = reference->save(alone.path(), {});
          }))
        return {};
      world_.comm().broadcast_text(source, 0);
    }

    const Report want = train_reference(steps_ + 1);
    train::run_collectively(world_, [&] { layout.restart(); });
    if (!attempt(Phase::resumed, [&] { layout.load(source); })) return {};
    compare(Phase::resumed, train(layout, steps_ + 1), want);
    std::string text = fmt::format("saved after step {}; the layout resumed from that of {}", steps_, from);
    if (!runs_.comparison().ok()) return text;

    train::run_collectively(world_, [&] {
      if (reference) reference->restart();
    });
    if (!attempt(Phase::reference_resumed, [&] {
          if (reference) reference->load(saved);
        }))
      return text;
    compare(Phase::reference_resumed, everywhere(train_reference(steps_ + 1)), want);
    text += ", one rank from the layout's";
    if (!runs_.comparison().ok()) return text;
    own.keep();
    if (first && !last.path.empty()) remove_tree(parent_path(last.path));
    last = {saved, runs_.result().grid};
    return text;
  }

  // Rank 0's, on all ranks.
  Report everywhere(Report report) {
    for (Outcome& step : report.steps) {
      std::array<double, 4> values{step.loss, step.norm, step.loss_scale, step.skipped ? 1.0 : 0.0};
      world_.comm().broadcast(comm::View(std::span(values)), 0);
      step = {.loss = values[0], .norm = values[1], .loss_scale = values[2], .skipped = values[3] > 0};
    }
    world_.comm().broadcast(comm::View(std::span(&report.evaluation, 1)), 0);
    return report;
  }

  comm::World& world_;
  TrialRuns runs_;
  int64_t steps_;
  CheckpointChain& chain_;
};

}  // namespace

CheckpointChain::CheckpointChain(comm::World& world) {
  train::run_collectively(world, [&] {
    if (world.rank() != 0) return;
    directory_ = std::make_unique<ScratchDirectory>(scratch_parent(), "nrl-verify-");
    path_ = directory_->path();
  });
  world.comm().broadcast_text(path_, 0);
  train::run_collectively(world, [&] {
    if (!is_directory(path_))
      fail(Exit::cannot_create,
           "rank {} does not see the directory for checkpoints that rank 0 made: {}; expected a directory of "
           "all nodes. Fix: set TMPDIR to a shared one",
           world.rank(), path_);
  });
}

std::string CheckpointChain::next() {
  return fmt::format("layout-{}", ++layouts_);
}

int64_t undisturbed_batches(int64_t steps) {
  return 2 * steps + 1;  // before and after the checkpoint, and an evaluation
}

TrialResult run_undisturbed_trial(comm::World& world, const ConfigResult& config,
                                  const train::TrainData& data, int64_t steps, CheckpointChain& chain) {
  return UndisturbedTrial(world, config, data, steps, chain).run();
}

}  // namespace nrl::verify

#pragma once
// Steps on rollouts that the policy generates: generation, rewards, log-probabilities before the update or
// a teacher's numbers, then one or several optimizer steps.

#include <memory>
#include <optional>

#include "apps/monitor/metrics.h"
#include "apps/train/loop/rollouts.h"
#include "apps/train/loop/step_source.h"
#include "apps/train/start/run.h"

namespace nrl::train {

/// Texts of rollouts and evaluations, in logger.log_dir.
inline constexpr const char* samples_file = "samples.jsonl";

/// rollouts_at_once() completions are trained in as many optimizer steps as they make global batches. All of
/// it between two updates belongs to one version of the weights.
class RolloutSource final : public StepSource {
 public:
  /// The run's data are prompts. `run` and the engine must outlive the source.
  explicit RolloutSource(Run& run);
  ~RolloutSource() override;

  int64_t begin() override;
  Item next() override { return steps_->next(); }
  Totals totals() override;
  /// The last global batch of the rollouts: a run may end, or save, only there.
  bool complete() const override { return used_ == updates_; }

  struct Evaluation {
    std::vector<monitor::Metric> metrics;
    std::optional<double> loss;  ///< distillation: the divergence from the teacher
  };
  /// Collective. Answers the validation prompts.
  Evaluation validate();
  /// Memory of generation, and how commands of rewards run; for the user, a line each.
  const std::vector<std::string>& notes() const { return notes_; }

 private:
  void make();
  /// `step`: the first one that is trained on them, or the one before an evaluation.
  void write_samples(int64_t step, const std::vector<JsonValue>& samples, const char* of);

  Run& run_;
  struct Tools;  ///< generator and rewards
  const std::unique_ptr<Tools> tools_;
  std::unique_ptr<Rollouts> rollouts_;
  const int64_t updates_;  ///< global batches of the rollouts
  int64_t used_;           ///< of them so far
  std::unique_ptr<StepSource> steps_;
  std::vector<monitor::Metric> metrics_;  ///< of rollouts that no step has reported
  int64_t equal_ = 0;                     ///< generations in a row in which all rewards of a group were equal
  int64_t unscored_ = 0;                  ///< generations in a row in which nothing had a reward
  std::vector<std::string> notes_;
  std::optional<monitor::MetricsLog> samples_;  ///< set after the start
};

}  // namespace nrl::train

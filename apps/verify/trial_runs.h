#pragma once
// The two runs of a trial.

#include <memory>
#include <optional>

#include "apps/train/start/decide.h"
#include "apps/verify/reference.h"
#include "apps/verify/trial_result.h"

namespace nrl::verify {

class TrialRuns {
 public:
  /// Collective. Both runs have their initial weights, which are compared. `updates`: see limits_for().
  TrialRuns(comm::World& world, const ConfigResult& config, const train::TrainData& data, int64_t updates);

  Learner& layout() { return *layout_; }
  /// Null on ranks other than 0.
  Learner* reference() { return reference_.get(); }
  Comparison& comparison() { return *comparison_; }

  std::vector<Difference> compare_held(HeldTensors (*held)(engine::Engine&));
  TrialResult result() const;

 private:
  comm::World& world_;
  const ConfigResult& config_;
  double begin_;
  train::Placement placement_;  // must outlive the engines
  std::optional<train::RankDecision> decision_;
  std::optional<ReferenceGroups> reference_groups_;
  std::unique_ptr<Learner> layout_, reference_;
  std::optional<Comparison> comparison_;
};

}  // namespace nrl::verify

#pragma once
// Trains a layout and the reference as training does, and compares them afterwards and after a resume.

#include <array>
#include <map>
#include <memory>
#include <string>

#include "apps/train/start/run_data.h"
#include "apps/verify/trial_result.h"
#include "core/config/load.h"
#include "core/io/scratch_directory.h"
#include "parallel/comm/world/world.h"

namespace nrl::verify {

/// Checkpoints that go from layout to layout.
class CheckpointChain {
 public:
  struct Saved {
    std::string path, layout;  ///< empty: none
  };
  /// Collective. Creates a directory that all ranks must see. Errors end in AgreedExit.
  explicit CheckpointChain(comm::World& world);

  const std::string& directory() const { return path_; }
  /// The checkpoint of the last layout that passed with these limits. Those of layouts with wider ones may
  /// differ from the reference by more.
  Saved& last(const Limits& limits) {
    return last_[{limits.loss, limits.norm, limits.gradient, limits.weight}];
  }
  /// A new name in the directory.
  std::string next();

 private:
  std::unique_ptr<ScratchDirectory> directory_;  // on rank 0
  std::string path_;
  std::map<std::array<double, 4>, Saved> last_;
  int layouts_ = 0;
};

/// Global batches that a trial of `steps` undisturbed steps reads.
int64_t undisturbed_batches(int64_t steps);

/// Collective, like run_trial(). Trains `steps` steps as in training, compares what they report, an
/// evaluation and the weights, and saves a checkpoint. The layout then resumes from the last checkpoint in
/// `chain`, or else the reference's, and the reference from the layout's, for as many steps.
TrialResult run_undisturbed_trial(comm::World& world, const ConfigResult& config,
                                  const train::TrainData& data, int64_t steps, CheckpointChain& chain);

}  // namespace nrl::verify

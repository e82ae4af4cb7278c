#pragma once
// Gradient reduction and weight gathering over all parameter groups.

#include <memory>
#include <span>
#include <vector>

#include "apps/engine/group_tensors.h"
#include "apps/model/program/executor.h"
#include "parallel/data/grad_reducer.h"
#include "parallel/data/weight_gather.h"
#include "parallel/grid/groups.h"

namespace nrl::engine {

/// One GradReducer per trainable group, with the same protocol, and one WeightGather per group with sharded
/// weights. If groups share a communicator, all ranks must report their parameters in the same order. The
/// groups' memory, the exec and the communicators must outlive the reducer.
///
/// Executes the steps of programs for buckets: that gather sharded weights, and reduce gradients.
class GroupReducer : public model::ShardedSteps {
 public:
  /// `ranks`: has the groups of all ParamGroups.
  GroupReducer(std::span<const GroupTensors> groups, const parallel::Groups& ranks, bool overlap,
               ops::Exec& exec);

  /// Begins a step. Must be called before the first ready().
  void start();
  /// Reports that the gradient of a parameter (an index into ParameterList::all) is complete.
  void ready(int parameter);
  /// Waits until all gradients are reduced.
  void finish();
  /// Must be called after the update: starts to gather the updated weights that are not sharded from all
  /// ranks; those that are sharded have a new version.
  void start_gather();
  /// Waits for the weights of a parameter, and of all. No-ops for those that were waited for. Sharded weights
  /// must be gathered (internal error).
  void wait_gather(int parameter);
  void wait_gathers();
  void gather() {
    start_gather();
    wait_gathers();
  }

  /// The same for the groups that are kept in FP8 only.
  void gather_fp8();

  void execute(const program::Step& step, std::span<const int> buckets) override;

  /// While set, gradients stay as this rank computes them: nothing is summed, and ready() must not be called.
  /// Weights are gathered as ever.
  void set_local(bool local) { local_ = local; }

 private:
  struct Group {
    std::unique_ptr<parallel::GradReducer> reducer;  // null: frozen
    std::unique_ptr<parallel::WeightGather> gather;
    GroupTensors tensors;
  };
  struct Location {
    int group = -1, index = 0;  // in the group
  };
  void start_gather(Group& g);
  /// Clears the gradients of a bucket that the microbatches add to from their first contribution on.
  void clear(Group& g, int bucket);

  std::vector<Group> groups_;
  std::vector<Location> locations_;  // by parameter; only of groups with a reducer or a gather
  ops::Exec& exec_;
  bool local_ = false;
};

}  // namespace nrl::engine

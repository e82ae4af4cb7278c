#pragma once
// Gradient reduction and weight gathering over all parameter groups.

#include <memory>
#include <span>
#include <vector>

#include "apps/engine/group_tensors.h"
#include "parallel/data/grad_reducer.h"
#include "parallel/grid/groups.h"

namespace nrl::engine {

/// One GradReducer per trainable group, with the same protocol. If groups share a communicator, all ranks
/// must report their parameters in the same order. The groups' memory and the
/// communicators must outlive the reducer.
class GroupReducer {
 public:
  /// `ranks` must have the groups that the parameter groups are reduced over (ParamGroup::reduce).
  GroupReducer(std::span<const GroupTensors> groups, const parallel::Groups& ranks, bool overlap,
               comm::StreamRef stream = {});

  /// Begins a step. Must be called before the first ready().
  void start();
  /// Reports that the gradient of a parameter (an index into ParameterList::all) is complete.
  void ready(int parameter);
  /// Waits until all gradients are reduced.
  void finish();
  /// Starts to gather the updated weights from all ranks.
  void start_gather();
  /// Waits for the weights of a parameter, and of all. No-ops for those that were waited for.
  void wait_gather(int parameter);
  void wait_gathers();
  void gather() {
    start_gather();
    wait_gathers();
  }

 private:
  struct Group {
    std::unique_ptr<parallel::GradReducer> reducer;
    Tensor weights;
  };
  struct Location {
    int group = -1, index = 0;  // of the trainable groups; in the group
  };
  std::vector<Group> groups_;
  std::vector<Location> locations_;  // by parameter
};

}  // namespace nrl::engine

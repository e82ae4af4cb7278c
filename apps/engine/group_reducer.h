#pragma once
// Gradient reduction and weight gathering over all parameter groups of a run.

#include <memory>
#include <span>
#include <vector>

#include "apps/engine/group_tensors.h"
#include "parallel/data/grad_reducer.h"

namespace nrl::engine {

/// A GradReducer for each group that is trained; the protocol of a step is the same. Ranks must report their
/// parameters in the same order where groups share a communicator. Refers to the groups' memory and to the
/// communicators.
class GroupReducer {
 public:
  /// `shards`: for each of `groups` the ranks that share its layout, data-parallel copies of each other.
  GroupReducer(std::span<const GroupTensors> groups, std::span<comm::Communicator* const> shards,
               bool overlap, comm::StreamRef stream = {});

  /// From here on ready() counts.
  void start();
  /// The gradient of a parameter (an index into ParameterList::all) is complete.
  void ready(int parameter);
  /// Waits until all sums are there.
  void finish();
  /// Updated weights of all ranks.
  void gather();

 private:
  struct Group {
    std::unique_ptr<GradReducer> reducer;
    Tensor weights;
  };
  struct Place {
    int group = -1, index = 0;
  };
  std::vector<Group> groups_;
  std::vector<Place> places_;  // by parameter
};

}  // namespace nrl::engine

#pragma once
// Writes the weights that are kept in FP8 (ParamGroup::fp8) from those that the optimizer updates.

#include <span>
#include <vector>

#include "apps/engine/group_tensors.h"
#include "apps/model/linear/fp8_state.h"
#include "parallel/grid/groups.h"

namespace nrl::engine {

/// A rank rounds the parts of the weights that it updates, with the scales of whole tensors or blocks: the
/// ranks that have parts of them agree on the largest magnitudes first. All work is enqueued. The memory, the
/// groups of ranks and `exec` must outlive this object.
class Fp8Weights {
 public:
  /// `tensor`: number of tensor-parallel ranks.
  Fp8Weights(std::span<const GroupTensors> groups, const model::ParameterList& parameters,
             const model::WeightScales& scales, int tensor, const parallel::Groups& ranks, ops::Exec& exec);

  /// Must be called when this rank's weights have changed and the scales of the next step are known
  /// (delayed), before the codes are gathered or read. Collective. A no-op without such weights.
  void write();

 private:
  /// Consecutive elements of a weight.
  struct Piece {
    Tensor weights, codes;   ///< flat, or with scales of tensors (rows, columns) as a matrix of any shape
    int64_t first, columns;  ///< ops::MatrixPart
    int64_t scale, scales;   ///< index, number
  };
  void measure(const Piece& p) const;
  void round(const Piece& p) const;

  const plan::ParamGroup* group_ = nullptr;  // null: none is in FP8
  model::WeightScales scales_;
  comm::Communicator* ranks_ = nullptr;  // null: the scales need none
  ops::Exec& exec_;
  std::vector<Piece> pieces_;
};

}  // namespace nrl::engine

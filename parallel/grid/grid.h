#pragma once
// Which rank does what: the grid of tensor, context, expert, data and pipeline parallelism (Megatron-LM's
// rank order tp-cp-ep-dp-pp, leftmost fastest), twice over the same ranks: for dense and for expert
// parameters.

#include "parallel/comm/communicator.h"

#include <array>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace nrl {

/// Axes of the grid; combine with |.
enum class Axis : unsigned { tp = 1, cp = 2, ep = 4, dp = 8, pp = 16 };

class AxisSet {
 public:
  constexpr AxisSet() = default;
  constexpr AxisSet(Axis a) : bits_(static_cast<unsigned>(a)) {}
  constexpr bool has(Axis a) const { return (bits_ & static_cast<unsigned>(a)) != 0; }
  constexpr AxisSet operator|(AxisSet o) const { return AxisSet(bits_ | o.bits_); }
  constexpr AxisSet without(AxisSet o) const { return AxisSet(bits_ & ~o.bits_); }
  constexpr bool operator==(const AxisSet&) const = default;
  constexpr unsigned bits() const { return bits_; }
  static constexpr AxisSet all() { return AxisSet(31u); }

 private:
  constexpr explicit AxisSet(unsigned bits) : bits_(bits) {}
  unsigned bits_ = 0;
};
constexpr AxisSet operator|(Axis a, Axis b) {
  return AxisSet(a) | AxisSet(b);
}

/// Position on (tp, cp, ep, dp, pp), or the sizes of these axes.
struct GridPoint {
  int tp = 1, cp = 1, ep = 1, dp = 1, pp = 1;
  bool operator==(const GridPoint&) const = default;
};

/// Pure arithmetic of one grid. rank = sum of index * stride, stride_i = product of the sizes before i.
class RankGrid {
 public:
  RankGrid() = default;
  /// All sizes at least 1 and their product an int, or Exit::config.
  explicit RankGrid(const GridPoint& sizes);

  const GridPoint& sizes() const { return sizes_; }
  int ranks() const { return ranks_; }
  GridPoint coordinates(int rank) const;
  int rank_at(const GridPoint& point) const;
  /// Number of ranks in a group of these axes.
  int group_size(AxisSet axes) const;
  /// The ranks that agree with `rank` on all other axes, in the order of the axes (leftmost fastest).
  std::vector<int> group_of(int rank, AxisSet axes) const;
  /// All groups of these axes, ordered by their first rank: a partition of 0..ranks()-1.
  std::vector<std::vector<int>> groups(AxisSet axes) const;

 private:
  GridPoint sizes_;
  int ranks_ = 1;
};

/// Sizes that the configuration gives; data-parallel sizes follow from the number of ranks.
struct GridSizes {
  int tp = 1, cp = 1, pp = 1;
  int ep = 1;
  int etp = 0;  ///< tensor-parallel size of experts; 0: as tp
};

/// The grid as one rank sees it, with communicators that are made when first asked for.
///
/// Making one is collective over its members only; all of them must ask for the same groups in the same
/// order. Communicators live until the grid is destroyed (collectively).
class ProcessGrid {
 public:
  /// `world` must outlive the grid. Sizes that do not divide the number of ranks are Exit::config.
  ProcessGrid(const GridSizes& sizes, comm::Communicator& world);
  ~ProcessGrid();
  ProcessGrid(const ProcessGrid&) = delete;
  ProcessGrid& operator=(const ProcessGrid&) = delete;

  int rank() const { return world_.rank(); }
  /// tp, cp, dp, pp of this rank; the ep axis has size 1.
  const GridPoint& dense_point() const { return dense_point_; }
  /// etp (as tp), ep, edp (as dp), pp of this rank; the cp axis has size 1.
  const GridPoint& expert_point() const { return expert_point_; }
  const RankGrid& dense() const { return dense_; }
  const RankGrid& expert() const { return expert_; }

  comm::Communicator& world() { return world_; }
  comm::Communicator& tp() { return dense_group(Axis::tp, "tp"); }
  comm::Communicator& cp() { return dense_group(Axis::cp, "cp"); }
  comm::Communicator& dp() { return dense_group(Axis::dp, "dp"); }
  comm::Communicator& pp() { return dense_group(Axis::pp, "pp"); }
  /// Gradient reduction and sharding of dense parameters.
  comm::Communicator& dp_cp() { return dense_group(Axis::dp | Axis::cp, "dp-cp"); }
  comm::Communicator& tp_cp() { return dense_group(Axis::tp | Axis::cp, "tp-cp"); }
  /// FP8 amax.
  comm::Communicator& tp_dp_cp() { return dense_group(Axis::tp | Axis::cp | Axis::dp, "tp-dp-cp"); }
  /// One copy of the model: gradient norm, overflow flags.
  comm::Communicator& tp_pp() { return dense_group(Axis::tp | Axis::pp, "tp-pp"); }
  comm::Communicator& etp() { return expert_group(Axis::tp, "etp"); }
  comm::Communicator& ep() { return expert_group(Axis::ep, "ep"); }
  comm::Communicator& etp_ep() { return expert_group(Axis::tp | Axis::ep, "etp-ep"); }
  comm::Communicator& edp() { return expert_group(Axis::dp, "edp"); }
  comm::Communicator& etp_ep_pp() { return expert_group(Axis::tp | Axis::ep | Axis::pp, "etp-ep-pp"); }
  /// First and last pipeline stage, which share tied embeddings. For members only (in_embedding()).
  comm::Communicator& embedding();
  bool in_embedding() const { return dense_point_.pp == 0 || dense_point_.pp == dense_.sizes().pp - 1; }

  /// Groups that were made so far, by label.
  std::vector<std::string> made() const;
  /// A few lines for the log: sizes, this rank's place, and the ranks of its groups above size 1.
  std::string describe() const;

 private:
  comm::Communicator& dense_group(AxisSet axes, std::string_view name);
  comm::Communicator& expert_group(AxisSet axes, std::string_view name);
  comm::Communicator& make(const std::vector<int>& ranks, std::string_view name);

  comm::Communicator& world_;
  RankGrid dense_, expert_;
  GridPoint dense_point_, expert_point_;
  // By name, in the order they were made: destroyed in that order on every member.
  std::vector<std::pair<std::string, std::unique_ptr<comm::Communicator>>> made_;
};

}  // namespace nrl

#pragma once
// The process grid of tensor, context, expert, data and pipeline parallelism in Megatron-LM's rank order
// tp-cp-ep-dp-pp, leftmost fastest. Two grids over the same ranks: for dense and for expert parameters.

#include <array>
#include <optional>
#include <string>
#include <vector>

namespace nrl::parallel {

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

/// One grid: rank = sum of index * stride, stride_i = product of the sizes before i.
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

/// Identifies a group: the ranks that differ only in `axes`. Groups (groups.h) creates the communicators.
struct GroupId {
  AxisSet axes;
  /// Axes of the expert grid (etp, ep, edp, pp) instead of the dense one (tp, cp, dp, pp).
  bool expert = false;
  /// Only ranks of the first and the last pipeline stage; those between are not members.
  bool ends = false;
  /// Groups of equal members share a communicator unless their lanes differ. Operations of one communicator
  /// run one after another; a second lane lets a gather overlap with a reduce-scatter, for example.
  int lane = 0;
  /// 0: all of these ranks. Otherwise they are divided into slices of this many consecutive ranks, which must
  /// divide them: a group is one slice, or with `across` the ranks with the same index in all slices.
  int slice = 0;
  bool across = false;

  constexpr bool operator==(const GroupId&) const = default;
  /// The slice of `ranks` consecutive members, and the group across these slices (hierarchical reduction,
  /// HSDP). 0: the whole group.
  constexpr GroupId inside(int ranks) const { return with_slice(ranks, false); }
  constexpr GroupId across_slices(int ranks) const { return with_slice(ranks, true); }
  constexpr GroupId on_lane(int other) const {
    GroupId out = *this;
    out.lane = other;
    return out;
  }

 private:
  constexpr GroupId with_slice(int ranks, bool over) const {
    GroupId out = *this;
    out.slice = ranks;
    out.across = over;
    return out;
  }
};

namespace group {
inline constexpr GroupId tp{.axes = Axis::tp}, cp{.axes = Axis::cp}, dp{.axes = Axis::dp},
    pp{.axes = Axis::pp};
/// Gradient reduction and sharding of dense parameters.
inline constexpr GroupId dp_cp{.axes = Axis::dp | Axis::cp};
inline constexpr GroupId tp_cp{.axes = Axis::tp | Axis::cp};
/// FP8 amax.
inline constexpr GroupId tp_dp_cp{.axes = Axis::tp | Axis::cp | Axis::dp};
/// One copy of the model: gradient norm, overflow flags.
inline constexpr GroupId tp_pp{.axes = Axis::tp | Axis::pp};
inline constexpr GroupId etp{.axes = Axis::tp, .expert = true}, ep{.axes = Axis::ep, .expert = true},
    edp{.axes = Axis::dp, .expert = true};
inline constexpr GroupId etp_ep{.axes = Axis::tp | Axis::ep, .expert = true};
inline constexpr GroupId etp_ep_pp{.axes = Axis::tp | Axis::ep | Axis::pp, .expert = true};
/// All copies of a tied embedding: first and last pipeline stage.
inline constexpr GroupId tied{.axes = Axis::cp | Axis::dp | Axis::pp, .ends = true};
/// All ranks.
inline constexpr GroupId all{.axes = Axis::tp | Axis::cp | Axis::dp | Axis::pp};
}  // namespace group

/// The order in which groups are created and used: the same on all ranks.
bool canonical_less(const GroupId& a, const GroupId& b);

/// "dp-cp", "etp-ep", "pp ends", "dp lane 1", "dp slices of 4", "dp across slices of 4": for labels and
/// messages.
std::string name_of(const GroupId& id);

/// An axis of a group: `size` members, `stride` world ranks apart.
struct GroupDigit {
  int size = 1, stride = 1;
  bool operator==(const GroupDigit&) const = default;
};

/// Both grids from one rank's view. Pure arithmetic: needs no communication.
class ProcessGrid {
 public:
  /// Sizes that do not divide `ranks` are Exit::config.
  ProcessGrid(const GridSizes& sizes, int ranks, int rank);

  int rank() const { return rank_; }
  int ranks() const { return dense_.ranks(); }
  /// tp, cp, dp, pp of this rank; the ep axis has size 1.
  const GridPoint& dense_point() const { return dense_point_; }
  const RankGrid& dense() const { return dense_; }
  const RankGrid& expert() const { return expert_; }

  /// Number of ranks in each of these groups before they are divided into slices; also for ranks that are not
  /// members.
  int group_size(const GroupId& id) const;
  /// World ranks of this rank's group, in group order; empty when it is not a member (GroupId::ends).
  std::vector<int> members(const GroupId& id) const;
  /// The members of every group of the id as mixed-radix numbers, the digit with the smallest stride first;
  /// unset if slices divide an axis unevenly. Two ids with equal digits, both or neither with
  /// GroupId::ends, have the same groups.
  std::optional<std::vector<GroupDigit>> digits(const GroupId& id) const;
  /// The groups of all ranks, ordered by their first rank. Takes time in proportion to the ranks.
  std::vector<std::vector<int>> groups(const GroupId& id) const;
  /// A few lines for the log: sizes, this rank's coordinates, and the ranks of its groups above size 1.
  std::string describe() const;

 private:
  int rank_;
  RankGrid dense_, expert_;
  GridPoint dense_point_, expert_point_;
};

}  // namespace nrl::parallel

#include "parallel/grid/grid.h"

#include <algorithm>
#include <tuple>

#include <spdlog/fmt/ranges.h>

#include "core/base/error.h"

namespace nrl::parallel {

namespace {

constexpr int axis_count = 5;
constexpr std::array<Axis, axis_count> order = {Axis::tp, Axis::cp, Axis::ep, Axis::dp, Axis::pp};

std::array<int, axis_count> to_array(const GridPoint& p) {
  return {p.tp, p.cp, p.ep, p.dp, p.pp};
}
GridPoint to_point(const std::array<int, axis_count>& a) {
  return {a[0], a[1], a[2], a[3], a[4]};
}

/// The data-parallel size: ranks / product. Exit::config when it does not divide.
int data_parallel_size(int world, int product, const char* text) {
  if (product <= 0 || world % product != 0)
    fail(Exit::config,
         "{} ranks are not a multiple of {} = {}. Fix: change the parallel sizes or the number of ranks",
         world, text, product);
  return world / product;
}

int product_of(std::initializer_list<std::pair<const char*, int>> sizes) {
  int product = 1;
  for (const auto& [name, size] : sizes) {
    if (size < 1 || __builtin_mul_overflow(product, size, &product))
      fail(Exit::config, "parallel size {} = {} is out of range", name, size);
  }
  return product;
}

}  // namespace

RankGrid::RankGrid(const GridPoint& sizes)
    : sizes_(sizes),
      ranks_(product_of(
          {{"tp", sizes.tp}, {"cp", sizes.cp}, {"ep", sizes.ep}, {"dp", sizes.dp}, {"pp", sizes.pp}})) {}

GridPoint RankGrid::coordinates(int rank) const {
  NRL_CHECK(rank >= 0 && rank < ranks_, "rank {} of {}", rank, ranks_);
  std::array<int, axis_count> at{};
  const auto size = to_array(sizes_);
  for (size_t i = 0; i < axis_count; ++i) {
    at[i] = rank % size[i];
    rank /= size[i];
  }
  return to_point(at);
}

int RankGrid::rank_at(const GridPoint& point) const {
  const auto at = to_array(point), size = to_array(sizes_);
  int rank = 0, stride = 1;
  for (size_t i = 0; i < axis_count; ++i) {
    NRL_CHECK(at[i] >= 0 && at[i] < size[i], "axis {}: index {} of {}", i, at[i], size[i]);
    rank += at[i] * stride;
    stride *= size[i];
  }
  return rank;
}

int RankGrid::group_size(AxisSet axes) const {
  const auto size = to_array(sizes_);
  int n = 1;
  for (size_t i = 0; i < axis_count; ++i)
    if (axes.has(order[i])) n *= size[i];
  return n;
}

std::vector<int> RankGrid::group_of(int rank, AxisSet axes) const {
  const auto at = to_array(coordinates(rank)), size = to_array(sizes_);
  std::vector<int> out{rank};
  out.reserve(static_cast<size_t>(group_size(axes)));
  for (size_t i = 0, stride = 1; i < axis_count; stride *= static_cast<size_t>(size[i++])) {
    if (!axes.has(order[i])) continue;
    const int step = static_cast<int>(stride);
    const size_t count = out.size();
    for (int& member : out) member -= at[i] * step;
    for (int n = 1; n < size[i]; ++n)
      for (size_t m = 0; m < count; ++m) out.push_back(out[m] + n * step);
  }
  return out;
}

std::vector<std::vector<int>> RankGrid::groups(AxisSet axes) const {
  std::vector<std::vector<int>> out;
  for (const int first : group_of(0, AxisSet::all().without(axes))) out.push_back(group_of(first, axes));
  return out;
}

bool canonical_less(const GroupId& a, const GroupId& b) {
  const auto key = [](const GroupId& id) {
    return std::tuple(id.lane, id.expert, id.ends, id.axes.bits(), id.slice, id.across);
  };
  return key(a) < key(b);
}

std::string name_of(const GroupId& id) {
  constexpr std::array<const char*, axis_count> dense = {"tp", "cp", "ep", "dp", "pp"};
  constexpr std::array<const char*, axis_count> expert = {"etp", "cp", "ep", "edp", "pp"};
  std::string out;
  for (size_t i = 0; i < axis_count; ++i)
    if (id.axes.has(order[i])) out += (out.empty() ? "" : "-") + std::string((id.expert ? expert : dense)[i]);
  if (id.ends) out += " ends";
  if (id.slice > 0) out += fmt::format(" {}slices of {}", id.across ? "across " : "", id.slice);
  if (id.lane > 0) out += fmt::format(" lane {}", id.lane);
  return out;
}

ProcessGrid::ProcessGrid(const GridSizes& sizes, int ranks, int rank) : rank_(rank) {
  const int etp = sizes.etp == 0 ? sizes.tp : sizes.etp;
  const int dense = product_of({{"tp", sizes.tp}, {"cp", sizes.cp}, {"pp", sizes.pp}});
  const int expert = product_of({{"etp", etp}, {"ep", sizes.ep}, {"pp", sizes.pp}});
  dense_ = RankGrid({sizes.tp, sizes.cp, 1, data_parallel_size(ranks, dense, "tp x cp x pp"), sizes.pp});
  expert_ = RankGrid({etp, 1, sizes.ep, data_parallel_size(ranks, expert, "etp x ep x pp"), sizes.pp});
  dense_point_ = dense_.coordinates(rank);
  expert_point_ = expert_.coordinates(rank);
  NRL_CHECK(dense_point_.pp == expert_point_.pp, "the grids disagree on the pipeline stage of rank {}", rank);
}

namespace {

/// Neither in the first nor in the last pipeline stage.
bool between_ends(const RankGrid& grid, int rank) {
  const int stage = grid.coordinates(rank).pp;
  return stage > 0 && stage + 1 < grid.sizes().pp;
}

/// The slices of a group, or the groups across them (GroupId::slice, GroupId::across).
std::vector<std::vector<int>> sliced(const std::vector<int>& group, const GroupId& id) {
  if (id.slice == 0) return {group};
  const auto size = static_cast<size_t>(id.slice);
  NRL_CHECK(group.size() % size == 0, "{} ranks of {}", group.size(), name_of(id));
  std::vector<std::vector<int>> out(id.across ? size : group.size() / size);
  for (size_t i = 0; i < group.size(); ++i) out[id.across ? i % size : i / size].push_back(group[i]);
  return out;
}

/// Keeps the part of the digits with indices below `count`, or with `above` the part from there on. False if
/// the cut divides no digit evenly.
bool cut(std::vector<GroupDigit>& digits, int count, bool above) {
  std::vector<GroupDigit> below, rest;
  for (const GroupDigit& d : digits) {
    if (count == 1) {
      rest.push_back(d);
    } else if (count % d.size == 0) {
      below.push_back(d);
      count /= d.size;
    } else if (d.size % count == 0) {
      below.push_back({count, d.stride});
      rest.push_back({d.size / count, d.stride * count});
      count = 1;
    } else {
      return false;
    }
  }
  digits = above ? rest : below;
  return count == 1;
}

}  // namespace

std::optional<std::vector<GroupDigit>> ProcessGrid::digits(const GroupId& id) const {
  const RankGrid& grid = id.expert ? expert_ : dense_;
  const auto sizes = to_array(grid.sizes());
  std::vector<GroupDigit> all;
  for (size_t i = 0, stride = 1; i < axis_count; stride *= static_cast<size_t>(sizes[i++])) {
    const bool ends = id.ends && order[i] == Axis::pp && sizes[i] > 2;
    const int apart = static_cast<int>(stride) * (ends ? sizes[i] - 1 : 1);
    if (id.axes.has(order[i]) && sizes[i] > 1) all.push_back({ends ? 2 : sizes[i], apart});
  }
  if (id.slice > 0 && !cut(all, id.slice, id.across)) return std::nullopt;
  std::vector<GroupDigit> out;
  for (const GroupDigit& d : all) {
    if (!out.empty() && out.back().stride * out.back().size == d.stride)
      out.back().size *= d.size;
    else
      out.push_back(d);
  }
  return out;
}

int ProcessGrid::group_size(const GroupId& id) const {
  const RankGrid& grid = id.expert ? expert_ : dense_;
  if (!id.ends) return grid.group_size(id.axes);
  return grid.group_size(id.axes.without(Axis::pp)) * std::min(grid.sizes().pp, 2);
}

std::vector<int> ProcessGrid::members(const GroupId& id) const {
  const RankGrid& grid = id.expert ? expert_ : dense_;
  if (id.ends && between_ends(grid, rank_)) return {};
  std::vector<int> all = grid.group_of(rank_, id.axes);
  if (id.ends) std::erase_if(all, [&](int rank) { return between_ends(grid, rank); });
  for (std::vector<int>& slice : sliced(all, id))
    if (std::find(slice.begin(), slice.end(), rank_) != slice.end()) return std::move(slice);
  NRL_CHECK(false, "rank {} is not in its group {}", rank_, name_of(id));
}

std::vector<std::vector<int>> ProcessGrid::groups(const GroupId& id) const {
  const RankGrid& grid = id.expert ? expert_ : dense_;
  std::vector<std::vector<int>> out;
  for (std::vector<int>& group : grid.groups(id.axes)) {
    if (id.ends) std::erase_if(group, [&](int rank) { return between_ends(grid, rank); });
    if (group.empty()) continue;
    for (std::vector<int>& slice : sliced(group, id)) out.push_back(std::move(slice));
  }
  return out;
}

std::string ProcessGrid::describe() const {
  const GridPoint &d = dense_.sizes(), &e = expert_.sizes();
  std::string out =
      fmt::format("grid of {} ranks: tp {} cp {} dp {} pp {}", dense_.ranks(), d.tp, d.cp, d.dp, d.pp);
  const bool experts = e.ep > 1 || e.tp != d.tp;
  if (experts) out += fmt::format("; experts: etp {} ep {} edp {} pp {}", e.tp, e.ep, e.dp, e.pp);
  out += fmt::format("\nrank {}: tp {} cp {} dp {} pp {}", rank(), dense_point_.tp, dense_point_.cp,
                     dense_point_.dp, dense_point_.pp);
  if (experts) out += fmt::format(" ep {} edp {}", expert_point_.ep, expert_point_.dp);
  const auto list = [&](const RankGrid& grid, AxisSet axes, const char* name) {
    if (grid.group_size(axes) > 1)
      out += fmt::format("\n  {:<6} [{}]", name, fmt::join(grid.group_of(rank(), axes), ","));
  };
  list(dense_, Axis::tp, "tp");
  list(dense_, Axis::cp, "cp");
  list(dense_, Axis::dp, "dp");
  list(dense_, Axis::pp, "pp");
  if (experts) {
    list(expert_, Axis::tp, "etp");
    list(expert_, Axis::ep, "ep");
    list(expert_, Axis::dp, "edp");
  }
  return out;
}

}  // namespace nrl::parallel

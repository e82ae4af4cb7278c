#include "parallel/grid/grid.h"

#include "core/base/error.h"

#include <spdlog/fmt/ranges.h>

#include <algorithm>

namespace nrl {

namespace {

constexpr int kAxes = 5;
constexpr std::array<Axis, kAxes> kOrder = {Axis::tp, Axis::cp, Axis::ep, Axis::dp, Axis::pp};

std::array<int, kAxes> to_array(const GridPoint& p) {
  return {p.tp, p.cp, p.ep, p.dp, p.pp};
}
GridPoint to_point(const std::array<int, kAxes>& a) {
  return {a[0], a[1], a[2], a[3], a[4]};
}

/// The data-parallel size that is left over, or an error that names the numbers.
int left_over(int world, int product, const char* text) {
  if (product <= 0 || world % product != 0)
    fail(Exit::config,
         "{} ranks cannot be divided by {} = {}: change the parallel sizes or the number of ranks", world,
         text, product);
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
  std::array<int, kAxes> at{};
  const auto size = to_array(sizes_);
  for (size_t i = 0; i < kAxes; ++i) {
    at[i] = rank % size[i];
    rank /= size[i];
  }
  return to_point(at);
}

int RankGrid::rank_at(const GridPoint& point) const {
  const auto at = to_array(point), size = to_array(sizes_);
  int rank = 0, stride = 1;
  for (size_t i = 0; i < kAxes; ++i) {
    NRL_CHECK(at[i] >= 0 && at[i] < size[i], "axis {}: index {} of {}", i, at[i], size[i]);
    rank += at[i] * stride;
    stride *= size[i];
  }
  return rank;
}

int RankGrid::group_size(AxisSet axes) const {
  const auto size = to_array(sizes_);
  int n = 1;
  for (size_t i = 0; i < kAxes; ++i)
    if (axes.has(kOrder[i])) n *= size[i];
  return n;
}

std::vector<int> RankGrid::group_of(int rank, AxisSet axes) const {
  auto at = to_array(coordinates(rank));
  const auto size = to_array(sizes_);
  std::vector<int> out;
  for (int member = 0; member < group_size(axes); ++member) {
    int rest = member;
    for (size_t i = 0; i < kAxes; ++i) {
      if (!axes.has(kOrder[i])) continue;
      at[i] = rest % size[i];
      rest /= size[i];
    }
    out.push_back(rank_at(to_point(at)));
  }
  return out;
}

std::vector<std::vector<int>> RankGrid::groups(AxisSet axes) const {
  std::vector<std::vector<int>> out;
  for (int rank = 0; rank < ranks_; ++rank) {
    std::vector<int> group = group_of(rank, axes);
    if (group.front() == rank) out.push_back(std::move(group));
  }
  return out;
}

ProcessGrid::ProcessGrid(const GridSizes& sizes, comm::Communicator& world) : world_(world) {
  const int etp = sizes.etp == 0 ? sizes.tp : sizes.etp;
  const int dense = product_of({{"tp", sizes.tp}, {"cp", sizes.cp}, {"pp", sizes.pp}});
  const int expert = product_of({{"etp", etp}, {"ep", sizes.ep}, {"pp", sizes.pp}});
  dense_ = RankGrid({sizes.tp, sizes.cp, 1, left_over(world.size(), dense, "tp x cp x pp"), sizes.pp});
  expert_ = RankGrid({etp, 1, sizes.ep, left_over(world.size(), expert, "etp x ep x pp"), sizes.pp});
  dense_point_ = dense_.coordinates(world.rank());
  expert_point_ = expert_.coordinates(world.rank());
  NRL_CHECK(dense_point_.pp == expert_point_.pp, "the grids disagree on the pipeline stage of rank {}",
            world.rank());
}

ProcessGrid::~ProcessGrid() {
  // Members made their common groups in one order; they take them apart in the same.
  for (auto& entry : made_) entry.second.reset();
}

comm::Communicator& ProcessGrid::dense_group(AxisSet axes, std::string_view name) {
  return make(dense_.group_of(rank(), axes), name);
}

comm::Communicator& ProcessGrid::expert_group(AxisSet axes, std::string_view name) {
  return make(expert_.group_of(rank(), axes), name);
}

comm::Communicator& ProcessGrid::embedding() {
  NRL_CHECK(in_embedding(), "rank {} holds no embedding", rank());
  const std::vector<int> stages = dense_.group_of(rank(), Axis::pp);
  if (stages.size() == 1) return make(stages, "embedding");
  return make({stages.front(), stages.back()}, "embedding");
}

comm::Communicator& ProcessGrid::make(const std::vector<int>& ranks, std::string_view name) {
  const auto found = std::find_if(made_.begin(), made_.end(), [&](const auto& e) { return e.first == name; });
  if (found != made_.end()) return *found->second;
  made_.emplace_back(std::string(name), world_.subgroup(ranks, name));
  return *made_.back().second;
}

std::vector<std::string> ProcessGrid::made() const {
  std::vector<std::string> out;
  for (const auto& entry : made_) out.push_back(entry.second->label());
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

}  // namespace nrl

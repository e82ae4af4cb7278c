#include "tests/layouts/cover.h"

#include <algorithm>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include "core/base/philox.h"

namespace nrl::test {
namespace {

constexpr int starts = 4, most_changes = 12;

int at(const Cell& cell, int d) {
  return cell[d];
}
int& at(Cell& cell, int d) {
  return cell[d];
}

class Search {
 public:
  Search(const std::vector<Dimension>& dimensions, const Problems& problems)
      : dimensions_(dimensions), problems_(problems) {
    for (int d = 0; d < count(); ++d) {
      decides_.push_back(tags_decide(d));
      for (int v = 0; v < values(d); ++v) values_.emplace_back(d, v);
    }
  }

  Covering run(size_t most) {
    std::vector<Pair> targets;
    for (const auto& [a, v] : values_)
      for (const auto& [b, w] : values_)
        if (a < b) targets.push_back({{a, b}, {v, w}});
    shuffle(targets);
    for (const Pair& pair : targets)
      if (out_.cells.size() < most && !out_.pairs.contains(pair)) meet(pair);
    return std::move(out_);
  }

 private:
  int count() const { return static_cast<int>(dimensions_.size()); }
  const Dimension& dimension(int d) const { return dimensions_[d]; }
  int values(int d) const { return static_cast<int>(dimension(d).values.size()); }
  int draw(int below) { return static_cast<int>(random_.bits(drawn_++) % static_cast<uint32_t>(below)); }
  template <class T>
  void shuffle(std::vector<T>& list) {
    for (size_t i = list.size(); i > 1; --i) std::swap(list[i - 1], list[draw(static_cast<int>(i))]);
  }

  // Finds a cell with the pair.
  void meet(const Pair& pair) {
    Cell fixed(dimensions_.size(), -1);
    for (size_t i = 0; i < 2; ++i) at(fixed, pair.dimension[i]) = pair.value[i];
    std::map<std::string, std::pair<int, std::string>> reasons;  // by kind: how often met, and the first
    for (int start = 0; start < starts; ++start) {
      std::optional<Cell> cell = complete(fixed, start > 0);
      if (!cell) return;  // they never apply together
      if (const std::string left = repair(*cell, fixed); !left.empty()) {
        auto& [times, reason] = reasons[kind_of(left)];
        if (times++ == 0) reason = left;
        continue;
      }
      grow(*cell, fixed);
      each_pair(*cell, [&](const Pair& p) { out_.pairs.emplace(p, static_cast<int>(out_.cells.size())); });
      out_.cells.push_back(std::move(*cell));
      return;
    }
    out_.refused[pair] = std::max_element(reasons.begin(), reasons.end(), [](const auto& a, const auto& b) {
                           return a.second.first < b.second.first;
                         })->second.second;
  }

  // A cell with these values, else of defaults; `random`: half of the others are any values.
  std::optional<Cell> complete(const Cell& fixed, bool random) {
    for (int attempt = 0; attempt < 1000; ++attempt) {
      Cell cell(dimensions_.size(), -1);
      bool possible = true;
      for (int d = 0; d < count() && possible; ++d) {
        if (!applies(d, cell)) {
          possible = at(fixed, d) < 0;
          continue;
        }
        // Other values of these decide which dimensions apply.
        const bool any = (random && draw(2) == 0) || (attempt > 0 && decides_[d]);
        const int v = at(fixed, d) >= 0 ? at(fixed, d) : any ? draw(values(d)) : 0;
        possible = applies(d, v, cell);
        at(cell, d) = v;
      }
      if (possible) return cell;
    }
    return {};
  }

  // Changes other values until the program allows the cell; else returns a problem that remains.
  std::string repair(Cell& cell, const Cell& fixed) {
    std::vector<std::string> problems = problems_(cell);
    std::set<std::string> met;
    for (int change = 0; change < most_changes && !problems.empty(); ++change) {
      met.insert(kind_of(problems.front()));
      if (!repair_one(cell, fixed, problems, met)) break;
    }
    return problems.empty() ? "" : problems.front();
  }

  bool repair_one(Cell& cell, const Cell& fixed, std::vector<std::string>& problems,
                  const std::set<std::string>& met) {
    shuffle(values_);
    for (const auto& [d, v] : values_) {
      const std::optional<Cell> other = changed(cell, d, v, fixed);
      if (!other) continue;
      std::vector<std::string> left = problems_(*other);
      const bool another =
          !left.empty() && left.size() <= problems.size() && !met.contains(kind_of(left.front()));
      if (left.size() >= problems.size() && !another) continue;
      cell = *other;
      problems = std::move(left);
      return true;
    }
    return false;
  }

  // Changes other values for more new pairs while the program allows the cell.
  void grow(Cell& cell, const Cell& fixed) {
    std::vector<int> order(dimensions_.size());
    for (size_t d = 0; d < order.size(); ++d) order[d] = static_cast<int>(d);
    shuffle(order);
    int most = news(cell);
    for (const int d : order) {
      std::vector<std::pair<int, Cell>> better;
      for (int v = 0; v < values(d); ++v)
        if (const std::optional<Cell> other = changed(cell, d, v, fixed))
          if (const int sum = news(*other); sum > most) better.emplace_back(sum, *other);
      std::stable_sort(better.begin(), better.end(),
                       [](const auto& a, const auto& b) { return a.first > b.first; });
      for (size_t i = 0; i < std::min<size_t>(better.size(), 2); ++i)
        if (problems_(better[i].second).empty()) {
          std::tie(most, cell) = better[i];
          break;
        }
    }
  }

  // The cell with another value, if it keeps those that are fixed and has no pair that is refused.
  std::optional<Cell> changed(const Cell& cell, int d, int v, const Cell& fixed) const {
    if (at(fixed, d) >= 0 || at(cell, d) < 0 || at(cell, d) == v || !applies(d, v, cell)) return {};
    Cell other = cell;
    at(other, d) = v;
    for (int e = 0; e < count(); ++e) {
      int& w = at(other, e);
      w = !applies(e, other) ? -1 : w < 0 || !applies(e, w, other) ? 0 : w;
      if (at(fixed, e) >= 0 && w != at(fixed, e)) return {};
    }
    bool refused = false;
    for (int e = 0; e < count() && !refused; ++e)
      if (e != d && at(other, e) >= 0) refused = out_.refused.contains(pair_of(other, d, e));
    return refused ? std::nullopt : std::optional(std::move(other));
  }

  static Pair pair_of(const Cell& cell, int d, int e) {
    if (d > e) std::swap(d, e);
    return {{d, e}, {at(cell, d), at(cell, e)}};
  }
  template <class F>
  void each_pair(const Cell& cell, F&& f) const {
    for (int a = 0; a < count(); ++a)
      for (int b = a + 1; b < count() && at(cell, a) >= 0; ++b)
        if (at(cell, b) >= 0) f(pair_of(cell, a, b));
  }
  int news(const Cell& cell) const {
    int sum = 0;
    each_pair(cell, [&](const Pair& p) { sum += !out_.pairs.contains(p); });
    return sum;
  }

  // True if values before dimension `d` have all of these tags.
  bool tagged(const std::string& tags, int d, const Cell& cell) const {
    std::istringstream needed(tags);
    for (std::string tag; needed >> tag;) {
      bool found = false;
      for (int e = 0; e < d && !found; ++e) {
        if (at(cell, e) < 0) continue;
        const std::vector<std::string>& own = dimension(e).values[at(cell, e)].tags;
        found = std::find(own.begin(), own.end(), tag) != own.end();
      }
      if (!found) return false;
    }
    return true;
  }
  bool applies(int d, const Cell& cell) const { return tagged(dimension(d).only, d, cell); }
  bool applies(int d, int v, const Cell& cell) const { return tagged(dimension(d).values[v].only, d, cell); }
  // True if other dimensions or values apply or not, depending on the value of this one.
  bool tags_decide(int d) const {
    for (const Dimension& other : dimensions_)
      for (const Value& v : dimension(d).values)
        for (const std::string& tag : v.tags)
          if (other.only.find(tag) != std::string::npos ||
              std::any_of(other.values.begin(), other.values.end(),
                          [&](const Value& w) { return w.only == tag; }))
            return true;
    return false;
  }

  const std::vector<Dimension>& dimensions_;
  const Problems& problems_;
  const PhiloxStream random_{0, "cells"};
  uint64_t drawn_ = 0;
  std::vector<std::pair<int, int>> values_;  ///< all, with their dimensions
  std::vector<bool> decides_;                ///< tags_decide(), by dimension
  Covering out_;
};

}  // namespace

std::string kind_of(const std::string& problem) {
  return problem.substr(0, problem.find(' ', problem.find(' ') + 1));
}

std::vector<std::string> overrides(const std::vector<Dimension>& dimensions, const Cell& cell) {
  std::vector<std::string> out;
  for (size_t d = 0; d < cell.size(); ++d)
    if (cell[d] >= 0) {
      const std::vector<std::string>& keys = dimensions[d].values[cell[d]].keys;
      out.insert(out.end(), keys.begin(), keys.end());
    }
  return out;
}

std::string name_of(const std::vector<Dimension>& dimensions, const Cell& cell) {
  std::string out;
  for (size_t d = 0; d < cell.size(); ++d)
    if (cell[d] > 0 || (d < 2 && cell[d] == 0))
      out += (out.empty() ? "" : "; ") + (d < 2 ? "" : dimensions[d].name + ": ") +
             dimensions[d].values[cell[d]].name;
  return out;
}

Covering cover(const std::vector<Dimension>& dimensions, const Problems& problems, size_t most) {
  return Search(dimensions, problems).run(most);
}

}  // namespace nrl::test

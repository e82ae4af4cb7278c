#include "core/io/slice_plan.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <tuple>

#include "core/base/error.h"
#include "core/io/json.h"
#include "core/io/safetensors.h"

namespace nrl {
namespace {

JsonValue numbers(const std::vector<int64_t>& values) {
  JsonValue out = JsonValue::array();
  for (const int64_t v : values) out.push_back(v);
  return out;
}

std::vector<int64_t> numbers_from(const JsonValue& value) {
  std::vector<int64_t> out;
  for (const JsonValue& v : value.items()) out.push_back(v.as_int());
  return out;
}

JsonValue parse_own(const std::string& text, const char* what) {
  JsonLimits limits;
  limits.text_bytes = limits.string_bytes = limits.values = size_t{1} << 40;  // trusted text of our own
  return parse_json(text, what, limits);
}

// One tensor with every slice of every rank.
struct Held {
  SlicePlan::Tensor tensor;
  std::vector<SlicePlan::Source> slices;
};

auto place(const SlicePlan::Source& s) {
  return std::tuple(s.row, s.column, s.rows, s.columns);
}

int64_t area(const SlicePlan::Source& s) {
  return s.rows * s.columns;
}

// One source per slice position, the owner's if it holds it, else the lowest rank's; sorted by position.
std::vector<SlicePlan::Source> choose_sources(const Held& held, int owner) {
  std::vector<SlicePlan::Source> out = held.slices;
  std::sort(out.begin(), out.end(), [&](const auto& a, const auto& b) {
    return std::tuple(place(a), a.rank != owner, a.rank) < std::tuple(place(b), b.rank != owner, b.rank);
  });
  const auto end =
      std::unique(out.begin(), out.end(), [](const auto& a, const auto& b) { return place(a) == place(b); });
  out.erase(end, out.end());
  out.shrink_to_fit();
  return out;
}

// Sweeps over the rows with the sources that reach into the current one, by column. As these are disjoint, a
// new one can overlap its neighbors only.
void require_disjoint(const SlicePlan::Tensor& t) {
  using Open = std::map<int64_t, const SlicePlan::Source*>;
  Open open;
  std::multimap<int64_t, Open::iterator> ends;  // by the row after the last one
  for (const SlicePlan::Source& s : t.sources) {
    while (!ends.empty() && ends.begin()->first <= s.row) {
      open.erase(ends.begin()->second);
      ends.erase(ends.begin());
    }
    const auto next = open.lower_bound(s.column);
    const SlicePlan::Source* other = nullptr;
    if (next != open.end() && next->first < s.column + s.columns) other = next->second;
    if (next != open.begin() && std::prev(next)->first + std::prev(next)->second->columns > s.column)
      other = std::prev(next)->second;
    NRL_CHECK(!other, "tensor \"{}\": slices of ranks {} and {} overlap", t.name,
              std::min(s.rank, other->rank), std::max(s.rank, other->rank));
    ends.emplace(s.row + s.rows, open.emplace_hint(next, s.column, &s));
  }
}

// `t.sources` are sorted by row.
void require_cover(const SlicePlan::Tensor& t) {
  int64_t covered = 0;
  for (const SlicePlan::Source& s : t.sources) {
    NRL_CHECK(s.row >= 0 && s.rows > 0 && s.column >= 0 && s.columns > 0 && s.row + s.rows <= t.height() &&
                  s.column + s.columns <= t.width(),
              "tensor \"{}\" {}: rank {} holds rows {}+{}, columns {}+{} of it", t.name, shape_text(t.shape),
              s.rank, s.row, s.rows, s.column, s.columns);
    covered += area(s);
  }
  require_disjoint(t);
  NRL_CHECK(covered == t.height() * t.width(), "tensor \"{}\" {}: the ranks hold {} of its {} elements",
            t.name, shape_text(t.shape), covered, t.height() * t.width());
}

// Among the ranks that hold most of the tensor, the one with the least bytes to write.
int choose_owner(const Held& held, const std::map<int, int64_t>& load) {
  std::map<int, int64_t> has;
  for (const SlicePlan::Source& s : held.slices) has[s.rank] += area(s);
  int64_t most = 0, least = std::numeric_limits<int64_t>::max();
  for (const auto& [rank, elements] : has) most = std::max(most, elements);
  int owner = 0;
  for (const auto& [rank, elements] : has) {
    const auto at = load.find(rank);
    const int64_t bytes = at == load.end() ? 0 : at->second;
    if (elements == most && bytes < least) {
      least = bytes;
      owner = rank;
    }
  }
  return owner;
}

}  // namespace

std::vector<int> SlicePlan::owners() const {
  std::set<int> out;
  for (const Tensor& t : tensors) out.insert(t.owner);
  return {out.begin(), out.end()};
}

std::vector<SlicePlan> SlicePlan::parts(int ranks) const {
  std::vector<SlicePlan> out(static_cast<size_t>(ranks));
  for (const Tensor& t : tensors) {
    out.at(static_cast<size_t>(t.owner)).tensors.push_back(t);
    for (const Source& s : t.sources) {
      if (s.rank == t.owner) continue;
      std::vector<Tensor>& part = out.at(static_cast<size_t>(s.rank)).tensors;
      if (part.empty() || part.back().name != t.name) part.push_back({t.name, t.dtype, t.shape, t.owner, {}});
      part.back().sources.push_back(s);
    }
  }
  return out;
}

std::string SlicePlan::to_text() const {
  JsonValue out = JsonValue::array();
  for (const Tensor& t : tensors) {
    JsonValue sources = JsonValue::array();
    for (const Source& s : t.sources)
      sources.push_back(numbers({s.rank, s.row, s.rows, s.column, s.columns, s.transposed ? 1 : 0}));
    out.push_back(JsonValue::object({{"name", t.name},
                                     {"dtype", static_cast<int>(t.dtype)},
                                     {"shape", numbers(t.shape)},
                                     {"owner", t.owner},
                                     {"sources", std::move(sources)}}));
  }
  return out.dump();
}

SlicePlan SlicePlan::from_text(const std::string& text) {
  SlicePlan plan;
  const JsonValue all = parse_own(text, "the plan of slices");
  for (const JsonValue& v : all.items()) {
    Tensor t{v.get_string("name"),
             static_cast<DType>(v.get_int("dtype")),
             numbers_from(v.at("shape")),
             static_cast<int>(v.get_int("owner")),
             {}};
    for (const JsonValue& s : v.at("sources").items()) {
      const std::vector<int64_t> n = numbers_from(s);
      t.sources.push_back({static_cast<int>(n.at(0)), n.at(1), n.at(2), n.at(3), n.at(4), n.at(5) != 0});
    }
    plan.tensors.push_back(std::move(t));
  }
  return plan;
}

std::string slices_to_text(std::span<const TensorSlice> slices) {
  JsonValue out = JsonValue::array();
  for (const TensorSlice& s : slices)
    out.push_back(
        JsonValue::object({{"name", s.name},
                           {"dtype", static_cast<int>(s.dtype)},
                           {"shape", numbers(s.shape)},
                           {"slice", numbers({s.row, s.rows, s.column, s.columns, s.transposed ? 1 : 0})}}));
  return out.dump();
}

SlicePlan plan_slices(const std::vector<std::string>& by_rank, bool one_owner) {
  std::vector<Held> all;
  std::map<std::string, size_t> index;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const JsonValue list = parse_own(by_rank[rank], "the slices of a rank");
    for (const JsonValue& v : list.items()) {
      const std::string name = v.get_string("name");
      const auto dtype = static_cast<DType>(v.get_int("dtype"));
      std::vector<int64_t> shape = numbers_from(v.at("shape"));
      const auto [at, fresh] = index.try_emplace(name, all.size());
      if (fresh) all.push_back({{name, dtype, shape, 0, {}}, {}});
      Held& held = all[at->second];
      NRL_CHECK(held.tensor.dtype == dtype && held.tensor.shape == shape && shape.size() <= 2,
                "tensor \"{}\" of rank {} is {} {}, of another one {} {}", name, rank, name_of(dtype),
                shape_text(shape), name_of(held.tensor.dtype), shape_text(held.tensor.shape));
      const std::vector<int64_t> n = numbers_from(v.at("slice"));
      held.slices.push_back({static_cast<int>(rank), n.at(0), n.at(1), n.at(2), n.at(3), n.at(4) != 0});
    }
  }
  const bool first_holds_all = std::all_of(all.begin(), all.end(), [](const Held& held) {
    int64_t has = 0;
    for (const SlicePlan::Source& s : held.slices) has += s.rank == 0 ? area(s) : 0;
    return has == held.tensor.height() * held.tensor.width();
  });
  SlicePlan plan;
  std::map<int, int64_t> load;
  for (Held& held : all) {
    SlicePlan::Tensor& t = held.tensor;
    t.owner = one_owner || first_holds_all ? 0 : choose_owner(held, load);
    t.sources = choose_sources(held, t.owner);
    require_cover(t);
    load[t.owner] += t.bytes();
    plan.tensors.push_back(std::move(t));
  }
  return plan;
}

}  // namespace nrl

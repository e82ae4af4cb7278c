#include "core/io/slice_plan.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>

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

bool same_place(const SlicePlan::Source& a, const SlicePlan::Source& b) {
  return a.row == b.row && a.rows == b.rows && a.column == b.column && a.columns == b.columns;
}

bool overlap(const SlicePlan::Source& a, const SlicePlan::Source& b) {
  return a.row < b.row + b.rows && b.row < a.row + a.rows && a.column < b.column + b.columns &&
         b.column < a.column + a.columns;
}

int64_t area(const SlicePlan::Source& s) {
  return s.rows * s.columns;
}

// One source per slice position, the owner's if it holds it.
std::vector<SlicePlan::Source> choose_sources(const Held& held, int owner) {
  std::vector<SlicePlan::Source> out;
  for (const SlicePlan::Source& s : held.slices) {
    const auto same =
        std::find_if(out.begin(), out.end(), [&](const auto& other) { return same_place(s, other); });
    if (same == out.end())
      out.push_back(s);
    else if (s.rank == owner)
      *same = s;
  }
  return out;
}

void require_cover(const SlicePlan::Tensor& t) {
  int64_t covered = 0;
  for (size_t i = 0; i < t.sources.size(); ++i) {
    const SlicePlan::Source& s = t.sources[i];
    NRL_CHECK(s.row >= 0 && s.rows > 0 && s.column >= 0 && s.columns > 0 && s.row + s.rows <= t.height() &&
                  s.column + s.columns <= t.width(),
              "tensor \"{}\" {}: rank {} holds rows {}+{}, columns {}+{} of it", t.name, shape_text(t.shape),
              s.rank, s.row, s.rows, s.column, s.columns);
    for (size_t j = 0; j < i; ++j)
      NRL_CHECK(!overlap(s, t.sources[j]), "tensor \"{}\": slices of ranks {} and {} overlap", t.name,
                t.sources[j].rank, s.rank);
    covered += area(s);
  }
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

SlicePlan plan_slices(const std::vector<std::string>& by_rank) {
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
    t.owner = first_holds_all ? 0 : choose_owner(held, load);
    t.sources = choose_sources(held, t.owner);
    require_cover(t);
    load[t.owner] += t.bytes();
    plan.tensors.push_back(std::move(t));
  }
  return plan;
}

}  // namespace nrl

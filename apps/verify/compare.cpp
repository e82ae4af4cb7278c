#include "apps/verify/compare.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <span>

#include "core/base/error.h"
#include "core/ops/transfer.h"

namespace nrl::verify {
namespace {

constexpr int64_t block_elements = (int64_t{16} << 20) / 4;

// Elements [first, first + count) of a tensor as f32, which represents every value of bf16 and f16.
void read(ops::Exec& exec, const Tensor& tensor, int64_t first, int64_t count, std::vector<float>& out) {
  out.resize(static_cast<size_t>(count));
  if (count == 0) return;
  const Tensor part =
      make_tensor(static_cast<char*>(tensor.data) + first * size_of(tensor.dtype), tensor.dtype, {count});
  if (tensor.dtype == DType::f32) {
    ops::download(exec, part, out.data());
    return;
  }
  const auto upcast = [&](auto type) {
    std::vector<decltype(type)> rounded(out.size());
    ops::download(exec, part, rounded.data());
    std::transform(rounded.begin(), rounded.end(), out.begin(), [](auto v) { return static_cast<float>(v); });
  };
  NRL_CHECK(tensor.dtype == DType::bf16 || tensor.dtype == DType::f16, "tensor of {}", name_of(tensor.dtype));
  tensor.dtype == DType::bf16 ? upcast(bf16()) : upcast(f16());
}

// Rows [row, row + rows) of a logical tensor, all columns.
struct Block {
  int64_t row = 0, rows = 0, width = 0;
  std::vector<float> values;
};

// The sums of one rank over a logical tensor.
struct Sums {
  double counted_squares = 0, squares = 0, reference = 0;
  int64_t unequal = 0, counted = 0;
};

class LocalParts {
 public:
  explicit LocalParts(const HeldTensors& mine) : mine_(mine) {
    for (const Held& held : mine.all)
      for (const model::Part& part : mine.parameters->all[held.parameter].parts)
        if (std::max(held.offset, part.offset) <
            std::min(held.offset + held.values.numel(), part.offset + part.numel()))
          by_name_[part.name].push_back({&held, &part});
  }

  // Adds the differences of this rank's elements in the block.
  void compare(const std::string& name, const Block& block, Sums& sums) {
    const auto found = by_name_.find(name);
    if (found == by_name_.end()) return;
    for (const auto& [held, part] : found->second) add(*held, *part, block, sums);
  }

 private:
  struct Local {
    const Held* held;
    const model::Part* part;
  };

  void add(const Held& held, const model::Part& part, const Block& block, Sums& sums) {
    const int64_t first_row = std::max(block.row, part.row) - part.row,
                  last_row = std::min(block.row + block.rows, part.row + part.rows) - part.row;
    // In elements of the part, which are contiguous in the parameter.
    const int64_t begin = std::max(first_row * part.columns, held.offset - part.offset),
                  end = std::min(last_row * part.columns, held.offset + held.values.numel() - part.offset);
    if (begin >= end) return;
    read(*mine_.exec, held.values, part.offset + begin - held.offset, end - begin, values_);
    for (int64_t i = begin; i < end;) {
      const int64_t run = std::min(end, (i / part.columns + 1) * part.columns) - i;
      const float* own = values_.data() + (i - begin);
      const float* want = block.values.data() + (part.element(i) - block.row * block.width);
      double squares = 0;
      for (int64_t k = 0; k < run; ++k) {
        const double d = static_cast<double>(own[k]) - static_cast<double>(want[k]);
        squares += d * d;
        sums.unequal += std::memcmp(own + k, want + k, sizeof(float)) != 0;
      }
      sums.squares += squares;
      if (held.counted) sums.counted_squares += squares, sums.counted += run;
      i += run;
    }
  }

  const HeldTensors& mine_;
  std::map<std::string, std::vector<Local>> by_name_;
  std::vector<float> values_;
};

// The ranges of a parameter that this rank counts, in its elements.
std::vector<parallel::ElementRange> counted_ranges(const plan::ParamGroup& group, int parameter) {
  std::vector<parallel::ElementRange> ranges;
  for (const plan::OwnedRange& r : group.owned)
    if (r.parameter == parameter && r.counted) ranges.push_back({r.offset, r.offset + r.count});
  std::sort(ranges.begin(), ranges.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
  return ranges;
}

Tensor slice(const Tensor& tensor, int64_t first, int64_t count) {
  return make_tensor(static_cast<char*>(tensor.data) + first * size_of(tensor.dtype), tensor.dtype, {count});
}

}  // namespace

HeldTensors held_gradients(engine::Engine& engine) {
  HeldTensors out{&engine.plan().parameters, &engine.exec(), {}, true};
  for (const engine::GroupTensors& t : engine.groups())
    if (t.group->trainable)
      for (const plan::OwnedRange& r : t.group->owned)
        out.all.push_back({.parameter = r.parameter,
                           .offset = r.offset,
                           .values = slice(t.gradients, r.gradient, r.count),
                           .counted = r.counted});
  return out;
}

HeldTensors held_weights(engine::Engine& engine) {
  engine.finish_gathers();
  HeldTensors out{&engine.plan().parameters, &engine.exec(), {}};
  for (const engine::GroupTensors& t : engine.groups()) {
    const plan::ParamGroup& g = *t.group;
    if (g.weights_sharded) {
      for (const plan::OwnedRange& r : g.owned)
        out.all.push_back({.parameter = r.parameter,
                           .offset = r.offset,
                           .values = slice(t.weights, r.weight, r.count),
                           .counted = r.counted});
      continue;
    }
    // Whole copies, of which this rank counts a part.
    for (size_t i = 0; i < g.parameters.size(); ++i) {
      const int p = g.parameters[i];
      const int64_t start = g.layout.place(static_cast<int>(i)).start;
      int64_t at = 0;
      const auto add = [&](int64_t end, bool counted) {
        if (at < end)
          out.all.push_back({.parameter = p,
                             .offset = at,
                             .values = slice(t.weights, start + at, end - at),
                             .counted = counted});
        at = std::max(at, end);
      };
      for (const parallel::ElementRange& r : counted_ranges(g, p)) {
        add(r.begin, false);
        add(r.end, true);
      }
      add(engine.plan().parameters.all[p].numel(), false);
    }
  }
  return out;
}

std::vector<Difference> compare(comm::Communicator& world, const model::ParameterList& whole,
                                const HeldTensors* reference, const HeldTensors& mine) {
  std::vector<Difference> out;
  std::vector<Sums> sums;
  std::map<std::string, size_t> index;
  LocalParts local(mine);
  Block block;
  for (size_t p = 0; p < whole.all.size(); ++p) {
    const auto holds = [p](const Held& held) { return held.parameter == static_cast<int>(p); };
    if (mine.trained_only && !whole.all[p].trainable) continue;
    for (const model::Part& part : whole.all[p].parts) {
      const auto [at, added] = index.try_emplace(part.name, out.size());
      if (added) {
        int64_t numel = 1;
        for (const int64_t size : part.global) numel *= size;
        out.push_back({.name = part.name, .numel = numel});
        sums.emplace_back();
      }
      Sums& tensor = sums[at->second];
      block.width = part.columns;
      const int64_t rows = std::max<int64_t>(block_elements / block.width, 1);
      for (int64_t r = 0; r < part.rows; r += rows) {
        block.row = part.row + r;
        block.rows = std::min(rows, part.rows - r);
        block.values.resize(static_cast<size_t>(block.rows * block.width));
        if (world.rank() == 0) {
          // One rank holds a parameter in one piece or in several.
          int64_t found = 0;
          const int64_t first = part.offset + r * block.width, last = first + block.rows * block.width;
          std::vector<float> values;
          for (const Held& held : reference->all) {
            if (!holds(held)) continue;
            const int64_t begin = std::max(first, held.offset),
                          end = std::min(last, held.offset + held.values.numel());
            if (begin >= end) continue;
            read(*reference->exec, held.values, begin - held.offset, end - begin, values);
            std::copy(values.begin(), values.end(), block.values.begin() + (begin - first));
            found += end - begin;
          }
          NRL_CHECK(found == last - first, "{}: the reference has {} of {} elements", part.name, found,
                    last - first);
          for (const float v : block.values)
            tensor.reference += static_cast<double>(v) * static_cast<double>(v);
        }
        world.broadcast(comm::View(block.values), 0);
        local.compare(part.name, block, tensor);
      }
    }
  }

  constexpr size_t summed = 4;
  std::vector<double> totals, largest;
  for (const Sums& s : sums) {
    totals.insert(totals.end(), {s.counted_squares, s.reference, static_cast<double>(s.unequal),
                                 static_cast<double>(s.counted)});
    largest.push_back(s.squares);
  }
  world.all_reduce(std::span(totals));
  world.all_reduce(std::span(largest), comm::Reduce::max);
  std::vector<double> ranks;
  for (size_t i = 0; i < sums.size(); ++i) {
    const bool mine_is_largest = sums[i].squares == largest[i] || std::isnan(sums[i].squares);
    ranks.push_back(mine_is_largest ? world.rank() : world.size());
  }
  world.all_reduce(std::span(ranks), comm::Reduce::min);
  for (size_t i = 0; i < sums.size(); ++i) {
    Difference& d = out[i];
    const double* total = totals.data() + summed * i;
    // std::max() would drop a NaN.
    d.norm = std::isnan(total[0]) || std::isnan(largest[i]) ? std::numeric_limits<double>::quiet_NaN()
                                                            : std::sqrt(std::max(total[0], largest[i]));
    d.reference_norm = std::sqrt(total[1]);
    d.unequal = static_cast<int64_t>(total[2]);
    d.counted = static_cast<int64_t>(total[3]);
    if (d.unequal > 0) d.rank = static_cast<int>(ranks[i]);
  }
  return out;
}

}  // namespace nrl::verify

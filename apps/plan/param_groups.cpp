#include "apps/plan/param_groups.h"

#include <algorithm>

#include "core/base/error.h"
#include "core/ops/optimizer.h"

namespace nrl::plan {
namespace {

using memory::Category;
using model::Copies;
using model::Parameter;

const Parameter& at(const model::ParameterList& list, int i) {
  return list.all[static_cast<size_t>(i)];
}

bool counts_copy(const Parameter& p, const GroupOptions& o) {
  return p.copies == Copies::none || (p.copies == Copies::tp ? o.first_tp : o.first_embedding);
}

std::vector<OwnedRange> owned_ranges(const ParamGroup& g, const model::ParameterList& list,
                                     const GroupOptions& o) {
  std::vector<OwnedRange> owned;
  if (g.sharded()) {
    for (const parallel::ShardPiece& piece : g.layout.pieces(o.shard_rank)) {
      const int p = g.parameters[static_cast<size_t>(piece.param)];
      owned.push_back({.parameter = p,
                       .offset = piece.in_param.begin,
                       .count = piece.in_param.size(),
                       .flat = piece.in_flat,
                       .state = piece.in_shard,
                       .counted = counts_copy(at(list, p), o)});
    }
    return owned;
  }
  for (size_t i = 0; i < g.parameters.size(); ++i) {
    const Parameter& p = at(list, g.parameters[i]);
    const int64_t start = g.layout.place(static_cast<int>(i)).start;
    owned.push_back({.parameter = g.parameters[i],
                     .count = p.numel(),
                     .flat = start,
                     .state = start,
                     .counted = o.shard_rank == 0 && counts_copy(p, o)});
  }
  return owned;
}

// Whole shards including padding (which is zero), so that a sum takes few calls, minus the elements that
// another rank counts.
std::vector<parallel::ElementRange> counted_ranges(const ParamGroup& g, const model::ParameterList& list,
                                                   const GroupOptions& o) {
  std::vector<parallel::ElementRange> ranges;
  if (g.sharded()) {
    for (int b = 0; b < static_cast<int>(g.layout.buckets().size()); ++b)
      ranges.push_back(g.layout.shard(b, o.shard_rank));
  } else if (o.shard_rank == 0) {
    ranges.push_back({0, g.layout.total()});
  }
  for (size_t i = 0; i < g.parameters.size(); ++i) {
    const Parameter& p = at(list, g.parameters[i]);
    if (counts_copy(p, o)) continue;
    const int64_t begin = g.layout.place(static_cast<int>(i)).start, end = begin + p.numel();
    std::vector<parallel::ElementRange> rest;
    for (const parallel::ElementRange& r : ranges) {
      rest.push_back({r.begin, std::min(r.end, begin)});
      rest.push_back({std::max(r.begin, end), r.end});
    }
    std::erase_if(rest, [](const parallel::ElementRange& r) { return r.begin >= r.end; });
    ranges = std::move(rest);
  }
  return ranges;
}

std::vector<parallel::ElementRange> zeroed_ranges(const ParamGroup& g, const model::ParameterList& list) {
  std::vector<parallel::ElementRange> ranges;
  for (size_t i = 0; i < g.parameters.size(); ++i) {
    const Parameter& p = at(list, g.parameters[i]);
    if (p.overwrites_gradient) continue;
    const int64_t begin = g.layout.place(static_cast<int>(i)).start;
    // The padding between parameters is zero and stays zero.
    if (!ranges.empty() && begin >= ranges.back().end &&
        begin - ranges.back().end < parallel::FlatBuckets::param_align)
      ranges.back().end = begin + p.numel();
    else
      ranges.push_back({begin, begin + p.numel()});
  }
  return ranges;
}

// The chunk table of the update. Adjacent ranges with the same rates are merged.
std::vector<int64_t> update_chunks(const ParamGroup& g, const model::ParameterList& list) {
  auto owned = g.owned;
  std::sort(owned.begin(), owned.end(), [](const auto& a, const auto& b) { return a.flat < b.flat; });
  std::vector<ops::AdamWRange> ranges;
  for (const OwnedRange& r : owned) {
    const int rates = at(list, r.parameter).decay ? 1 : 0;
    if (!ranges.empty()) {
      ops::AdamWRange& last = ranges.back();
      const int64_t gap = r.flat - (last.flat + last.count);
      // The padding between parameters is zero and stays zero.
      if (last.rates == rates && gap < parallel::FlatBuckets::param_align &&
          r.state - (last.state + last.count) == gap) {
        last.count += gap + r.count;
        continue;
      }
    }
    ranges.push_back({.flat = r.flat, .state = r.state, .count = r.count, .rates = rates});
  }
  return ops::adamw_chunks(ranges);
}

}  // namespace

std::vector<ParamGroup> make_param_groups(
    const model::ParameterList& parameters,
    const std::function<GroupOptions(const std::string& group)>& options, memory::MemoryPlan& memory) {
  std::vector<ParamGroup> groups;
  for (size_t i = 0; i < parameters.all.size(); ++i) {
    const Parameter& p = parameters.all[i];
    auto g = std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.name == p.group; });
    if (g == groups.end()) {
      g = groups.emplace(groups.end());
      g->name = p.group;
      g->trainable = p.trainable;
    }
    NRL_CHECK(g->trainable == p.trainable, "group {}: {} differs in `trainable` from the other parameters",
              g->name, p.name);
    g->parameters.push_back(static_cast<int>(i));
  }
  for (ParamGroup& g : groups) g.reduce = options(g.name).reduce;
  std::stable_sort(groups.begin(), groups.end(), [](const ParamGroup& a, const ParamGroup& b) {
    return parallel::canonical_less(a.reduce, b.reduce);
  });
  for (ParamGroup& g : groups) {
    const GroupOptions o = options(g.name);
    std::vector<parallel::ParamSpec> specs;
    for (const int p : g.parameters) specs.push_back({at(parameters, p).name, at(parameters, p).numel()});
    g.layout = parallel::FlatBuckets(std::move(specs), o.bucket_elements, o.shards);
    g.strategy = o.strategy;
    g.weight = o.recipe.weights();
    g.gradient = o.recipe.weight_gradients();
    g.lr_scale = o.lr_scale;
    g.owned = owned_ranges(g, parameters, o);
    const auto add = [&](const char* what, Category category, int64_t bytes) {
      return memory.add(g.name + " " + what, category, bytes);
    };
    g.weights = add("weights", Category::weights, g.layout.total() * size_of(g.weight));
    if (!g.trainable) continue;
    g.counted = counted_ranges(g, parameters, o);
    g.gradients = add("gradients", Category::gradients, g.layout.total() * size_of(g.gradient));
    const auto add_state = [&](const char* name, DType dtype) {
      g.state.push_back({name, dtype, add(name, Category::optimizer, g.state_elements() * size_of(dtype))});
    };
    for (const char* name : {"exp_avg", "exp_avg_sq"}) add_state(name, o.recipe.optimizer_state());
    if (const auto master = o.recipe.master_weights()) add_state("master", *master);
    g.zeroed = zeroed_ranges(g, parameters);
    g.chunk_table = update_chunks(g, parameters);
    g.chunks = add("update chunks", Category::data, static_cast<int64_t>(g.chunk_table.size()) * 8);
  }
  return groups;
}

}  // namespace nrl::plan

#include "apps/plan/param_groups.h"

#include <algorithm>
#include <utility>

#include "apps/model/spec/rank_groups.h"
#include "apps/plan/shares.h"
#include "core/base/error.h"
#include "core/ops/optimizer.h"

namespace nrl::plan {
namespace {

using memory::Category;
using model::Copies;
using model::Parameter;

const Parameter& at(const model::ParameterList& list, int i) {
  return list.all[i];
}

// Blocks that share a scale begin where parameters do, and must not be cut by a shard. A part that is rounded
// to FP8 is a matrix of rows of so many elements.
int64_t shard_align(const ParamGroup& g, const precision::Recipe& recipe) {
  static_assert(parallel::FlatBuckets::param_align % ops::moment_block == 0);
  const precision::OptimizerFormats& o = recipe.optimizer();
  const bool scaled = ops::has_moment_scales(o.exp_avg) || ops::has_moment_scales(o.exp_avg_sq);
  return scaled || g.fp8 ? ops::moment_block : 1;
}

bool counts_copy(const Parameter& p, const GroupOptions& o) {
  return p.copies == Copies::none || o.first_tp;
}

/// All parameters, as they lie in the flat layout. `counted`: not by another tensor-parallel rank.
std::vector<OwnedRange> whole_ranges(const ParamGroup& g, const model::ParameterList& list,
                                     const GroupOptions& o) {
  std::vector<OwnedRange> out;
  for (size_t i = 0; i < g.parameters.size(); ++i) {
    const Parameter& p = at(list, g.parameters[i]);
    const int64_t start = g.layout.place(static_cast<int>(i)).start;
    out.push_back({.parameter = g.parameters[i],
                   .count = p.numel(),
                   .weight = start,
                   .gradient = start,
                   .state = start,
                   .counted = counts_copy(p, o)});
  }
  return out;
}

/// The ranges in this rank's shards; `counted` as above.
std::vector<OwnedRange> shard_ranges(const ParamGroup& g, const model::ParameterList& list,
                                     const GroupOptions& o) {
  std::vector<OwnedRange> out;
  for (const parallel::ShardPiece& piece : g.layout.pieces(o.shard_rank)) {
    const int p = g.parameters[piece.param];
    out.push_back({.parameter = p,
                   .offset = piece.in_param.begin,
                   .count = piece.in_param.size(),
                   .weight = g.weights_sharded ? piece.in_shard : piece.in_flat,
                   .gradient = g.gradients_sharded ? piece.in_shard : piece.in_flat,
                   .state = piece.in_shard,
                   .counted = counts_copy(at(list, p), o)});
  }
  return out;
}

std::vector<OwnedRange> owned_ranges(const ParamGroup& g, const model::ParameterList& list,
                                     const GroupOptions& o) {
  std::vector<OwnedRange> owned = g.sharded() ? shard_ranges(g, list, o) : whole_ranges(g, list, o);
  const bool counts = o.replica == 0 && (g.sharded() || o.shard_rank == 0);
  for (OwnedRange& r : owned) {
    r.counted = r.counted && counts;
    NRL_CHECK(r.state % shard_align(g, o.recipe) == 0, "{}: a range begins at {} of the state", g.name,
              r.state);
  }
  return owned;
}

int64_t state_bytes(const ParamGroup& g) {
  int64_t bytes = 0;
  for (const StateTensor& s : g.state) bytes += size_of(s.dtype);
  return bytes;
}

// Sets ParamGroup::saved_weights and saved. `owned`: the ranges before any is offloaded.
void share_saving(const model::ParameterList& parameters, const GroupOptions& o,
                  const std::vector<OwnedRange>& owned, ParamGroup& g) {
  // One copy of the weights, or of the state, is on one rank, or sharded over several.
  const int all = o.shards * o.replicas;
  const int of_weights = g.weights_sharded ? o.replicas : all,
            weights_rank = g.weights_sharded ? o.replica : g.reduce_rank;
  const int of_state = g.sharded() ? o.replicas : all, state_rank = g.sharded() ? o.replica : g.reduce_rank;
  std::vector<int64_t> weights(g.parameters.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!g.weights_sharded)
      weights[i] = at(parameters, g.parameters[i]).numel();
    else
      for (const OwnedRange& r : owned)
        if (r.parameter == g.parameters[i]) weights[i] += r.count;
    weights[i] *= size_of(g.weight);
  }
  const bool together = of_weights == of_state;
  const int64_t elements = g.trainable ? g.state_elements() : 0;
  Shares shares =
      divide(weights, together ? elements : 0, state_bytes(g), of_weights, o.least_saved, offload_unit);
  for (size_t i = 0; i < weights.size(); ++i)
    if (shares.thing[i] == weights_rank && counts_copy(at(parameters, g.parameters[i]), o))
      g.saved_weights.push_back(g.parameters[i]);
  std::sort(g.saved_weights.begin(), g.saved_weights.end());
  if (!together) shares = divide({}, elements, state_bytes(g), of_state, o.least_saved, offload_unit);
  const int64_t begin = state_rank == 0 ? 0 : shares.end[static_cast<size_t>(state_rank) - 1],
                end = shares.end[static_cast<size_t>(state_rank)];
  for (OwnedRange r : g.trainable ? owned : std::vector<OwnedRange>()) {
    const int64_t skip = std::clamp<int64_t>(begin - r.state, 0, r.count);
    const int64_t to = std::clamp<int64_t>(end - r.state, 0, r.count);
    if (skip >= to || !counts_copy(at(parameters, r.parameter), o)) continue;
    r.offset += skip, r.weight += skip, r.gradient += skip, r.state += skip;
    r.count = to - skip;
    r.counted = true;
    g.saved.push_back(r);
  }
}

/// Ranges of the state below `offloaded` lie in the offloaded tensors, the others follow from 0 on in those
/// that remain. A range on both sides is cut.
std::vector<OwnedRange> cut_at(int64_t offloaded, const std::vector<OwnedRange>& ranges) {
  std::vector<OwnedRange> out;
  for (OwnedRange r : ranges) {
    const int64_t below = std::clamp<int64_t>(offloaded - r.state, 0, r.count);
    if (below > 0) {
      out.push_back(r);
      out.back().count = below;
      out.back().offloaded = true;
    }
    if (below == r.count) continue;
    r.offset += below, r.weight += below, r.gradient += below, r.count -= below;
    r.state += below - offloaded;
    out.push_back(r);
  }
  return out;
}

// Whole shards including padding (which is zero), so that a sum takes few calls, minus the elements that
// another rank counts.
std::vector<parallel::ElementRange> counted_ranges(const ParamGroup& g, const GroupOptions& o) {
  std::vector<parallel::ElementRange> ranges;
  if (o.replica > 0) return ranges;
  if (g.sharded()) {
    for (int b = 0; b < static_cast<int>(g.layout.buckets().size()); ++b)
      ranges.push_back(g.gradients_sharded ? g.layout.in_shards(b) : g.layout.shard(b, o.shard_rank));
  } else if (o.shard_rank == 0) {
    ranges.push_back({0, g.layout.total()});
  }
  for (const OwnedRange& r : g.owned) {
    if (r.counted) continue;
    const int64_t begin = r.gradient, end = begin + r.count;
    std::vector<parallel::ElementRange> rest;
    for (const parallel::ElementRange& range : ranges) {
      rest.push_back({range.begin, std::min(range.end, begin)});
      rest.push_back({std::max(range.begin, end), range.end});
    }
    std::erase_if(rest, [](const parallel::ElementRange& range) { return range.begin >= range.end; });
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

// Everything in the buckets that the first contribution to a gradient does not overwrite: buffers of buckets
// have arbitrary contents when a microbatch begins.
std::vector<parallel::ElementRange> zeroed_in_buckets(const ParamGroup& g, const model::ParameterList& list) {
  std::vector<parallel::ElementRange> ranges;
  for (const parallel::Bucket& bucket : g.layout.buckets()) {
    int64_t done = bucket.start;  // elements before it are overwritten or in `ranges`
    const auto until = [&](int64_t end) {
      if (done < end) ranges.push_back({done, end});
    };
    for (const int i : bucket.params) {
      const Parameter& p = at(list, g.parameters[i]);
      if (!p.overwrites_gradient) continue;
      until(g.layout.place(i).start);
      done = g.layout.place(i).start + p.numel();
    }
    until(bucket.start + bucket.size);
  }
  return ranges;
}

// Appends an update. Adjacent ranges with the same rates are merged.
void add_update(ParamGroup& g, const model::ParameterList& list, UpdateCall call) {
  std::vector<OwnedRange> owned = g.owned;
  std::sort(owned.begin(), owned.end(), [](const auto& a, const auto& b) { return a.state < b.state; });
  std::vector<ops::AdamWRange>& parts = call.parts;
  for (const OwnedRange& r : owned) {
    if (r.offloaded != call.offloaded || r.state < call.state.begin || r.state >= call.state.end) continue;
    const int64_t flat = r.gradient - call.gradients.begin, state = r.state - call.state.begin;
    const int rates = at(list, r.parameter).decay ? 1 : 0;
    if (!parts.empty()) {
      ops::AdamWRange& last = parts.back();
      const int64_t gap = flat - (last.flat + last.count);
      // The padding between parameters is zero and stays zero.
      if (last.rates == rates && gap >= 0 && gap < parallel::FlatBuckets::param_align &&
          state - (last.state + last.count) == gap) {
        last.count += gap + r.count;
        continue;
      }
    }
    parts.push_back({.flat = flat, .state = state, .count = r.count, .rates = rates});
  }
  call.first_chunk = g.chunk_count();
  call.chunks = ops::adamw_chunk_count(parts);
  g.updates.push_back(std::move(call));
}

// Weights and gradients of one update are indexed alike: bucket by bucket where only one of them is in
// shards. What is offloaded is updated apart.
void add_updates(ParamGroup& g, const model::ParameterList& list, int shard_rank) {
  const auto add = [&](UpdateCall call) {
    const int64_t k = g.offloaded_elements;
    const auto [begin, end] = call.state;
    if (begin < k) {
      call.state = {begin, std::min(end, k)};
      call.offloaded = true;
      add_update(g, list, call);
    }
    if (end <= k) return;
    call.state = {std::max(begin, k) - k, end - k};
    call.offloaded = false;
    add_update(g, list, call);
  };
  if (g.weights_sharded == g.gradients_sharded) {
    add({.weights = {0, g.weight_elements()},
         .gradients = {0, g.gradient_elements()},
         .state = {0, g.state_elements()}});
    return;
  }
  for (int b = 0; b < static_cast<int>(g.layout.buckets().size()); ++b) {
    const parallel::ElementRange whole = g.layout.shard(b, shard_rank), own = g.layout.in_shards(b);
    add({.weights = g.weights_sharded ? own : whole,
         .gradients = g.gradients_sharded ? own : whole,
         .state = own});
  }
}

/// The elements of a share of the state, rounded down, so that minimum_memory() is a lower bound.
int64_t offloaded_elements(double share, int64_t elements) {
  static_assert(offload_unit % ops::moment_block == 0);
  if (share >= 1) return elements;
  return static_cast<int64_t>(share * static_cast<double>(elements)) / offload_unit * offload_unit;
}

}  // namespace

parallel::ReduceOptions ParamGroup::reduce_options(bool overlap) const {
  parallel::ReduceOptions options{.strategy = strategy,
                                  .overlap = overlap,
                                  .wire = wire,
                                  .fp32_sums = fp32_sums,
                                  .error_feedback = error_feedback};
  options.strategy.parameters = weights_gathered;
  options.strategy.gradients = gradients_sharded;
  return options;
}

int64_t ParamGroup::chunk_count() const {
  return updates.empty() ? 0 : updates.back().first_chunk + updates.back().chunks;
}

std::vector<int64_t> ParamGroup::chunk_rows() const {
  std::vector<ops::AdamWRange> parts;
  for (const UpdateCall& u : updates) parts.insert(parts.end(), u.parts.begin(), u.parts.end());
  return ops::adamw_chunks(parts);
}

void ParamGroup::add_microbatches() {
  if (std::exchange(adds_microbatches, true)) return;
  zeroed.clear();
  for (int b = 0; b < static_cast<int>(layout.buckets().size()); ++b) zeroed.push_back(layout.range(b));
}

std::optional<parallel::GroupId> ParamGroup::scale_group(int tensor, Scaling scaling) const {
  if (has_scale_blocks(scaling)) tensor = 1;
  if (weights_sharded) return model::batch_ranks(tensor);
  if (tensor > 1) return parallel::group::tp;
  return std::nullopt;
}

std::vector<ParamGroup> make_param_groups(
    const model::ParameterList& parameters,
    const std::function<GroupOptions(const std::string& group)>& options, memory::MemoryPlan& memory) {
  std::vector<ParamGroup> groups;
  const std::vector<int> units = parameters.units();
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
    g.fp8 = at(parameters, g.parameters.front()).fp8;
    g.weights_gathered = o.strategy.parameters && o.shards > 1;
    g.weights_sharded = g.weights_gathered || (g.fp8 && o.strategy.optimizer_state && o.shards > 1);
    g.gradients_sharded = g.trainable && o.strategy.gradients && o.shards > 1;
    g.gradient_buckets = g.gradients_sharded || (g.trainable && o.main_gradients != DType::f32);
    NRL_CHECK(!g.gradient_buckets || o.strategy.optimizer_state, "{}: gradients of {} in {}", g.name,
              o.strategy.name, name_of(o.main_gradients));
    std::vector<parallel::ParamSpec> specs;
    int64_t total = 0;
    for (const int p : g.parameters) {
      total += at(parameters, p).numel();
      specs.push_back({.name = at(parameters, p).name,
                       .numel = at(parameters, p).numel(),
                       .unit = g.gradient_buckets || g.weights_gathered ? units[p] : 0});
    }
    g.bucket_elements =
        o.bucket_elements.value_or(parallel::auto_bucket_elements(total, o.shards * o.replicas));
    g.layout = parallel::FlatBuckets(std::move(specs), g.bucket_elements, o.shards, shard_align(g, o.recipe));
    g.strategy = o.strategy;
    g.replicas = o.replicas;
    g.wire = o.wire;
    g.fp32_sums = o.fp32_sums;
    g.error_feedback = o.error_feedback;
    g.reduce_rank = o.replica * o.shards + o.shard_rank;
    g.overlap_gather = o.overlap_gather;
    g.weight = at(parameters, g.parameters.front()).f32 ? DType::f32 : o.recipe.weights();
    g.gradient = o.recipe.weight_gradients();
    g.main_gradient = g.gradient_buckets ? o.main_gradients : g.gradient;
    g.lr_scale = o.lr_scale;
    if (g.trainable) g.offloaded_elements = offloaded_elements(o.offloaded, g.state_elements());
    const std::vector<OwnedRange> owned = owned_ranges(g, parameters, o);
    g.owned = cut_at(g.offloaded_elements, owned);
    const auto share = [&] {
      if (!o.updates) return;
      share_saving(parameters, o, owned, g);
      g.saved = cut_at(g.offloaded_elements, g.saved);
    };
    const auto add = [&](const char* what, Category category, int64_t bytes) {
      return memory.add(g.name + " " + what, category, bytes);
    };
    g.weights = add(g.fp8 ? "weights, of the optimizer" : "weights", Category::weights,
                    g.weight_elements() * size_of(g.weight));
    if (g.fp8) g.codes = add("weights in FP8", Category::weights, g.code_elements() * size_of(g.read_type()));
    if (!g.trainable) {
      share();
      continue;
    }
    g.counted = counted_ranges(g, o);
    g.gradients = add("gradients", Category::gradients, g.gradient_elements() * size_of(g.main_gradient));
    if (const int64_t elements = g.reduce_options(true).staging_elements(g.layout); elements > 0)
      g.staging = add("gradient staging", Category::gradients, elements * size_of(g.wire));
    const auto add_errors = [&](const char* what, int64_t elements) {
      return elements > 0 ? add(what, Category::gradients, elements * size_of(DType::f32)) : -1;
    };
    const parallel::ReduceOptions reduction = g.reduce_options(true);
    g.errors = add_errors("gradient errors", reduction.error_elements(g.layout));
    g.sum_errors = add_errors("errors of gradient sums", reduction.sum_error_elements(g.layout));
    if (g.errors >= 0) g.error_ranges = whole_ranges(g, parameters, o);
    if (g.sum_errors >= 0) g.sum_error_ranges = shard_ranges(g, parameters, o);
    const auto add_state = [&](const std::string& name, DType dtype) {
      plan::StateTensor state{name, dtype};
      const int64_t n = g.resident_state_elements(), k = g.offloaded_elements;
      const bool scaled = ops::has_moment_scales(dtype);
      state.buffer = add(name.c_str(), Category::optimizer, n * size_of(dtype));
      if (scaled) state.scales = add((name + " scales").c_str(), Category::optimizer, ops::moment_blocks(n));
      const auto offload = [&](const std::string& what, int64_t bytes) {
        return memory.add(g.name + " " + what, Category::optimizer, bytes, memory::Tier::host);
      };
      if (k > 0) state.offloaded = offload(name, k * size_of(dtype));
      if (k > 0 && scaled) state.offloaded_scales = offload(name + " scales", ops::moment_blocks(k));
      g.state.push_back(std::move(state));
    };
    const precision::OptimizerFormats& formats = o.recipe.optimizer();
    add_state("exp_avg", formats.exp_avg);
    add_state("exp_avg_sq", formats.exp_avg_sq);
    // In FP8 groups only the optimizer reads the bf16 weights, so remainders are the smaller master format.
    const bool remainders = (formats.remainders || g.fp8) && g.weight == DType::bf16;
    if (const auto master = o.recipe.master_weights()) add_state("master", remainders ? DType::u16 : *master);
    share();
    g.zeroed = g.gradient_buckets ? zeroed_in_buckets(g, parameters) : zeroed_ranges(g, parameters);
    if (o.updates) add_updates(g, parameters, o.shard_rank);
    g.chunks = add("update chunks", Category::data, g.chunk_count() * 4 * size_of(DType::i64));
  }
  return groups;
}

void add_squared_norm(ops::Exec& exec, const ParamGroup& group, const Tensor& gradients, const Tensor& norm) {
  for (const parallel::ElementRange& r : group.counted)
    ops::add_sum_of_squares(exec, {.x = gradients.rows(r.begin, r.size()), .out = norm, .accumulate = true});
}

model::ShardedParameters sharded_parameters(std::span<const ParamGroup> groups) {
  model::ShardedParameters out;
  for (size_t i = 0; i < groups.size(); ++i) {
    const ParamGroup& g = groups[i];
    out.groups.push_back(g.name);
    for (size_t p = 0; p < g.parameters.size(); ++p) {
      const program::BucketId bucket{static_cast<int>(i), g.layout.place(static_cast<int>(p)).bucket};
      if (g.weights_gathered) out.weights[g.parameters[p]] = bucket;
      if (g.gradient_buckets) out.gradients[g.parameters[p]] = bucket;
    }
  }
  return out;
}

void declare_buckets(std::span<ParamGroup> groups, const program::RangesOfBuckets& ranges,
                     memory::MemoryPlan& memory) {
  const auto declare = [&](const ParamGroup& g, int group, const char* what, memory::Category category,
                           std::vector<memory::Lifetime> program::BucketRanges::*lives, DType dtype) {
    std::vector<memory::BufferId> ids;
    for (int b = 0; b < static_cast<int>(g.layout.buckets().size()); ++b) {
      const auto at = ranges.find({group, b});
      NRL_CHECK(at != ranges.end() && !(at->second.*lives).empty(), "no layer uses bucket {} of {}", b,
                g.name);
      ids.push_back(memory.add(fmt::format("{} bucket {} {}", g.name, b, what), category,
                               g.layout.buckets()[b].size * size_of(dtype), at->second.*lives));
    }
    return ids;
  };
  for (const auto& [bucket, range] : ranges)
    if (range.microbatches > 1) groups[bucket.group].add_microbatches();
  for (size_t i = 0; i < groups.size(); ++i) {
    ParamGroup& g = groups[i];
    const auto group = static_cast<int>(i);
    if (g.weights_gathered)
      g.gathered = declare(g, group, "gathered weights", memory::Category::weights,
                           &program::BucketRanges::weights, g.read_type());
    if (g.gradient_buckets)
      g.bucket_gradients = declare(g, group, "gradients", memory::Category::gradients,
                                   &program::BucketRanges::gradients, g.gradient);
  }
}

}  // namespace nrl::plan

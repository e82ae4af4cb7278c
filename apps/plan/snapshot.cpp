#include "apps/plan/snapshot.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/ops/optimizer.h"

namespace nrl::plan {

namespace {

struct Interval {
  int64_t begin, end;
};

void add(SavedPart::Of of, size_t state, std::vector<Interval> intervals, std::vector<SavedPart>& out) {
  std::sort(intervals.begin(), intervals.end(),
            [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  const size_t first = out.size();
  for (const Interval& i : intervals) {
    if (i.begin == i.end) continue;
    if (out.size() > first && i.begin <= out.back().begin + out.back().bytes)
      out.back().bytes = std::max(out.back().bytes, i.end - out.back().begin);
    else
      out.push_back({of, state, i.begin, i.end - i.begin});
  }
}

}  // namespace

std::vector<SavedPart> saved_parts(const model::ParameterList& parameters, const ParamGroup& g, bool adapters,
                                   bool optimizer) {
  using Of = SavedPart::Of;
  std::vector<SavedPart> out;
  std::vector<Interval> weights;
  const auto add_weights = [&](int64_t first, int64_t count) {
    weights.push_back({first * size_of(g.weight), (first + count) * size_of(g.weight)});
  };
  for (size_t i = 0; i < g.parameters.size(); ++i) {
    const int p = g.parameters[i];
    if (!std::binary_search(g.saved_weights.begin(), g.saved_weights.end(), p)) continue;
    if (parameters.all[static_cast<size_t>(p)].adapter != adapters) continue;
    if (!g.weights_sharded)
      add_weights(g.layout.place(static_cast<int>(i)).start, parameters.all[static_cast<size_t>(p)].numel());
    else
      for (const OwnedRange& r : g.owned)
        if (r.parameter == p) add_weights(r.weight, r.count);
  }
  const bool remainders =
      std::any_of(g.state.begin(), g.state.end(), [](const StateTensor& s) { return s.dtype == DType::u16; });
  if (optimizer && remainders)
    for (const OwnedRange& r : g.saved) add_weights(r.weight, r.count);
  add(Of::weights, 0, std::move(weights), out);
  if (!optimizer || !g.trainable) return out;
  for (size_t k = 0; k < g.state.size(); ++k) {
    std::vector<Interval> values, scales;
    for (const OwnedRange& r : g.saved) {
      if (r.offloaded) continue;
      values.push_back(
          {r.state * size_of(g.state[k].dtype), (r.state + r.count) * size_of(g.state[k].dtype)});
      if (g.state[k].scales >= 0)
        scales.push_back({r.state / ops::moment_block, ops::moment_blocks(r.state + r.count)});
    }
    add(Of::state, k, std::move(values), out);
    add(Of::scales, k, std::move(scales), out);
  }
  for (const auto& [of, ranges] :
       {std::pair(Of::errors, &g.error_ranges), {Of::sum_errors, &g.sum_error_ranges}}) {
    std::vector<Interval> values;
    for (const OwnedRange& r : *ranges)
      if (r.counted)
        values.push_back({r.state * size_of(DType::f32), (r.state + r.count) * size_of(DType::f32)});
    add(of, 0, std::move(values), out);
  }
  return out;
}

int64_t snapshot_bytes(const Config& config, const RunPlan& plan) {
  int64_t bytes = 0;
  for (const ParamGroup& g : plan.groups)
    for (const SavedPart& part :
         saved_parts(plan.parameters, g, static_cast<bool>(plan.spec.trained.adapters),
                     config.checkpointing.save_optimizer))
      bytes += (part.bytes + snapshot_align - 1) / snapshot_align * snapshot_align;
  return bytes;
}

bool wants_snapshot(const Config& config) {
  const CheckpointingConfig& c = config.checkpointing;
  const std::optional<int64_t> steps = resolved_loop(config).max_num_steps;
  const bool by_steps = c.save_period > 0 && !(steps && c.save_period >= *steps);
  if (!c.enabled || !(by_steps || c.save_seconds)) return false;
  return c.is_async.value_or(config.policy.offload_optimizer.value == 0);
}

}  // namespace nrl::plan

#include "apps/plan/recompute.h"

#include <algorithm>
#include <cmath>

namespace nrl::plan {
namespace {

using Rules = std::vector<model::RecomputeRule>;

bool checkpoints(const PolicyConfig& p) {
  return p.gradient_checkpointing.value_or(p.checkpoint_ratio || p.checkpoint_every || p.checkpoint_layers);
}

/// True if the configuration names some of the layers, which are recomputed whole.
bool names_layers(const PolicyConfig& p) {
  return checkpoints(p) ? p.checkpoint_layers || p.checkpoint_ratio.value_or(1) < 1
                        : p.recompute.granularity == RecomputeGranularity::full &&
                              p.recompute.method == RecomputeMethod::block;
}

std::vector<std::string> names_of(const std::vector<BlockModule>& modules) {
  std::vector<std::string> names;
  for (const BlockModule m : modules) names.emplace_back(name_of(m));
  return names;
}

/// Calls `work(block, index of the block in its chunk)`.
template <class F>
void for_each_in_chunks(const model::ModelLayout& layout, int64_t blocks, F&& work) {
  for (int c = 0; c < layout.model_chunks(); ++c) {
    const model::BlockRange range = chunk_blocks(layout, blocks, c);
    for (int b = range.begin; b < range.end; ++b) work(static_cast<size_t>(b), b - range.begin);
  }
}

/// Keeps only the input of every `length`-th block.
void add_segments(Rules& rules, const model::ModelLayout& layout, int64_t length) {
  for_each_in_chunks(layout, static_cast<int64_t>(rules.size()),
                     [&](size_t block, int at) { rules[block] = {.all = true, .input = at % length != 0}; });
}

/// Calls work(block) for `share` of the blocks, rounded up and evenly spread.
template <class F>
void for_each_in_share(double share, int64_t blocks, F&& work) {
  constexpr double rounding = 1e-9;  // 0.1 * 30 is 3
  const auto count = static_cast<int64_t>(std::ceil(share * static_cast<double>(blocks) - rounding));
  for (int64_t b = 0; b < blocks; ++b)
    if (b * count % blocks < count) work(static_cast<size_t>(b));
}

}  // namespace

bool recompute_is_configured(const PolicyConfig& p) {
  return p.recompute.granularity != RecomputeGranularity::automatic || !p.recompute.modules.is_auto() ||
         checkpoints(p);
}

bool recompute_is_open(const PolicyConfig& p) {
  if (!names_layers(p)) return !recompute_is_configured(p);
  return p.recompute.modules.is_auto() && (p.recompute.granularity == RecomputeGranularity::automatic ||
                                           p.recompute.granularity == RecomputeGranularity::full);
}

bool may_recompute_layers(const PolicyConfig& p) {
  return checkpoints(p) || p.recompute.granularity == RecomputeGranularity::full || auto_recomputes_layers(p);
}

bool auto_recomputes_layers(const PolicyConfig& p) {
  return recompute_is_open(p) && !names_layers(p) && p.gradient_checkpointing.value_or(true);
}

PolicyConfig with_open_recompute(PolicyConfig p) {
  p.recompute = {};
  p.gradient_checkpointing = {};
  p.checkpoint_ratio.reset();
  p.checkpoint_every.reset();
  p.checkpoint_layers.reset();
  return p;
}

Rules configured_recompute(const PolicyConfig& p, const model::ModelLayout& layout, int64_t blocks,
                           bool with_open) {
  Rules rules(static_cast<size_t>(blocks));
  const RecomputeConfig& r = p.recompute;
  const bool open = recompute_is_open(p);
  const bool full = r.granularity == RecomputeGranularity::full;
  if (p.checkpoint_layers && checkpoints(p)) {
    for (const int64_t block : *p.checkpoint_layers) rules.at(static_cast<size_t>(block)).all = true;
  } else if (p.checkpoint_ratio && checkpoints(p)) {
    for_each_in_share(*p.checkpoint_ratio, blocks, [&](size_t b) { rules[b].all = true; });
  } else if (p.checkpoint_every && checkpoints(p)) {
    add_segments(rules, layout, *p.checkpoint_every);
  } else if (full && r.method == RecomputeMethod::uniform) {
    add_segments(rules, layout, r.num_layers.value());
  } else if (full && r.method == RecomputeMethod::block) {
    for_each_in_chunks(layout, blocks,
                       [&](size_t block, int at) { rules[block].all = at < r.num_layers.value(); });
  } else if (full || checkpoints(p)) {
    for (model::RecomputeRule& rule : rules) rule.all = true;
  }
  if (open ? with_open : r.granularity != RecomputeGranularity::none) {
    std::vector<BlockModule> modules = r.modules.value_or({BlockModule::norm, BlockModule::activation});
    const auto moves = [&](BlockModule m) {
      return std::find(p.offload_modules.begin(), p.offload_modules.end(), m) != p.offload_modules.end();
    };
    if (open) std::erase_if(modules, moves);
    for (model::RecomputeRule& rule : rules)
      if (!rule.all) rule.modules = names_of(modules);
  }
  return rules;
}

std::vector<model::OffloadRule> configured_offload(const PolicyConfig& p, int64_t blocks) {
  std::vector<model::OffloadRule> rules(static_cast<size_t>(blocks));
  const model::OffloadRule rule{.modules = names_of(p.offload_modules), .all = p.offload_modules.empty()};
  if (p.offload_layers)
    for (const int64_t block : *p.offload_layers) rules.at(static_cast<size_t>(block)) = rule;
  else if (p.offload_activations.value > 0)
    for_each_in_share(p.offload_activations.value, blocks, [&](size_t b) { rules[b] = rule; });
  return rules;
}

}  // namespace nrl::plan

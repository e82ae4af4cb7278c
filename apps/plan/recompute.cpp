#include "apps/plan/recompute.h"

#include <algorithm>
#include <cmath>

namespace nrl::plan {
namespace {

using Rules = std::vector<model::RecomputeRule>;

bool checkpoints(const PolicyConfig& p) {
  return p.gradient_checkpointing.value_or(p.checkpoint_ratio || p.checkpoint_every || p.checkpoint_layers);
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

/// `share` of the blocks, rounded up and evenly spread.
void add_share(Rules& rules, double share) {
  constexpr double rounding = 1e-9;  // 0.1 * 30 is 3
  const auto n = static_cast<int64_t>(rules.size());
  const auto count = static_cast<int64_t>(std::ceil(share * static_cast<double>(n) - rounding));
  for (int64_t b = 0; b < n; ++b) rules[static_cast<size_t>(b)].all = b * count % n < count;
}

}  // namespace

bool recompute_is_open(const PolicyConfig& p) {
  return p.recompute.granularity == RecomputeGranularity::automatic && p.recompute.modules.is_auto() &&
         !checkpoints(p);
}

bool may_recompute_layers(const PolicyConfig& p) {
  return checkpoints(p) || p.recompute.granularity == RecomputeGranularity::full ||
         (recompute_is_open(p) && p.gradient_checkpointing.value_or(true));
}

Rules configured_recompute(const PolicyConfig& p, const model::ModelLayout& layout, int64_t blocks) {
  Rules rules(static_cast<size_t>(blocks));
  const RecomputeConfig& r = p.recompute;
  const bool full = r.granularity == RecomputeGranularity::full;
  if (p.checkpoint_layers && checkpoints(p)) {
    for (const int64_t block : *p.checkpoint_layers) rules.at(static_cast<size_t>(block)).all = true;
  } else if (p.checkpoint_ratio && checkpoints(p)) {
    add_share(rules, *p.checkpoint_ratio);
  } else if (p.checkpoint_every && checkpoints(p)) {
    add_segments(rules, layout, *p.checkpoint_every);
  } else if (full && r.method == RecomputeMethod::uniform) {
    add_segments(rules, layout, r.num_layers.value());
  } else if (full && r.method == RecomputeMethod::block) {
    for_each_in_chunks(layout, blocks,
                       [&](size_t block, int at) { rules[block].all = at < r.num_layers.value(); });
  } else if (full || checkpoints(p)) {
    for (model::RecomputeRule& rule : rules) rule.all = true;
  } else if (r.granularity != RecomputeGranularity::none) {
    std::vector<std::string> modules{"norm", "activation"};
    if (!r.modules.is_auto()) {
      modules.clear();
      for (const RecomputeModule m : r.modules.value()) modules.emplace_back(name_of(m));
    }
    for (model::RecomputeRule& rule : rules) rule.modules = modules;
  }
  return rules;
}

}  // namespace nrl::plan

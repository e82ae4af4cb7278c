#include "apps/plan/recompute_choice.h"

#include <algorithm>
#include <bit>
#include <map>
#include <utility>

#include "core/base/error.h"

namespace nrl::plan {
namespace {

using memory::SlotSet;

/// The bytes that a microbatch keeps of a block under a policy, and the time of its recomputation.
struct Effect {
  double bytes = 0, seconds = 0;
};

Effect effect_of(const model::Decoder& decoder, const memory::LayerTable& table,
                 const std::vector<double>& times, const model::RecomputeRule& rule, SlotSet offloaded) {
  const SlotSet recomputed = recomputed_slots(rule, table);
  const memory::LayerPolicy policy(table, recomputed);
  SlotSet made = 0, read = 0, forward = 0;
  uint64_t again = 0;
  for (const memory::Step& step : table.steps()) {
    if (step.pass == memory::Pass::forward) {
      if ((step.modes & memory::training) != 0) forward |= step.writes;
      continue;
    }
    again |= policy.steps_for(step.reads, made);
    made |= step.remakes & recomputed;
    read |= step.reads;
  }
  Effect out;
  const SlotSet kept = (read | table.reads_of(again)) & forward & ~recomputed & ~offloaded;
  memory::for_each_slot(
      kept, [&](size_t s) { out.bytes += static_cast<double>(decoder.bytes_of(table.slots()[s])); });
  for (; again != 0; again &= again - 1)
    out.seconds += times.at(static_cast<size_t>(std::countr_zero(again)));
  return out;
}

std::vector<RecomputeChoice> choices_of(const model::Decoder& decoder,
                                        const model::Decoder::BlockTable& block,
                                        const std::vector<double>& times, const model::RecomputeRule& base,
                                        SlotSet offloaded, bool whole) {
  std::vector<RecomputeChoice> out;
  model::RecomputeRule now = base;
  Effect before = effect_of(decoder, *block.table, times, now, offloaded);
  for (;;) {
    RecomputeChoice best;
    Effect after;
    const auto consider = [&](model::RecomputeRule rule) {
      const Effect e = effect_of(decoder, *block.table, times, rule, offloaded);
      const double bytes = before.bytes - e.bytes, seconds = e.seconds - before.seconds;
      if (bytes <= 0) return;
      constexpr double least = 1e-9;
      const double rate = bytes / std::max(seconds, least);
      if (rate <= best.bytes_per_second) return;
      best = {{block.block}, std::move(rule), bytes, seconds, rate};
      after = e;
    };
    if (!now.all) {
      for (const BlockModule m : {BlockModule::norm, BlockModule::activation, BlockModule::gather,
                                  BlockModule::core_attn, BlockModule::mlp, BlockModule::moe}) {
        const std::string_view module = name_of(m);
        if (std::find(now.modules.begin(), now.modules.end(), module) != now.modules.end()) continue;
        model::RecomputeRule more = now;
        more.modules.emplace_back(module);
        consider(std::move(more));
      }
      if (whole) consider({.all = true});
    }
    if (best.bytes <= 0) return out;
    if (!out.empty()) best.bytes_per_second = std::min(best.bytes_per_second, out.back().bytes_per_second);
    now = best.rule;
    before = after;
    out.push_back(std::move(best));
  }
}

/// The pool of the block's chunk, and its place in the chunk.
std::pair<int, int> place_of(const model::Decoder& decoder, size_t layers, int block) {
  const model::ModelLayout& layout = decoder.options().layout;
  for (int c = 0; c < layout.chunks; ++c) {
    const model::BlockRange blocks =
        chunk_blocks(layout, static_cast<int64_t>(layers), layout.model_chunk(c));
    if (block >= blocks.begin && block < blocks.end)
      return {decoder.options().training.stashes.pool(c), block - blocks.begin};
  }
  fail(Exit::internal, "block {} is of no chunk", block);
}

}  // namespace

std::vector<RecomputeChoice> recompute_choices(const model::Decoder& decoder, const StepTimes& times,
                                               const std::vector<model::RecomputeRule>& base,
                                               const std::vector<model::OffloadRule>& offload, bool whole) {
  using Choices = std::vector<RecomputeChoice>;
  const auto alike = [](const RecomputeChoice& a, const RecomputeChoice& b) { return a.rule == b.rule; };
  std::map<std::pair<int, int>, Choices> by_place;
  Choices all;
  for (const model::Decoder::BlockTable& block : decoder.blocks()) {
    Choices own = choices_of(decoder, block, times.at(block.table), base[block.block],
                             offloaded_slots(offload[block.block], *block.table), whole);
    const auto [at, first] = by_place.try_emplace(place_of(decoder, base.size(), block.block), own);
    Choices& same = at->second;
    if (first) continue;
    if (!std::equal(same.begin(), same.end(), own.begin(), own.end(), alike)) {
      all.insert(all.end(), own.begin(), own.end());
      continue;
    }
    for (size_t i = 0; i < own.size(); ++i) {
      same[i].blocks.push_back(block.block);
      same[i].bytes += own[i].bytes;
      same[i].seconds += own[i].seconds;
    }
  }
  for (const auto& [place, choices] : by_place) all.insert(all.end(), choices.begin(), choices.end());
  std::stable_sort(all.begin(), all.end(), [](const RecomputeChoice& a, const RecomputeChoice& b) {
    return a.bytes_per_second > b.bytes_per_second;
  });
  return all;
}

double bytes_in_flight(const pipeline::Stashes& stashes, const model::ModelLayout& layout, int64_t layers,
                       std::span<const model::Decoder::BlockBytes> kept,
                       std::span<const RecomputeChoice> choices, size_t of_last) {
  std::map<int, double> blocks;
  for (const model::Decoder::BlockBytes& b : kept) blocks[b.block] = static_cast<double>(b.kept);
  for (const RecomputeChoice& choice : choices)
    for (size_t i = 0; i < choice.blocks.size(); ++i)
      if (&choice != &choices.back() || i < of_last)
        blocks[choice.blocks[i]] -= choice.bytes / static_cast<double>(choice.blocks.size());
  std::vector<double> pools(stashes.counts().size());
  for (int c = 0; c < layout.chunks; ++c) {
    double sum = 0;
    const model::BlockRange range = chunk_blocks(layout, layers, layout.model_chunk(c));
    for (int b = range.begin; b < range.end; ++b) sum += blocks[b];
    double& most = pools[static_cast<size_t>(stashes.pool(c))];
    most = std::max(most, sum);
  }
  double out = 0;
  for (size_t p = 0; p < pools.size(); ++p) out += pools[p] * stashes.counts()[p];
  return out;
}

double forward_seconds(const StepTimes& times) {
  double sum = 0;
  for (const auto& [table, seconds] : times)
    for (const double s : seconds) sum += s;
  return sum;
}

}  // namespace nrl::plan

// Rules about activations that are recomputed or moved to the host. Two keys that say it in different ways
// are a contradiction, and activations that are recomputed instead of kept cannot be moved.
#include "core/config/rules/tables.h"

namespace nrl::config_detail {
namespace {

constexpr const char *checkpointing = "policy.gradient_checkpointing",
                     *granularity = "policy.recompute.granularity", *recomputed = "policy.recompute.modules",
                     *method = "policy.recompute.method", *count = "policy.recompute.num_layers",
                     *checkpointed_layers = "policy.checkpoint_layers",
                     *offloaded_share = "policy.offload_activations",
                     *offloaded_layers = "policy.offload_layers", *offloaded = "policy.offload_modules";

/// The keys that are set and say which layers are recomputed.
std::vector<std::string> ways_of(const Config& c) {
  return set_keys(c, {"policy.checkpoint_ratio", "policy.checkpoint_every", checkpointed_layers});
}

Verdict judge_ways(const ConfigResult& r) {
  const auto ways = ways_of(r.config);
  if (ways.size() < 2 || !r.sound(ways[0])) return {};
  return {{.reason = fmt::format("{} and {} both say which layers are recomputed", ways[0], ways[1]),
           .remedy = {fmt::format("{} is at {}", ways[0], r.where(ways[0])), "remove one of them"},
           .key = ways[1]}};
}

Verdict judge_section(const ConfigResult& r) {
  const PolicyConfig& p = r.config.policy;
  const auto ways = ways_of(r.config);
  if (!p.gradient_checkpointing.value_or(!ways.empty())) return {};
  const std::string key = ways.empty() ? checkpointing : ways[0];
  // These keys name layers, and policy.recompute may say what is recomputed of the others.
  const bool of_others = (p.checkpoint_ratio.value_or(1) < 1 || p.checkpoint_layers) &&
                         p.recompute.granularity != RecomputeGranularity::full;
  for (const std::string& other : set_keys(r.config, {granularity, recomputed, method, count}))
    if (r.sound({other, key}) && !(of_others && (other == granularity || other == recomputed)))
      return {{.reason = fmt::format("{} and {} say in two ways what is recomputed", key, other),
               .remedy = {fmt::format("{} is at {}", other, r.where(other)),
                          "gradient_checkpointing is recompute.granularity: full; remove one of them"},
               .key = key}};
  return {};
}

Verdict judge_method(const ConfigResult& r) {
  const RecomputeConfig& section = r.config.policy.recompute;
  if (section.method.has_value() == section.num_layers.has_value()) return {};
  const auto [key, missing] = section.method ? std::pair(method, count) : std::pair(count, method);
  return {{.reason = fmt::format("{} needs {}", key, missing),
           .remedy = {"without both, every layer is recomputed one by one"},
           .key = key}};
}

/// The configured module of recomputation whose activations contain the ones of `m`; unset: none.
std::optional<BlockModule> recomputed_with(const PolicyConfig& p, BlockModule m) {
  for (const BlockModule r : p.recompute.modules.value_or({}))
    if (r == m || (r == BlockModule::mlp && m == BlockModule::activation)) return r;
  return std::nullopt;
}

/// True if all layers that are offloaded are recomputed from their input.
bool whole_layers(const PolicyConfig& p) {
  const RecomputeConfig& r = p.recompute;
  const bool some = p.checkpoint_ratio.value_or(1) < 1 || p.checkpoint_layers || r.num_layers;
  const bool whole = r.granularity == RecomputeGranularity::full ||
                     p.gradient_checkpointing.value_or(p.checkpoint_ratio || p.checkpoint_every);
  if (whole && !some) return true;
  return p.offload_layers && p.checkpoint_layers &&
         std::ranges::all_of(*p.offload_layers, [&](int64_t layer) {
           return std::ranges::find(*p.checkpoint_layers, layer) != p.checkpoint_layers->end();
         });
}

Verdict judge_module(const ConfigResult& r, BlockModule m) {
  const PolicyConfig& p = r.config.policy;
  const std::string_view name = name_of(m);
  const auto again = [&](std::string_view where, std::vector<std::string> remedy) -> Broken {
    return {
        fmt::format("{}: {} is recomputed{}, so that there is nothing to offload", offloaded, name, where),
        std::move(remedy)};
  };
  if (const auto with = recomputed_with(p, m); with && r.sound(recomputed))
    return {again("", {fmt::format("{} has {} at {}", recomputed, name_of(*with), r.where(recomputed)),
                       "remove it from one of the lists"})};
  Verdict out;
  if (p.recompute.granularity == RecomputeGranularity::selective && p.recompute.modules.is_auto() &&
      (m == BlockModule::norm || m == BlockModule::activation) && r.sound({granularity, recomputed}))
    out.push_back(
        again("", {fmt::format("recompute.granularity: selective at {} recomputes norm and activation",
                               r.where(granularity)),
                   fmt::format("name others in {}, or set granularity to none", recomputed)}));
  if (m != BlockModule::input && whole_layers(p) &&
      r.sound({granularity, "policy.gradient_checkpointing", "policy.checkpoint_ratio",
               "policy.checkpoint_every", "policy.checkpoint_layers", offloaded_layers}))
    out.push_back(again(
        fmt::format(" in all layers{}", p.offload_layers ? fmt::format(" of {}", offloaded_layers) : ""),
        {"whole layers are recomputed from their input: only that can be offloaded (input)"}));
  if (m == BlockModule::gather && !r.config.distributed.splits_sequence() &&
      r.sound({"distributed.sequence_parallel", "distributed.tensor_parallel_size"}))
    out.push_back({no_gather(offloaded)});
  return out;
}

Verdict judge_modules(const ConfigResult& r) {
  const auto& named = r.config.policy.offload_modules;
  Verdict out = twice(offloaded, named);
  if (!out.empty()) return out;
  for (const BlockModule m : named)
    for (Broken& broken : judge_module(r, m)) out.push_back(std::move(broken));
  return out;
}

const ConfigRule memory_table[] = {
    {{}, judge_ways},
    {{checkpointed_layers},
     [](const ConfigResult& r) {
       return twice(checkpointed_layers, r.config.policy.checkpoint_layers, "layer ");
     }},
    not_empty({checkpointed_layers}),
    row({is(checkpointing, {"false"}), is(granularity, {"full"})},
        {"policy.gradient_checkpointing is false, but policy.recompute.granularity is full, which recomputes "
         "whole layers",
         {"policy.recompute.granularity is at <@policy.recompute.granularity>", "remove one of them"}}),
    {{}, judge_section},
    {{recomputed},
     [](const ConfigResult& r) { return twice(recomputed, r.config.policy.recompute.modules.value_or({})); }},
    {{method, count, granularity}, judge_method},
    row({recomputed, key::tensor, key::sequence},
        [](const Config& c) {
          return !c.distributed.splits_sequence() && is(recomputed, {"gather"}).holds(c);
        },
        {no_gather(recomputed),
         {"remove it, or set distributed.tensor_parallel_size above 1 and sequence_parallel: true"}}),
    row({is_not(offloaded_layers, "null"), is_not(offloaded_share, "true")},
        {"policy.offload_activations and policy.offload_layers both say which layers are offloaded",
         {"policy.offload_activations is at <@policy.offload_activations>",
          "with a list, the other must be true"}}),
    {{offloaded_layers, offloaded_share},
     [](const ConfigResult& r) { return twice(offloaded_layers, r.config.policy.offload_layers, "layer "); }},
    not_empty({offloaded_layers, offloaded_share}),
    {{offloaded, offloaded_share}, judge_modules},
    row({is("checkpointing.is_async", {"true"}), is_not("policy.offload_optimizer", "false")},
        {"checkpointing.is_async: true needs the optimizer state in the memory of the device: a copy of what "
         "is "
         "offloaded would use the bandwidth of its update",
         {"policy.offload_optimizer is at <@policy.offload_optimizer>",
          "set is_async: auto, which saves at once"}}),
};

}  // namespace

std::span<const ConfigRule> memory_rules() {
  return memory_table;
}

}  // namespace nrl::config_detail

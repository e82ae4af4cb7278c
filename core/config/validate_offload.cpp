// The keys that say which activations are moved to the host. What is recomputed instead of kept cannot be
// moved.
#include <algorithm>
#include <utility>

#include <spdlog/fmt/fmt.h>
#include <spdlog/fmt/ranges.h>

#include "core/config/validate.h"

namespace nrl::config_detail {
namespace {

constexpr const char* share_key = "policy.offload_activations";
constexpr const char* layers_key = "policy.offload_layers";
constexpr const char* modules_key = "policy.offload_modules";
constexpr const char* recomputed_key = "policy.recompute.modules";

void check_layers(Checker& c, const PolicyConfig& p) {
  if (!p.offload_layers || !c.sound({share_key})) return;
  if (p.offload_activations.value < 1)
    c.error(
        layers_key, fmt::format("{} and {} both say which layers are offloaded", share_key, layers_key), "",
        {fmt::format("{} is at {}", share_key, c.where(share_key)), "with a list, the other must be true"});
  c.unique(layers_key, *p.offload_layers, "layer ");
  if (p.offload_layers->empty()) c.error(layers_key, fmt::format("{} is an empty list", layers_key));
}

/// The configured module of recomputation whose activations contain those of `m`; null: none.
const BlockModule* recomputed_with(const PolicyConfig& p, BlockModule m) {
  const auto& modules = p.recompute.modules;
  if (modules.is_auto()) return nullptr;
  const auto same = [&](BlockModule r) {
    return r == m || (r == BlockModule::mlp && m == BlockModule::activation);
  };
  const auto found = std::find_if(modules.value().begin(), modules.value().end(), same);
  return found == modules.value().end() ? nullptr : &*found;
}

/// Whether every layer of offload_layers is recomputed.
bool only_recomputed_layers(const PolicyConfig& p) {
  if (!p.offload_layers || !p.checkpoint_layers) return false;
  const auto& again = *p.checkpoint_layers;
  return std::all_of(p.offload_layers->begin(), p.offload_layers->end(), [&](int64_t layer) {
    return std::find(again.begin(), again.end(), layer) != again.end();
  });
}

void check_module(Checker& c, const Config& config, BlockModule m) {
  const PolicyConfig& p = config.policy;
  const std::string_view name = name_of(m);
  if (const BlockModule* again = recomputed_with(p, m); again && c.sound({recomputed_key})) {
    c.error(modules_key,
            fmt::format("{}: {} is recomputed, so that there is nothing to offload", modules_key, name), "",
            {fmt::format("{} has {} at {}", recomputed_key, name_of(*again), c.where(recomputed_key)),
             "remove it from one of the lists"});
    return;
  }
  constexpr const char* granularity_key = "policy.recompute.granularity";
  const RecomputeConfig& r = p.recompute;
  const bool automatic = r.granularity == RecomputeGranularity::selective && r.modules.is_auto();
  if (automatic && (m == BlockModule::norm || m == BlockModule::activation) &&
      c.sound({granularity_key, recomputed_key}))
    c.error(modules_key,
            fmt::format("{}: {} is recomputed, so that there is nothing to offload", modules_key, name), "",
            {fmt::format("recompute.granularity: selective at {} recomputes norm and activation",
                         c.where(granularity_key)),
             fmt::format("name others in {}, or set granularity to none", recomputed_key)});
  const bool layers = p.checkpoint_ratio.value_or(1) < 1 || p.checkpoint_layers || r.num_layers;
  const bool whole = r.granularity == RecomputeGranularity::full ||
                     p.gradient_checkpointing.value_or(p.checkpoint_ratio || p.checkpoint_every);
  if (((whole && !layers) || only_recomputed_layers(p)) && m != BlockModule::input &&
      c.sound({granularity_key, "policy.gradient_checkpointing", "policy.checkpoint_ratio",
               "policy.checkpoint_every", "policy.checkpoint_layers", "policy.offload_layers"}))
    c.error(modules_key,
            fmt::format("{}: {} is recomputed in all layers{}, so that there is nothing to offload",
                        modules_key, name, p.offload_layers ? fmt::format(" of {}", layers_key) : ""),
            "", {"whole layers are recomputed from their input: only that can be offloaded (input)"});
  if (m == BlockModule::gather && !config.distributed.splits_sequence() &&
      c.sound({"distributed.sequence_parallel", "distributed.tensor_parallel_size"}))
    c.error(modules_key,
            fmt::format("{}: gather matches nothing: inputs are gathered with sequence parallelism only",
                        modules_key));
}

}  // namespace

void check_offload(Checker c) {
  const Config& config = c.result.config;
  const PolicyConfig& p = config.policy;
  check_layers(c, p);
  if (!c.sound({share_key}) || !c.unique(modules_key, p.offload_modules)) return;
  for (const BlockModule m : p.offload_modules) check_module(c, config, m);
}

void check_pin_memory(Checker& c, bool gpu, const std::string& why) {
  const Config& config = c.result.config;
  std::vector<std::string> useless;
  for (const auto& [key, pinned] : {std::pair("policy.pin_memory", config.policy.pin_memory),
                                    std::pair("data.pin_memory", config.data.pin_memory)}) {
    if (pinned.is_auto()) continue;
    if (gpu && !pinned.value())
      c.error(key,
              fmt::format("{}: false is not supported on a GPU: copies run beside computation only from "
                          "page-locked memory",
                          key),
              "", {why, "Fix: remove it, or set it to true"});
    if (!gpu && pinned.value() && c.result.sound(key)) useless.emplace_back(key);
  }
  if (!useless.empty())
    c.warning(useless.front(),
              fmt::format("{}: true {} no effect on a CPU, which copies nothing to a device",
                          fmt::join(useless, " and "), useless.size() == 1 ? "has" : "have"),
              {why});
}

}  // namespace nrl::config_detail

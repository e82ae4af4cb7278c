// The keys that say which activations are recomputed. Two that say it in different ways are a contradiction.
#include <spdlog/fmt/fmt.h>

#include "core/config/validate.h"

namespace nrl::config_detail {
namespace {

constexpr const char* checkpointing_key = "policy.gradient_checkpointing";
constexpr const char* granularity_key = "policy.recompute.granularity";
constexpr const char* recompute_modules_key = "policy.recompute.modules";
constexpr const char* method_key = "policy.recompute.method";
constexpr const char* num_layers_key = "policy.recompute.num_layers";

/// The keys of policy.recompute that are set.
std::vector<std::string_view> set_in_section(const RecomputeConfig& r) {
  std::vector<std::string_view> out;
  if (r.granularity != RecomputeGranularity::automatic) out.emplace_back(granularity_key);
  if (!r.modules.is_auto()) out.emplace_back(recompute_modules_key);
  if (r.method) out.emplace_back(method_key);
  if (r.num_layers) out.emplace_back(num_layers_key);
  return out;
}

void check_checkpointing(Checker& c, const PolicyConfig& p) {
  std::vector<const char*> which;
  if (p.checkpoint_ratio) which.push_back("policy.checkpoint_ratio");
  if (p.checkpoint_every) which.push_back("policy.checkpoint_every");
  if (p.checkpoint_layers) which.push_back("policy.checkpoint_layers");
  if (which.size() > 1 && c.sound({which[0]}))
    c.error(which[1], fmt::format("{} and {} both say which layers are recomputed", which[0], which[1]), "",
            {fmt::format("{} is at {}", which[0], c.where(which[0])), "remove one of them"});
  if (p.checkpoint_layers) {
    c.unique("policy.checkpoint_layers", *p.checkpoint_layers, "layer ");
    if (p.checkpoint_layers->empty())
      c.error("policy.checkpoint_layers", "policy.checkpoint_layers is an empty list");
  }
  if (!p.gradient_checkpointing.value_or(true) && p.recompute.granularity == RecomputeGranularity::full &&
      c.sound({checkpointing_key, granularity_key}))
    c.error(checkpointing_key,
            fmt::format("{} is false, but {} is full, which recomputes whole layers", checkpointing_key,
                        granularity_key),
            "",
            {fmt::format("{} is at {}", granularity_key, c.where(granularity_key)), "remove one of them"});
  const bool checkpoints = p.gradient_checkpointing.value_or(!which.empty());
  if (!checkpoints) return;
  const char* const key = which.empty() ? checkpointing_key : which[0];
  // These keys name layers, and policy.recompute may say what is recomputed of the others.
  const bool of_others = (p.checkpoint_ratio.value_or(1) < 1 || p.checkpoint_layers) &&
                         p.recompute.granularity != RecomputeGranularity::full;
  for (const std::string_view other : set_in_section(p.recompute)) {
    if (!c.sound({other, key}) || (of_others && (other == granularity_key || other == recompute_modules_key)))
      continue;
    c.error(key, fmt::format("{} and {} say in two ways what is recomputed", key, other), "",
            {fmt::format("{} is at {}", other, c.where(other)),
             "gradient_checkpointing is recompute.granularity: full; remove one of them"});
    return;
  }
}

}  // namespace

void check_recompute(Checker c) {
  const PolicyConfig& p = c.result.config.policy;
  const RecomputeConfig& r = p.recompute;
  check_checkpointing(c, p);
  if (!r.modules.is_auto()) c.unique(recompute_modules_key, r.modules.value());
  if (r.method.has_value() != r.num_layers.has_value() &&
      c.sound({method_key, num_layers_key, granularity_key})) {
    const char* const key = r.method ? method_key : num_layers_key;
    c.error(key, fmt::format("{} needs {}", key, r.method ? num_layers_key : method_key), "",
            {"without both, every layer is recomputed one by one"});
  }
}

}  // namespace nrl::config_detail

#pragma once
// What the backward pass recomputes, and what is moved to the host: the configured rules of every block.

#include <array>
#include <string_view>
#include <vector>

#include "apps/model/layout.h"
#include "apps/model/recompute_rule.h"
#include "core/config/config.h"

namespace nrl::plan {

/// The keys and sections that say what is recomputed, and what is moved.
inline constexpr std::array<std::string_view, 5> recompute_keys{
    "policy.recompute", "policy.gradient_checkpointing", "policy.checkpoint_ratio", "policy.checkpoint_every",
    "policy.checkpoint_layers"};
inline constexpr std::array<std::string_view, 4> offload_keys{
    "policy.offload_optimizer", "policy.offload_activations", "policy.offload_layers",
    "policy.offload_modules"};

/// Whether the configuration leaves open what is recomputed.
bool recompute_is_open(const PolicyConfig& policy);
/// Whether whole layers may be recomputed.
bool may_recompute_layers(const PolicyConfig& policy);

/// The rules of all blocks of the model. `layout`: for keys that count within the chunks of a pipeline.
/// Where the configuration leaves it open, of norm and activation.
std::vector<model::RecomputeRule> configured_recompute(const PolicyConfig& policy,
                                                       const model::ModelLayout& layout, int64_t blocks);

/// What is moved of the slots that are kept, by block of the model.
std::vector<model::OffloadRule> configured_offload(const PolicyConfig& policy, int64_t blocks);

}  // namespace nrl::plan

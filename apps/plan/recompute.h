#pragma once
// The configured rules of every block: which slots are recomputed, and which are moved to the host.

#include <array>
#include <string_view>
#include <vector>

#include "apps/model/spec/layout.h"
#include "apps/model/spec/recompute_rule.h"
#include "core/config/config.h"

namespace nrl::plan {

/// The keys and sections that say what is recomputed, and what is moved.
inline constexpr std::array<std::string_view, 5> recompute_keys{
    "policy.recompute", "policy.gradient_checkpointing", "policy.checkpoint_ratio", "policy.checkpoint_every",
    "policy.checkpoint_layers"};
inline constexpr std::array<std::string_view, 4> offload_keys{
    "policy.offload_optimizer", "policy.offload_activations", "policy.offload_layers",
    "policy.offload_modules"};

/// True if a key says what is recomputed, of all layers or of some.
bool recompute_is_configured(const PolicyConfig& policy);
/// True if no key says what is recomputed of a layer, or of the layers that checkpoint_layers,
/// checkpoint_ratio and method: block leave out.
bool recompute_is_open(const PolicyConfig& policy);
/// Whether whole layers may be recomputed.
bool may_recompute_layers(const PolicyConfig& policy);
/// True if auto may recompute whole layers that the configuration does not name.
bool auto_recomputes_layers(const PolicyConfig& policy);

/// The rules of all blocks of the model. `layout`: for keys that count within the chunks of a pipeline.
/// Where the configuration leaves it open, norm and activation are recomputed, or nothing if not `with_open`.
std::vector<model::RecomputeRule> configured_recompute(const PolicyConfig& policy,
                                                       const model::ModelLayout& layout, int64_t blocks,
                                                       bool with_open = true);
/// The policy without the keys that say what is recomputed.
PolicyConfig with_open_recompute(PolicyConfig policy);

/// Which of the kept slots are moved to the host, by block of the model.
std::vector<model::OffloadRule> configured_offload(const PolicyConfig& policy, int64_t blocks);

}  // namespace nrl::plan

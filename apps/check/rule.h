#pragma once
// The tables of rules about a run, by topic. Internal to apps/check.

#include <span>

#include "apps/check/facts.h"
#include "core/config/rule.h"

namespace nrl::check {

using Rule = nrl::Rule<Facts>;

/// Sizes that tensor-parallel ranks and the data must suit.
std::span<const Rule> size_rules();
/// Exchanges of context-parallel ranks.
std::span<const Rule> context_rules();
/// Experts, the ranks that divide them, and keys of theirs without effect.
std::span<const Rule> expert_rules();
/// Models that train on examples of different lengths.
std::span<const Rule> example_rules();
/// The head that the algorithm needs.
std::span<const Rule> head_rules();
/// Layers and modules that recomputation and offloading name.
std::span<const Rule> layer_rules();
/// FP8 operands: what the device runs, sizes of a rank's matrices, and of a microbatch.
Diagnostics check_fp8(const Facts& facts);

}  // namespace nrl::check

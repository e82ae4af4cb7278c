#pragma once
// Which slots of a block are recomputed, and which of the others are offloaded, as the configuration says:
// turns its rules into slots of the block's table.

#include <span>
#include <string>
#include <vector>

#include "memory/layer_table.h"

namespace nrl::model {

struct RecomputeRule {
  /// The slots with one of these recompute rules (memory::SlotSpec::rules).
  std::vector<std::string> modules = {};
  /// Recomputes every slot of the block except its input.
  bool all = false;
  /// With `all`: recomputes the input as well, from the block below. Not for the first block of a chunk.
  bool input = false;
  bool operator==(const RecomputeRule&) const = default;

  bool keeps_all() const { return modules.empty() && !all; }
};

/// All rules, for slots that every recomputed step makes again which reads them.
std::string_view every_rule();

/// The slots of a block that the rule recomputes; modules that the block lacks contribute no slots.
memory::SlotSet recomputed_slots(const RecomputeRule& rule, const memory::LayerTable& table);

/// Which of the kept slots of a block are moved to the host between the passes.
struct OffloadRule {
  /// The slots with one of these rules.
  std::vector<std::string> modules = {};
  bool all = false;
  bool operator==(const OffloadRule&) const = default;

  bool keeps_all() const { return modules.empty() && !all; }
};

/// The slots of a block that the rule selects; those that are recomputed are not moved.
memory::SlotSet offloaded_slots(const OffloadRule& rule, const memory::LayerTable& table);

/// "everything", "input, mlp in layers 0-3"; as recompute_text().
std::string offload_text(std::span<const OffloadRule> rules, std::span<const int> blocks);

/// "norm, activation", where blocks differ "norm in layers 0-3; everything in layers 4-7", where inputs are
/// recomputed "everything in layers 0-3 | 4-7, each from its first input". `rules`: by block of the model;
/// `blocks`: those that are described, ascending. Empty if nothing is recomputed.
std::string recompute_text(std::span<const RecomputeRule> rules, std::span<const int> blocks);

}  // namespace nrl::model

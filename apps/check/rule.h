#pragma once
// A rule about a run: the keys that it judges, and what it says of the facts. Rules stand in tables, by
// topic. Internal to apps/check.

#include <functional>
#include <iterator>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "apps/check/facts.h"

namespace nrl::check {

/// One way in which a rule is broken.
struct Broken {
  std::string reason;
  std::vector<std::string> remedy = {};  ///< notes of the diagnostic
  std::string label = {};                ///< beside the value in the excerpt
  std::string key = {};                  ///< reported in place of the rule's first key
  std::string place = {};                ///< in place of a key: "environment: NAME=value"
  Severity severity = Severity::error;
  Exit exit = Exit::config;
  /// The key has no effect because of the rule's other keys: without_effect(). Skipped if it was not given.
  bool idle = false;
};

/// All ways in which a rule is broken; empty: none.
using Verdict = std::vector<Broken>;

struct Rule {
  /// The first key is reported. The rule is skipped if one of them has no valid value.
  std::vector<std::string> keys;
  std::function<Verdict(const Facts&)> judge;
};

/// The problems of all rules that are broken, in their order.
Diagnostics judge(std::span<const Rule> rules, const Facts& facts);

inline Diagnostics& operator+=(Diagnostics& all, Diagnostics more) {
  all.insert(all.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
  return all;
}

/// Sizes that tensor-parallel ranks and the data must suit.
std::span<const Rule> size_rules();
/// Exchanges of context-parallel ranks.
std::span<const Rule> context_rules();
/// Experts, the ranks that divide them, and keys of theirs without effect.
std::span<const Rule> expert_rules();
/// Layers and modules that recomputation and offloading name.
std::span<const Rule> layer_rules();
/// FP8 operands: what the device runs, sizes of a rank's matrices, and of a microbatch.
Diagnostics check_fp8(const Facts& facts);

}  // namespace nrl::check

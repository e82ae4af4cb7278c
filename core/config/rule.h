#pragma once
// A rule: the keys that it judges, and what it says of the facts. Rules stand in tables, by topic: those that
// need the configuration, the number of ranks or the device in core/config/rules, all others in apps/check.

#include <functional>
#include <initializer_list>
#include <iterator>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/config/result.h"

namespace nrl {

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

template <class Facts>
struct Rule {
  /// The first key is reported. The rule is skipped if one of them has no valid value. "loop.": a key of the
  /// configured algorithm's loop.
  std::vector<std::string> keys;
  std::function<Verdict(const Facts&)> judge;
};

namespace config_detail {
bool judgeable(const ConfigResult& result, const std::vector<std::string>& keys);
void report(Diagnostics& out, const ConfigResult& result, const std::vector<std::string>& keys,
            Verdict verdict);
}  // namespace config_detail

/// The problems of all rules that are broken, in their order. Facts have the configuration as `result`, or
/// are one.
template <class Facts>
Diagnostics judge(std::type_identity_t<std::span<const Rule<Facts>>> rules, const Facts& facts) {
  const ConfigResult* result = nullptr;
  if constexpr (std::is_same_v<Facts, ConfigResult>)
    result = &facts;
  else
    result = &facts.result;
  Diagnostics out;
  for (const Rule<Facts>& rule : rules)
    if (config_detail::judgeable(*result, rule.keys))
      config_detail::report(out, *result, rule.keys, rule.judge(facts));
  return out;
}

/// The same level by level; stops at the first with problems.
template <class Facts>
Diagnostics judge_levels(std::initializer_list<std::type_identity_t<std::span<const Rule<Facts>>>> levels,
                         const Facts& facts) {
  Diagnostics out;
  for (const auto& level : levels)
    if (out.empty()) out = judge(level, facts);
  return out;
}

/// A text in which <KEY> is replaced by the key's value, <@KEY> by the place where it was given, <:KEY> by
/// "KEY: VALUE" and <=KEY> by "KEY is VALUE (PLACE)".
std::string filled_in(const ConfigResult& result, std::string_view text);

inline Diagnostics& operator+=(Diagnostics& all, Diagnostics more) {
  all.insert(all.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
  return all;
}

}  // namespace nrl

#pragma once
// The tables of rules, by the facts that they need, and the rows that several tables have. Internal to
// core/config.

#include <algorithm>

#include <spdlog/fmt/fmt.h>
#include <spdlog/fmt/ranges.h>

#include "core/config/load.h"
#include "core/config/rule.h"
#include "core/config/schema.h"

namespace nrl::config_detail {

/// Keys of several tables.
namespace key {
inline constexpr const char *tensor = "distributed.tensor_parallel_size",
                            *stages = "distributed.pipeline_parallel_size",
                            *sequence = "distributed.sequence_parallel",
                            *context = "distributed.context_parallel_size",
                            *sharding = "distributed.shard_strategy", *graph = "policy.cuda_graph",
                            *length = "policy.max_total_sequence_length", *samples = "logger.sample_period";
}

using ConfigRule = Rule<ConfigResult>;

std::span<const ConfigRule> training_rules();
std::span<const ConfigRule> objective_rules();
std::span<const ConfigRule> parallel_rules();
std::span<const ConfigRule> memory_rules();
std::span<const ConfigRule> precision_rules();

/// A configuration on a device that is known. `facts.why` is a note.
struct OnDevice {
  const ConfigResult& result;
  DeviceFacts facts;
};
/// Keys that need the kind of device that the run does not have.
Diagnostics validate_device(const OnDevice& on);
/// Keys that need communication which is not host-staged; `on.facts.gpu` must be set.
Diagnostics validate_staged(const OnDevice& on);

/// A row whose texts are filled_in(): it is broken where all conditions hold, whose keys are the rule's.
ConfigRule row(std::vector<Condition> all, Broken texts);
ConfigRule row(std::vector<std::string> keys, std::function<bool(const Config&)> broken, Broken texts);

/// A text or a list, the first key, that must not be empty.
ConfigRule not_empty(std::vector<std::string> keys, std::string reason = "",
                     std::vector<std::string> remedy = {});

/// The keys among `keys` that have another value than their default.
std::vector<std::string> set_keys(const Config& config, std::vector<std::string> keys);

/// A module of layers, named by `key`, that only sequence parallelism has.
inline std::string no_gather(std::string_view key) {
  return fmt::format("{}: gather matches nothing: inputs are gathered with sequence parallelism only", key);
}

/// The first value that a list has several times; "layer ": what a value is.
template <class T>
Verdict twice(const std::string& key, std::vector<T> values, std::string_view what = "") {
  std::sort(values.begin(), values.end());
  const auto found = std::adjacent_find(values.begin(), values.end());
  if (found == values.end()) return {};
  if constexpr (std::is_enum_v<T>)
    return {{fmt::format("{} has {}{} twice", key, what, name_of(*found))}};
  else
    return {{fmt::format("{} has {}{} twice", key, what, *found)}};
}
template <class T>
Verdict twice(const std::string& key, const std::optional<std::vector<T>>& values, std::string_view what) {
  return values ? twice(key, *values, what) : Verdict{};
}

/// The batch keys against the number of model replicas. Unset: it is unknown; then only what must divide for
/// any number.
Verdict judge_batch(const Config& config, std::optional<int64_t> replicas);

}  // namespace nrl::config_detail

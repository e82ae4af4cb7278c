#pragma once
// Loads a configuration: files and overrides to the typed Config, with a position for every problem.
//
// On several ranks, rank 0 loads and broadcasts dump_resolved(); the other ranks call load_config_text() on
// it. The dump round-trips to an equal Config, so all ranks agree and only one reads the files.

#include <span>
#include <string>
#include <string_view>

#include "core/base/cluster_node.h"
#include "core/config/result.h"

namespace nrl {

/// Reads `path`, the files it inherits from, and the overrides "a.b=v". Overrides win over files, and the
/// later of two that have the same name; two names of a key with different values are an error, as in a file.
/// Never throws for bad input: all problems are in `diagnostics`. A missing file is a diagnostic with
/// Exit::no_input.
ConfigResult load_config(const std::string& path, std::span<const std::string> overrides = {});

/// The same from memory; `name` is the file name in messages, and `defaults:` is relative to its directory.
ConfigResult load_config_text(std::string_view text, const std::string& name,
                              std::span<const std::string> overrides = {});

/// The canonical YAML of all keys, each with a comment that gives the origin of its value.
std::string dump_resolved(const ConfigResult& result);

/// The canonical YAML of one key's value, for example "0.0003" for policy.optimizer.lr. `key` must be a key
/// of Config (not of policy.model); the default of one that is not built yet.
std::string value_text(const Config& config, std::string_view key);

/// The supported values of a key that is a choice or a flag; empty for other and unknown keys.
std::vector<std::string> allowed_values(std::string_view key);

/// "key=default" of the keys named and of the keys of sections named.
std::vector<std::string> default_overrides(std::span<const std::string_view> names);

/// The problem of a key that has no effect because of the values of other keys. A warning where one of these
/// is written out beside it, as in files for NeMo RL and Megatron-LM, which hold the settings of features
/// that are off; else an error, also for a key of the command line, unless the other key is there too.
Diagnostic without_effect(const ConfigResult& result, std::string_view key, std::string message,
                          std::span<const std::string> others, std::vector<std::string> notes = {});

/// Meaning, type, default, allowed values, aliases and status of a key or of the keys of a section. Any other
/// text is searched for in keys, aliases and meanings: a single match is explained, several are listed. Sets
/// `*known` to false when there is none (the text then suggests the nearest).
std::string explain(std::string_view key, bool* known = nullptr);

/// The reference page docs/configuration.md.
std::string config_markdown();

/// The batch arithmetic of a run.
struct BatchPlan {
  int64_t data_parallel = 1;
  int64_t micro = 1;   ///< sequences per forward pass and rank
  int64_t global = 1;  ///< sequences per optimizer step
  /// Forward passes per step and rank: global = micro x accumulation x data_parallel.
  int64_t accumulation = 1;
  int64_t tokens_per_step = 0;
  /// Sequences that a microbatch must be a multiple of: what FP8 scales and ranks that split the sequence
  /// need.
  int64_t unit = 1;
};

/// The warning for a learning-rate schedule that is longer than a run of `steps`; empty when it fits.
std::string schedule_beyond_run(const Config& config, int64_t steps);

/// Warm-up steps of a schedule that ends at `decay_steps`.
int64_t warmup_steps(const SchedulerConfig& scheduler, int64_t decay_steps);

/// The step at which the decay ends in a run of `steps`: lr_decay_iters, else the last step, but not before
/// the warm-up and the final decay of WSD are over. The configuration must have been validated.
int64_t decay_end(const SchedulerConfig& scheduler, int64_t steps);

/// Origin of the number of ranks, for the advice in messages: running processes, or a plan (--world).
enum class RankCount { started, planned };

/// Checks the grid and the batch against the number of ranks, and the section `cluster` against these and the
/// nodes in the launcher's order (empty: unknown), for keys that are sound. Empty when all fit.
Diagnostics validate_for_world(const ConfigResult& result, int world_size,
                               std::span<const ClusterNode> nodes = {}, RankCount count = RankCount::started);

/// Facts about the devices of the run, agreed on by all ranks.
struct DeviceFacts {
  bool gpu = false;                ///< the run computes on GPUs
  std::string why;                 ///< the reason, for messages: "no driver is loaded"
  Isa best_isa = Isa::avx512_amx;  ///< best instruction set of all ranks' processors
  bool bf16_differs = false;       ///< only some ranks' processors multiply bf16 faster than fp32
  std::string staged_why = {};     ///< why communication is host-staged; empty when it is not
};

/// Checks keys that depend on the device of the run, mainly with `device: auto`. A missing device is
/// Exit::unavailable. Warnings name keys without effect.
Diagnostics validate_for_device(const ConfigResult& result, const DeviceFacts& facts);

/// The batch arithmetic. validate_for_world() must have found no errors. A microbatch of `auto` becomes
/// global / (dp x gradient_accumulation_steps) if the steps are given, else the largest divisor of global /
/// dp with at most 8192 tokens per forward pass (at least one sequence) that BatchPlan::unit divides; if
/// there is none, the least that it divides. Where it divides none, and for other microbatches, the checks
/// refuse the run.
BatchPlan resolve_batch(const Config& config, int world_size);

}  // namespace nrl

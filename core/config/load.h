#pragma once
// Reading a configuration: files and overrides to the typed Config, with a place for everything that is
// wrong.
//
// Running on several ranks: rank 0 loads, and broadcasts dump_resolved(); the other ranks call
// load_config_text() on it. The dump round-trips to an equal Config, so that all ranks have the same and only
// one touches the files.

#include "core/config/result.h"

#include <span>
#include <string>
#include <string_view>

namespace nrl {

/// Reads `path`, the files it inherits from, and the overrides "a.b=v" (in order, later wins). Bad input
/// never throws: all problems found are in `diagnostics`. A missing file is a diagnostic with Exit::no_input.
ConfigResult load_config(const std::string& path, std::span<const std::string> overrides = {});

/// The same from memory; `name` stands for the file in messages, and `defaults:` is relative to its
/// directory.
ConfigResult load_config_text(std::string_view text, const std::string& name,
                              std::span<const std::string> overrides = {});

/// The canonical YAML of every key in force, each with a comment that says where its value came from.
std::string dump_resolved(const ConfigResult& result);

/// The canonical YAML of one key's value, for example "0.0003" for policy.optimizer.lr. `key` must be one of
/// a section of Config (not policy.model).
std::string value_text(const Config& config, std::string_view key);

/// Meaning, type, default, allowed values, other spellings and status of a key or of the keys of a section.
/// Any other text is searched for in keys, spellings and meanings: a single hit is explained, several are
/// listed. Sets `*known` to false when there is none (the text then suggests the nearest).
std::string explain(std::string_view key, bool* known = nullptr);

/// The reference page docs/configuration.md.
std::string config_markdown();

/// The batch arithmetic of a run.
struct BatchPlan {
  int64_t data_parallel = 1;
  int64_t micro = 1;   ///< sequences per forward pass and rank
  int64_t global = 1;  ///< sequences per optimizer step
  int64_t accumulation =
      1;  ///< forward passes per step and rank: global = micro x accumulation x data_parallel
  int64_t tokens_per_step = 0;
};

/// What is done where the schedule of the learning rate is longer than a run of `steps`: a warning's text, or
/// empty where it fits.
std::string schedule_beyond_run(const Config& config, int64_t steps);

/// Steps of the warm-up in a schedule that ends at `decay_steps`.
int64_t warmup_steps(const SchedulerConfig& scheduler, int64_t decay_steps);

/// The step at which the decay ends in a run of `steps`: lr_decay_iters, else the last step, but never before
/// the warm-up and the final decay of WSD are over, which a validated configuration has room for.
int64_t decay_end(const SchedulerConfig& scheduler, int64_t steps);

/// Checks the grid and the batch against the number of ranks (and of nodes, where known), as far as the keys
/// are sound. Empty when all fit.
Diagnostics validate_for_world(const ConfigResult& result, int world_size, int num_nodes = 0);

/// What the ranks found where they run, agreed on by all of them.
struct DeviceFacts {
  bool gpu = false;                        ///< the run computes on GPUs
  std::string why;                         ///< the reason of that, for people: "no driver is loaded"
  IsaChoice best_isa = IsaChoice::avx512;  ///< best instruction set that every processor has
  std::string staged_why = {};  ///< why ranks exchange GPU memory through the host; empty where they do not
};

/// Checks what depends on the device that a run found, with `device: auto` above all. What is missing is
/// Exit::unavailable. Warnings name keys without effect.
Diagnostics validate_for_device(const ConfigResult& result, const DeviceFacts& facts);

/// The batch arithmetic. Precondition: validate_for_world() found no errors. A micro batch of `auto` becomes
/// global / (dp x gradient_accumulation_steps) when the steps are given, else the largest divisor of global /
/// dp with at most 8192 tokens per forward pass (at least one sequence).
BatchPlan resolve_batch(const Config& config, int world_size);

}  // namespace nrl

#pragma once
// Reading a configuration: files and overrides to the typed Config, with a place for everything that is
// wrong.
//
// Running on several ranks: rank 0 loads, and broadcasts dump_resolved(); the other ranks call
// load_config_text() on it. The dump round-trips to an equal Config, so that all ranks have the same and only
// one touches the files.

#include "core/config/config.h"
#include "core/config/diagnostic.h"

#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace nrl {

namespace config_detail {
struct Sources;
}

/// Where a value was given.
struct Origin {
  std::string text;                      ///< "file.yaml:12:3" or "command line: a.b=v"
  int source = -1;                       ///< index of the file or override
  int line = 0, column = 0, length = 0;  ///< of the value
  int parent_line = 0;                   ///< of the section's key; 0 at the top
};

/// A foreign spelling that was understood.
struct Translation {
  std::string given;      ///< as written: "training.bf16: true"
  std::string canonical;  ///< "policy.precision: bfloat16"
  std::string place;
};

struct ConfigResult {
  Config config;            ///< meaningful only when ok()
  Diagnostics diagnostics;  ///< errors and warnings in file order
  std::vector<Translation> translated;
  std::map<std::string, Origin>
      origins;  ///< canonical key -> where it was given; keys at their default are absent
  /// Keys given under policy.model with their canonical YAML, in order; members of a mapping stand together.
  std::vector<std::pair<std::string, std::string>> model_values;
  /// Sections that were given -> where their key stands (the last one in the order of the files).
  std::map<std::string, Origin> sections;
  /// Keys without a value in force because of an error: those in `diagnostics`, and those that an unknown key
  /// probably meant. A section stands for all its keys; "" for everything (text that could not be parsed).
  std::set<std::string> unsound;
  std::vector<std::string> files;  ///< all files read, in the order in which they were laid over each other
  std::shared_ptr<const config_detail::Sources> sources;

  /// Whether the value of the key, or of all keys of the section, is what the user gave. A check between keys
  /// has to ask for each of them: else it would complain about a default that stands for an error.
  bool sound(std::string_view key) const;
  /// Appends problems found later, in file order; the keys of errors are not sound any more.
  void add(const Diagnostics& more);
  bool ok() const { return !has_errors(diagnostics); }
  Exit exit_code() const { return nrl::exit_code(diagnostics); }
};

/// Reads `path`, the files it inherits from, and the overrides "a.b=v" (in order, later wins). Bad input
/// never throws: all problems found are in `diagnostics`. A missing file is a diagnostic with Exit::no_input.
ConfigResult load_config(const std::string& path, std::span<const std::string> overrides = {});

/// The same from memory; `name` stands for the file in messages, and `defaults:` is relative to its
/// directory.
ConfigResult load_config_text(std::string_view text, const std::string& name,
                              std::span<const std::string> overrides = {});

/// A problem found later about a key of the configuration (for example policy.model.num_attention_heads),
/// with the place and the excerpt of where the user gave it; when the key has its default, of the innermost
/// section that would hold it, or of the file's beginning.
Diagnostic diagnose(const ConfigResult& result, std::string_view key, std::string message,
                    std::string label = "", std::vector<std::string> notes = {},
                    Severity severity = Severity::error);

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

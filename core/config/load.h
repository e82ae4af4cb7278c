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
  std::vector<std::string> files;  ///< all files read, in the order in which they were laid over each other
  std::shared_ptr<const config_detail::Sources> sources;

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
/// with the place and the excerpt of where the user gave it; without one when the key has its default.
Diagnostic diagnose(const ConfigResult& result, std::string_view key, std::string message,
                    std::string label = "", std::vector<std::string> notes = {},
                    Severity severity = Severity::error);

/// The canonical YAML of every key in force, each with a comment that says where its value came from.
std::string dump_resolved(const ConfigResult& result);

/// The canonical YAML of one key's value, for example "0.0003" for policy.optimizer.lr. `key` must be one of
/// a section of Config (not policy.model).
std::string value_text(const Config& config, std::string_view key);

/// Meaning, type, default, allowed values, other spellings and status of a key or of the keys of a section.
/// Sets
/// `*known` to false when there is no such key (the text then suggests the nearest).
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

/// Checks the grid and the batch against the number of ranks (and of nodes, where known). Empty when all fit.
Diagnostics validate_for_world(const ConfigResult& result, int world_size, int num_nodes = 0);

/// The batch arithmetic. Precondition: validate_for_world() found no errors. A micro batch of `auto` becomes
/// global / (dp x gradient_accumulation_steps) when the steps are given, else the largest divisor of global /
/// dp with at most 8192 tokens per forward pass (at least one sequence).
BatchPlan resolve_batch(const Config& config, int world_size);

}  // namespace nrl

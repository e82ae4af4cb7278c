#pragma once
// What a loaded configuration is: the typed Config, where every value came from, and what is wrong with it.

#include "core/config/config.h"
#include "core/config/diagnostic.h"

#include <map>
#include <memory>
#include <set>
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

/// A problem found later about a key of the configuration (for example policy.model.num_attention_heads),
/// with the place and the excerpt of where the user gave it; when the key has its default, of the innermost
/// section that would hold it, or of the file's beginning.
Diagnostic diagnose(const ConfigResult& result, std::string_view key, std::string message,
                    std::string label = "", std::vector<std::string> notes = {},
                    Severity severity = Severity::error);

}  // namespace nrl

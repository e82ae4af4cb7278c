#pragma once
// A loaded configuration: the typed Config, the origin of every value, and all problems.

#include <initializer_list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/config/config.h"
#include "core/config/diagnostic.h"

namespace nrl {

namespace config_detail {
struct Sources;
}

/// The origin of a value.
struct Origin {
  std::string text;                      ///< "file.yaml:12:3" or "command line: a.b=v"
  int source = -1;                       ///< index of the file or override
  int line = 0, column = 0, length = 0;  ///< of the value
  int parent_line = 0;                   ///< of the section's key; 0 at the top
};

/// An alias that was translated.
struct Translation {
  std::string given;      ///< as written: "training.bf16: true"
  std::string canonical;  ///< "policy.precision: bfloat16"
  std::string place;
};

struct ConfigResult {
  Config config;            ///< meaningful only when ok()
  Diagnostics diagnostics;  ///< errors and warnings in file order
  std::vector<Translation> translated;
  std::map<std::string, Origin> origins;  ///< by canonical key; keys at their default are absent
  /// Keys given under policy.model with their canonical YAML, in order; members of a mapping are adjacent.
  std::vector<std::pair<std::string, std::string>> model_values;
  /// Sections that were given -> position of their key (in the last file that has it).
  std::map<std::string, Origin> sections;
  /// Keys without a valid value because of an error: those in `diagnostics`, and those that an unknown key
  /// probably meant. A section stands for all its keys; "" for everything (text that could not be parsed).
  std::set<std::string> unsound;
  std::vector<std::string> files;  ///< all files read, in order of increasing priority
  std::shared_ptr<const config_detail::Sources> sources;

  /// Whether the value of the key, or of all keys of the section, is what the user gave. A check between keys
  /// must ask for each of them; otherwise it would report a default that replaces an invalid value.
  bool sound(std::string_view key) const;
  bool sound(std::initializer_list<std::string_view> keys) const;
  /// True if the key was given; else it has its default.
  bool given(std::string_view key) const { return origins.contains(std::string(key)); }
  /// The place where the key was given, for messages; or "default".
  std::string where(std::string_view key) const;
  /// Appends later problems, in file order; keys with errors become unsound.
  void add(const Diagnostics& more);
  bool ok() const { return !has_errors(diagnostics); }
  Exit exit_code() const { return nrl::exit_code(diagnostics); }
};

/// A problem found after loading, about a key (for example policy.model.num_attention_heads), with the
/// position and excerpt of where the user gave it; for a key at its default, of the innermost section that
/// would hold it, or of the beginning of the file.
Diagnostic diagnose(const ConfigResult& result, std::string_view key, std::string message,
                    std::string label = "", std::vector<std::string> notes = {},
                    Severity severity = Severity::error);

}  // namespace nrl

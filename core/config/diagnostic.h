#pragma once
// Problems of a configuration, with their positions.

#include <string>
#include <vector>

#include "core/base/error.h"

namespace nrl {

enum class Severity { error, warning };

struct Diagnostic {
  Severity severity = Severity::error;
  Exit exit = Exit::config;
  std::string file;  ///< as the user spelled it, or "command line: a.b=v" for an override
  int line = 0;      ///< 1-based; 0 for a missing file or an override
  int column = 0;    ///< 1-based, in characters
  std::string key;   ///< canonical dotted key; may be empty
  std::string message;
  std::string excerpt;  ///< lines of the file with the position marked, ready to print; may be empty
  std::vector<std::string> notes;  ///< allowed values, fixes
};

using Diagnostics = std::vector<Diagnostic>;

bool has_errors(const Diagnostics& diagnostics);

/// Exit::ok without errors; Exit::no_input when every error is a missing file; Exit::config otherwise.
Exit exit_code(const Diagnostics& diagnostics);

/// The text for the terminal: every diagnostic with its excerpt and, if there are errors, the last line "N
/// errors, nothing was started. (exit 78)". Ends with a newline unless empty.
std::string render(const Diagnostics& diagnostics);

/// Throws the same text as one Error, without "error:" and the last line, for problems found too late to be
/// listed. There must be an error.
[[noreturn]] void raise(const Diagnostics& diagnostics);

}  // namespace nrl

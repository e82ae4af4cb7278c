#pragma once
// What is wrong with a configuration, and where.

#include "core/base/error.h"

#include <string>
#include <vector>

namespace nrl {

enum class Severity { error, warning };

struct Diagnostic {
  Severity severity = Severity::error;
  Exit exit = Exit::config;
  std::string file;  ///< as the user spelled it, or "command line: a.b=v" for an override
  int line = 0;      ///< 1-based; 0 when the whole input is meant (missing file) or an override
  int column = 0;    ///< 1-based, in characters
  std::string key;   ///< canonical dotted key where there is one
  std::string message;
  std::string excerpt;  ///< the lines of the file with the place marked, ready to print; may be empty
  std::vector<std::string> notes;  ///< what is allowed, what to do
};

using Diagnostics = std::vector<Diagnostic>;

bool has_errors(const Diagnostics& diagnostics);

/// Exit::ok without errors; Exit::no_input when every error is a missing file; Exit::config otherwise.
Exit exit_code(const Diagnostics& diagnostics);

/// The complete text for the terminal: every diagnostic with its excerpt and, when there is an error, the
/// last line "N errors, nothing was started. (exit 78)". Ends with a newline unless empty.
std::string render(const Diagnostics& diagnostics);

/// The same as one Error, without "error:" and the last line, for those that are found too late to be listed.
/// Precondition: there is an error among them.
[[noreturn]] void raise(const Diagnostics& diagnostics);

}  // namespace nrl

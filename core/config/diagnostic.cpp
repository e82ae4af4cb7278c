#include "core/config/diagnostic.h"

#include <algorithm>

namespace nrl {

bool has_errors(const Diagnostics& diagnostics) {
  return std::any_of(diagnostics.begin(), diagnostics.end(),
                     [](const Diagnostic& d) { return d.severity == Severity::error; });
}

Exit exit_code(const Diagnostics& diagnostics) {
  Exit code = Exit::ok;
  for (const Diagnostic& d : diagnostics) {
    if (d.severity != Severity::error) continue;
    if (d.exit == Exit::config) return Exit::config;
    code = d.exit;
  }
  return code;
}

std::string render(const Diagnostics& diagnostics) {
  std::string out;
  int errors = 0;
  for (const Diagnostic& d : diagnostics) {
    errors += d.severity == Severity::error;
    out += fmt::format("{}: {}\n", d.severity == Severity::error ? "error" : "warning", d.message);
    // The arrow ends where the gutter of the excerpt ends.
    const size_t width = std::max<size_t>(d.line > 0 ? std::to_string(d.line).size() : 0, 2);
    const std::string gutter(width, ' ');
    if (!d.file.empty()) {
      out += gutter + "--> " + d.file;
      if (d.line > 0) out += fmt::format(":{}:{}", d.line, d.column);
      out += '\n';
    }
    out += d.excerpt;
    for (const std::string& note : d.notes) out += fmt::format("{} = {}\n", gutter, note);
    out += '\n';
  }
  if (errors > 0)
    out += fmt::format("{} error{}, nothing was started. (exit {})\n", errors, errors == 1 ? "" : "s",
                       static_cast<int>(exit_code(diagnostics)));
  return out;
}

}  // namespace nrl

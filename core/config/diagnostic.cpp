#include "core/config/diagnostic.h"

#include <algorithm>

#include "core/base/text.h"

namespace nrl {
namespace {

constexpr size_t max_text = 600;                 // of a message or a note: one line that may quote any input
constexpr size_t max_shown = max_message - 200;  // of all diagnostics, without the last lines

}  // namespace

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

namespace {

std::string render_one(const Diagnostic& d) {
  std::string out = fmt::format("{}: {}\n", d.severity == Severity::error ? "error" : "warning",
                                clipped(d.message, max_text));
  // The arrow ends where the gutter of the excerpt ends.
  const size_t width = std::max<size_t>(d.line > 0 ? std::to_string(d.line).size() : 0, 2);
  const std::string gutter(width, ' ');
  if (!d.file.empty()) {
    out += gutter + "--> " + clipped(d.file, max_text);
    if (d.line > 0) out += fmt::format(":{}:{}", d.line, d.column);
    out += '\n';
  }
  out += d.excerpt;
  for (const std::string& note : d.notes) out += fmt::format("{} = {}\n", gutter, clipped(note, max_text));
  out += '\n';
  return bounded_lines(std::move(out), max_shown);
}

}  // namespace

std::string render(const Diagnostics& diagnostics) {
  // Errors first, if not all fit.
  std::vector<std::string> texts(diagnostics.size());
  size_t used = 0;
  int64_t errors = 0, hidden = 0;
  for (const Severity severity : {Severity::error, Severity::warning})
    for (size_t i = 0; i < diagnostics.size(); ++i) {
      if (diagnostics[i].severity != severity) continue;
      errors += severity == Severity::error;
      if (hidden == 0) texts[i] = render_one(diagnostics[i]);
      if (hidden == 0 && used + texts[i].size() <= max_shown) {
        used += texts[i].size();
      } else {
        texts[i].clear();
        ++hidden;
      }
    }
  std::string out;
  for (const std::string& text : texts) out += text;
  if (hidden > 0) out += fmt::format("and {} more\n\n", hidden);
  if (errors > 0)
    out += fmt::format("{} error{}, nothing was started. (exit {})\n", errors, errors == 1 ? "" : "s",
                       static_cast<int>(exit_code(diagnostics)));
  return out;
}

void raise(const Diagnostics& diagnostics) {
  std::string text = render(diagnostics);
  if (const auto last = text.rfind('\n', text.size() - 2); last != std::string::npos) text.resize(last);
  while (text.ends_with('\n')) text.pop_back();
  if (text.starts_with("error: ")) text.erase(0, 7);
  throw Error(exit_code(diagnostics), text);
}

}  // namespace nrl

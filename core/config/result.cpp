// Queries on a loaded configuration: which keys are sound, and the position of a problem with a key.
#include "core/config/result.h"

#include <algorithm>
#include <tuple>

#include "core/config/source.h"

namespace nrl {

bool ConfigResult::sound(std::string_view key) const {
  if (unsound.empty()) return true;
  const std::string name(key), members = name + ".";
  const auto inside = unsound.lower_bound(members);
  if (inside != unsound.end() && inside->starts_with(members)) return false;
  for (std::string section = name;; section.resize(section.rfind('.'))) {
    if (unsound.contains(section)) return false;
    if (section.find('.') == std::string::npos) return !unsound.contains("");
  }
}

bool ConfigResult::sound(std::initializer_list<std::string_view> keys) const {
  return std::all_of(keys.begin(), keys.end(), [this](std::string_view key) { return sound(key); });
}

std::string ConfigResult::where(std::string_view key) const {
  const auto origin = origins.find(std::string(key));
  return origin == origins.end() ? "default" : origin->second.text;
}

void ConfigResult::add(const Diagnostics& more) {
  for (const Diagnostic& d : more)
    if (d.severity == Severity::error && !d.key.empty()) unsound.insert(d.key);
  diagnostics.insert(diagnostics.end(), more.begin(), more.end());
  const auto rank = [this](const std::string& file) {
    const auto& all = sources->all;
    return std::find_if(all.begin(), all.end(), [&](const auto& s) { return s.name == file; }) - all.begin();
  };
  if (!sources) return;
  std::stable_sort(diagnostics.begin(), diagnostics.end(), [&](const Diagnostic& a, const Diagnostic& b) {
    return std::tuple(rank(a.file), a.line, a.column) < std::tuple(rank(b.file), b.line, b.column);
  });
}

Diagnostic diagnose(const ConfigResult& result, std::string_view key, std::string message, std::string label,
                    std::vector<std::string> notes, Severity severity) {
  using namespace config_detail;
  const auto at = [&](const Origin& o) {
    return make_diagnostic(result.sources->all[o.source], {o.line, o.column, o.length}, o.parent_line,
                           std::string(key), std::move(message), std::move(label), std::move(notes),
                           severity);
  };
  if (const auto o = result.origins.find(std::string(key)); o != result.origins.end() && result.sources)
    return at(o->second);
  // The key is absent: use the innermost section that could hold it.
  for (std::string section(key); result.sources && !section.empty();
       section.resize(section.find('.') == std::string::npos ? 0 : section.rfind('.')))
    if (const auto o = result.sections.find(section); o != result.sections.end()) return at(o->second);
  Diagnostic d;
  d.severity = severity;
  d.key = std::string(key);
  d.message = std::move(message);
  d.notes = std::move(notes);
  if (!label.empty()) d.notes.insert(d.notes.begin(), std::move(label));
  if (!result.files.empty()) {
    d.file = result.files.back();
    d.line = d.column = 1;
  }
  return d;
}

}  // namespace nrl

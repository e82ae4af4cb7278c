#pragma once
// Collects the loader's results and problems, with positions in the sources. Internal to core/config.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/config/result.h"
#include "core/config/source.h"

namespace nrl::config_detail {

class Report {
 public:
  static constexpr size_t max_problems = 100;

  explicit Report(ConfigResult& into) : result(into), sources_(std::make_shared<Sources>()) {
    sources_->all.reserve(max_files);  // diagnostics hold no references, but parsing does
    result.sources = sources_;
  }

  Diagnostics& problems() { return result.diagnostics; }
  bool full() const { return result.diagnostics.size() >= max_problems; }

  /// Adds a source and returns its index, from 0.
  int add(std::string name, std::string text, bool is_override = false) {
    sources_->all.emplace_back(std::move(name), std::move(text), is_override);
    return count() - 1;
  }
  int count() const { return static_cast<int>(sources_->all.size()); }
  const Source& source(int i) const { return sources_->all[i]; }
  std::string place(int i, Pos pos) const { return source(i).place(pos); }
  Origin origin(int i, Pos pos, int parent_line) const {
    return {place(i, pos), i, pos.line, pos.column, pos.length, parent_line};
  }

  /// Reports a problem with a key, which becomes unsound. Dropped beyond max_problems.
  void problem(int where, Pos pos, int parent_line, std::string key, std::string message,
               std::string label = "", std::vector<std::string> notes = {}) {
    result.unsound.insert(key);
    if (full()) return;
    problems().push_back(make_diagnostic(source(where), pos, parent_line, std::move(key), std::move(message),
                                         std::move(label), std::move(notes)));
  }

  ConfigResult& result;

 private:
  std::shared_ptr<Sources> sources_;
};

}  // namespace nrl::config_detail

#pragma once
// Files, the files they inherit from, and overrides, parsed one after the other. Internal to core/config.

#include <functional>
#include <string>
#include <vector>

#include "core/config/report.h"
#include "core/config/yaml.h"

namespace nrl::config_detail {

class Layers {
 public:
  /// `lay_over` is called with the tree of every text, the highest priority last.
  Layers(Report& report, std::function<void(int source, const Node& root)> lay_over)
      : report_(report), lay_over_(std::move(lay_over)) {}

  void add_file(const std::string& path);
  /// Processes the files that this one inherits from, then the file itself.
  void add_text(const std::string& name, std::string text);
  void add_override(const std::string& text);

 private:
  void inherit(int from, const Entry& entry);
  std::string chain_text(const std::string& again) const;

  Report& report_;
  std::function<void(int, const Node&)> lay_over_;
  std::vector<std::string> chain_;  // files whose `defaults:` are being followed
};

}  // namespace nrl::config_detail

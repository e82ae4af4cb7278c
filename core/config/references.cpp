#include "core/config/references.h"

#include "core/base/text.h"

namespace nrl::config_detail {
namespace {

void set_place(Node& node, Pos pos) {
  node.pos = pos;
  for (Node& item : node.items) set_place(item, pos);
}

}  // namespace

void apply_mixed_precision(GivenKeys& given, Report& report) {
  if (!given.mixed_precision) return;
  Given& mixed = *given.mixed_precision;
  const auto precision = given.values.find("policy.precision");
  if (precision == given.values.end()) {
    mixed.node.text = "bfloat16";
    report.result.translated.push_back(
        {mixed.written + ": true", "policy.precision: bfloat16", report.place(mixed.source, mixed.key_pos)});
    given.values["policy.precision"] = mixed;
  } else if (const std::string& text = precision->second.node.text; text == "float32" || text == "fp32") {
    report.problem(mixed.source, mixed.node.pos, mixed.parent_line, "policy.precision",
                   fmt::format("{}: true contradicts precision {}", mixed.written, text), "",
                   {fmt::format("the precision is given as '{}' at {}", precision->second.written,
                                report.place(precision->second.source, precision->second.key_pos))});
  }
}

void resolve_references(GivenKeys& keys, const Schema& schema, Report& report) {
  std::vector<std::string> unresolved;
  for (auto& [path, given] : keys.values) {
    if (given.node.kind != Node::Kind::scalar || given.node.text.find("${") == std::string::npos) continue;
    Node value = given.node;
    std::string complaint;
    for (int depth = 0;
         complaint.empty() && value.kind == Node::Kind::scalar && value.text.find("${") != std::string::npos;
         ++depth) {
      const std::string& text = value.text;
      const std::string name =
          text.starts_with("${") && text.ends_with("}") ? text.substr(2, text.size() - 3) : "";
      const auto target = keys.values.find(name);
      if (depth > 16)
        complaint = "the reference is circular";
      else if (name.empty() || name.find_first_of("${}:") != std::string::npos || name.starts_with('.'))
        complaint = "a reference must be the whole value, written ${section.key}";
      else if (target != keys.values.end())
        value = target->second.node;
      else if (const Key* key = schema.find(name); !key)
        complaint = fmt::format("'{}' is not a key", clipped(name, 80));
      else if (const std::string text_default = key->default_yaml();
               text_default.empty() || text_default[0] == '[')
        complaint = fmt::format("'{}' is not given", name);
      else
        value = {
            text_default == "null" ? Node::Kind::null : Node::Kind::scalar, text_default, false, {}, {}, {}};
    }
    if (!complaint.empty()) {
      report.problem(given.source, given.node.pos, given.parent_line, path,
                     fmt::format("{}: {}", path, complaint));
      value = {};
      unresolved.push_back(path);
      continue;
    }
    set_place(value, given.node.pos);
    given.node = std::move(value);
  }
  for (const std::string& path : unresolved) keys.values.erase(path);
}

}  // namespace nrl::config_detail

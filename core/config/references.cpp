#include "core/config/references.h"

#include "core/base/text.h"

namespace nrl::config_detail {
namespace {

std::optional<int64_t> whole_number(const Node& node) {
  return node.kind == Node::Kind::scalar && !node.quoted ? parse_size(node.text) : std::nullopt;
}

bool refers(const Node& node) {
  return node.text.find("${") != std::string::npos;
}

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
  } else if (precision->second.layer > mixed.layer) {
    return;  // overridden
  } else if (const std::string& text = precision->second.node.text; text == "float32" || text == "fp32") {
    report.problem(mixed.source, mixed.node.pos, mixed.parent_line, "policy.precision",
                   fmt::format("{}: true contradicts precision {}", mixed.written, text), "",
                   {fmt::format("the precision is given as '{}' at {}", precision->second.written,
                                report.place(precision->second.source, precision->second.key_pos))});
  }
}

void apply_products(GivenKeys& keys, Report& report) {
  for (auto& [path, product] : keys.products) {
    Given& value = product.given;
    const auto refuse = [&, &key = path](std::string message, std::string fix) {
      report.problem(value.source, value.node.pos, value.parent_line, key, std::move(message), "",
                     {std::move(fix)});
    };
    const std::string said = fmt::format("{}: {}", value.written, clipped(value.node.text, 60));
    std::string canonical = path + ": " + value.node.text;
    if (const auto by = keys.values.find(product.factor); by != keys.values.end()) {
      const Node& factor = by->second.node;
      const auto number = whole_number(value.node), times = whole_number(factor);
      if (refers(value.node) || refers(factor)) {
        refuse(fmt::format("{} and {}: {} are multiplied: expected numbers, not references", said,
                           product.factor, clipped(factor.text, 60)),
               fmt::format("Fix: write the product as {}", path));
        continue;
      }
      if (int64_t all = 0; number && times) {
        if (__builtin_mul_overflow(*number, *times, &all)) {
          refuse(fmt::format("{} x {} {} is too large", said, product.factor, *times),
                 "Fix: write smaller numbers");
          continue;
        }
        value.node.text = std::to_string(all);
        canonical = fmt::format("{}: {} ({} x {} {})", path, all, *number, product.factor, *times);
      }
    }
    const auto direct = keys.values.find(path);
    if (direct != keys.values.end() && direct->second.layer > value.layer) continue;  // overridden
    if (direct != keys.values.end() && direct->second.layer == value.layer) {
      if (whole_number(direct->second.node) != whole_number(value.node))
        refuse(fmt::format("{} is understood as {}, which contradicts {}: {} at {}", said, canonical,
                           direct->second.written, clipped(direct->second.node.text, 60),
                           report.place(direct->second.source, direct->second.node.pos)),
               "Fix: give one of them");
      continue;
    }
    report.result.translated.push_back({said, canonical, report.place(value.source, value.key_pos)});
    keys.values[path] = value;
  }
}

namespace {

class Resolver {
 public:
  Resolver(const GivenKeys& keys, const Schema& schema) : keys_(keys), schema_(schema) {}

  /// Why a reference has no value; empty if it has.
  const std::string& complaint() const { return complaint_; }

  /// The value behind the references of a value, which was given as `written`; as it is if it has none.
  Node resolve(Node value, std::string written, int depth = 0) {
    while (complaint_.empty() && value.kind == Node::Kind::scalar && refers(value)) {
      if (++depth > 16)
        complaint_ = "the reference is circular";
      else
        value = target(value.text, written, depth);
    }
    return value;
  }

 private:
  /// The value of the key that `text` names. `written`: the key that refers to it, then that key.
  Node target(const std::string& text, std::string& written, int depth) {
    constexpr std::string_view product = "${mul:";
    if (text.starts_with(product) && text.ends_with("}"))
      return multiplied(std::string_view(text).substr(product.size(), text.size() - product.size() - 1),
                        written, depth);
    std::string name = text.starts_with("${") && text.ends_with("}") ? text.substr(2, text.size() - 3) : "";
    if (name.starts_with('.')) name = absolute(name, written);
    if (name.empty() || name.find_first_of("${}:") != std::string::npos)
      return refuse(
          "a reference must be the whole value, written ${section.key}, ${.key of the same section} or "
          "${mul:a,b}");
    const Key* key = schema_.find(name);
    if (const Schema::Aliased alias = schema_.find_alias(name);
        alias && !alias.alias->is_switch() && alias.alias->factor.empty())
      key = alias.key;
    if (!key) return refuse(fmt::format("'{}' is not a key", clipped(name, 80)));
    if (const auto at = keys_.values.find(key->path); at != keys_.values.end()) {
      written = at->second.written;
      return at->second.node;
    }
    const std::string text_default = key->default_yaml();
    if (text_default.empty() || text_default[0] == '[') return refuse(fmt::format("'{}' is not given", name));
    return {text_default == "null" ? Node::Kind::null : Node::Kind::scalar, text_default, false, {}, {}, {}};
  }

  /// ".key" of the section of `written`, "..key" of the one around it.
  static std::string absolute(std::string_view name, std::string section) {
    for (; name.starts_with('.'); name.remove_prefix(1)) {
      if (section.empty()) return "";
      const size_t dot = section.rfind('.');
      section.resize(dot == std::string::npos ? 0 : dot);
    }
    return (section.empty() ? "" : section + ".") + std::string(name);
  }

  /// "a,b": the product of two whole numbers or references to them.
  Node multiplied(std::string_view factors, const std::string& written, int depth) {
    const size_t comma = factors.find(',');
    int64_t product = 1;
    for (const std::string_view part :
         {factors.substr(0, comma), comma == std::string_view::npos ? "" : factors.substr(comma + 1)}) {
      const size_t begin = part.find_first_not_of(' '), end = part.find_last_not_of(' ');
      Node factor{Node::Kind::scalar,
                  begin == std::string_view::npos ? "" : std::string(part.substr(begin, end + 1 - begin)),
                  false,
                  {},
                  {},
                  {}};
      factor = resolve(std::move(factor), written, depth);
      if (!complaint_.empty()) return {};
      const auto number = whole_number(factor);
      if (!number || __builtin_mul_overflow(product, *number, &product))
        return refuse(
            fmt::format("${{mul:a,b}} multiplies two whole numbers, not '{}'", clipped(factor.text, 40)));
    }
    return {Node::Kind::scalar, std::to_string(product), false, {}, {}, {}};
  }

  Node refuse(std::string why) {
    complaint_ = std::move(why);
    return {};
  }

  const GivenKeys& keys_;
  const Schema& schema_;
  std::string complaint_;
};

}  // namespace

void resolve_references(GivenKeys& keys, const Schema& schema, Report& report) {
  std::vector<std::string> unresolved;
  for (auto& [path, given] : keys.values) {
    if (given.node.kind != Node::Kind::scalar || !refers(given.node) || !schema.find(path)->built) continue;
    // A chat template may hold "${".
    if (path.ends_with(".chat_template") && !given.node.text.starts_with("${")) continue;
    Resolver resolver(keys, schema);
    Node value = resolver.resolve(given.node, given.written);
    if (!resolver.complaint().empty()) {
      report.problem(given.source, given.node.pos, given.parent_line, path,
                     fmt::format("{}: {}", path, resolver.complaint()));
      unresolved.push_back(path);
      continue;
    }
    set_place(value, given.node.pos);
    given.node = std::move(value);
  }
  for (const std::string& path : unresolved) keys.values.erase(path);
}

}  // namespace nrl::config_detail

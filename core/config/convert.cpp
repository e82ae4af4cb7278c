#include "core/config/convert.h"

#include <algorithm>
#include <cctype>
#include <cmath>

#include <spdlog/fmt/fmt.h>

#include "core/base/text.h"

namespace nrl::config_detail {
namespace {

std::string shown(const Node& node) {
  switch (node.kind) {
    case Node::Kind::null:
      return "nothing";
    case Node::Kind::list:
      return "a list";
    case Node::Kind::map:
      return "a mapping";
    case Node::Kind::scalar:
      break;
  }
  return fmt::format("{}'{}'", node.quoted ? "the quoted text " : "", clipped(node.text, 60));
}

/// "2**15", or "2^15" as other languages write it.
std::optional<double> parse_power(std::string_view text) {
  const size_t base = text.starts_with("2**") ? 3 : text.starts_with("2^") ? 2 : 0;
  if (base == 0) return std::nullopt;
  const auto power = parse_integer(text.substr(base));
  if (!power || *power < 0 || *power >= 64) return std::nullopt;
  return std::ldexp(1.0, static_cast<int>(*power));
}

/// Guesses the intended integer for "did you mean": "2k" -> 2000, "1e3" -> 1000,
/// "010" -> 10, "1_000" -> 1000.
std::string guess_number(const Key& key, const std::string& text) {
  std::string bare;
  for (const char c : text)
    if (c != '_' && c != ',' && c != ' ' && c != '+') bare += c;
  const bool negative = bare.starts_with('-');
  const size_t digit = bare.find_first_not_of('0', negative ? 1 : 0);
  if (digit != std::string::npos && digit > (negative ? 1u : 0u) &&
      std::isdigit(static_cast<unsigned char>(bare[digit])))
    bare.erase(negative ? 1 : 0, digit - (negative ? 1 : 0));
  if (key.kind == Kind::number) {
    if (bare.starts_with('.')) bare = "0" + bare;
    if (bare.ends_with('.')) bare.pop_back();
    const auto number = parse_number(bare);
    return number ? number_text(*number) : "";
  }
  if (const auto size = parse_size(bare)) return std::to_string(*size);
  // "2.5k"
  static constexpr std::pair<char, double> units[] = {{'k', 1e3}, {'M', 1e6}, {'B', 1e9}};
  for (const auto& [suffix, factor] : units)
    if (bare.ends_with(suffix))
      if (const auto number = parse_number(std::string_view(bare).substr(0, bare.size() - 1)))
        bare = number_text(*number * factor);
  if (const auto number = parse_number(bare);
      number && std::abs(*number) < 1e15 && *number == std::floor(*number))
    return std::to_string(static_cast<int64_t>(*number));
  return "";
}

/// JSON of a node, with numbers and so on as YAML's core schema reads them.
std::string json_of(const Node& node) {
  std::string out;
  switch (node.kind) {
    case Node::Kind::null:
      return "null";
    case Node::Kind::scalar:
      if (node.quoted) return json_string(node.text);
      if (is_null_text(node.text)) return "null";
      if (const auto flag = parse_boolean(node.text)) return *flag ? "true" : "false";
      if (const auto whole = parse_integer(node.text)) return std::to_string(*whole);
      if (const auto number = parse_number(node.text)) return json_text(Value{*number});
      return json_string(node.text);
    case Node::Kind::list:
      for (const Node& item : node.items) out += (out.empty() ? "" : ", ") + json_of(item);
      return "[" + out + "]";
    case Node::Kind::map:
      for (const Entry& entry : node.entries)
        out += (out.empty() ? "" : ", ") + json_string(entry.key) + ": " + json_of(entry.value);
      return "{" + out + "}";
  }
  return "null";
}

class Converter {
 public:
  Converter(const Key& key) : key_(key) {}

  Converted run(const Node& node) {
    Converted out;
    out.value = key_.is_list ? list(node) : element(node);
    if (out.value && !key_.built && !rejection_ && yaml_text(*out.value) != key_.default_yaml()) {
      const std::string inert = key_.default_yaml();
      std::vector<std::string> notes;
      for (const Synonym& instead : key_.choices.advice)
        if (instead.spelling == yaml_text(*out.value)) notes.push_back(fmt::format("Fix: {}", instead.name));
      reject(node, fmt::format("'{}' is a known key, but not supported yet", key_.path),
             fmt::format("remove it or set it to {}", inert), std::move(notes));
    }
    out.translated = translated_;
    if (rejection_) {
      out.rejection = std::move(rejection_);
      out.value.reset();
    }
    return out;
  }

 private:
  void reject(const Node& node, std::string message, std::string label, std::vector<std::string> notes) {
    if (!rejection_) rejection_ = Rejection{std::move(message), std::move(label), std::move(notes), node.pos};
  }

  void wrong_type(const Node& node, std::string label = "") {
    reject(node, fmt::format("{}: expected {}, found {}", key_.path, key_.type_text(), shown(node)),
           std::move(label), {});
  }

  bool is_null(const Node& node) const {
    return node.kind == Node::Kind::null ||
           (node.kind == Node::Kind::scalar && !node.quoted && is_null_text(node.text));
  }

  /// null and auto, for single values and lists.
  std::optional<Value> special(const Node& node) {
    if (is_null(node)) {
      if (key_.null_ok) return Value{Null{}};
      wrong_type(node, "remove the line to use the default");
      return std::nullopt;
    }
    if (!key_.unlimited.empty() && node.kind == Node::Kind::scalar && node.text == key_.unlimited) {
      translated_ = yaml_text(Value{Null{}});
      return Value{Null{}};
    }
    if (key_.auto_ok && node.kind == Node::Kind::scalar && node.text == "auto") return Value{Auto{}};
    return std::nullopt;
  }

  std::optional<Value> list(const Node& node) {
    if (auto value = special(node); value || rejection_) return value;
    if (node.kind == Node::Kind::map) return wrong_type(node), std::nullopt;
    if (key_.from_text && node.kind == Node::Kind::scalar && !parse_integer(node.text))
      return text_list(node);
    std::vector<Node> items;
    if (node.kind == Node::Kind::list) {
      items = node.items;
    } else if (key_.comma_ok && node.text.find(',') != std::string::npos) {
      for (size_t begin = 0; begin <= node.text.size();) {
        const size_t end = std::min(node.text.find(',', begin), node.text.size());
        Node item = node;
        item.quoted = false;
        item.text = node.text.substr(begin, end - begin);
        while (item.text.starts_with(' ')) item.text.erase(0, 1);
        while (item.text.ends_with(' ')) item.text.pop_back();
        items.push_back(std::move(item));
        begin = end + 1;
      }
    } else {
      items = {node};
      if (key_.single_ok) return element(node);
    }
    if (key_.list_length > 0 && items.size() != static_cast<size_t>(key_.list_length)) {
      reject(node,
             fmt::format("{}: expected {}, found {} value{}", key_.path, key_.type_text(), items.size(),
                         items.size() == 1 ? "" : "s"),
             "", {});
      return std::nullopt;
    }
    List out;
    for (const Node& item : items) {
      if (is_null(item)) {
        wrong_type(item);
        return std::nullopt;
      }
      auto value = element(item);
      if (!value) return std::nullopt;
      out.push_back(std::move(*value));
    }
    return Value{std::move(out)};
  }

  std::optional<Value> text_list(const Node& node) {
    std::vector<int64_t> values;
    const std::string problem = key_.from_text(node.text, values);
    if (!problem.empty()) {
      reject(node, fmt::format("{}: {}: {}", key_.path, shown(node), problem), "",
             {"expected " + key_.type_text()});
      return std::nullopt;
    }
    List out;
    for (const int64_t v : values) out.push_back(Value{v});
    translated_ = yaml_text(Value{out});
    return Value{std::move(out)};
  }

  std::optional<Value> element(const Node& node) {
    if (!key_.is_list)
      if (auto value = special(node); value || rejection_) return value;
    if (key_.mappings_ok && node.kind == Node::Kind::map) return Value{json_of(node)};
    if (node.kind != Node::Kind::scalar) return wrong_type(node), std::nullopt;
    if (key_.kind != Kind::text && node.text == "???") {
      reject(node, fmt::format("{} must be given", key_.path), "", {"expected " + key_.type_text()});
      return std::nullopt;
    }
    switch (key_.kind) {
      case Kind::boolean:
        if (const auto b = node.quoted ? std::nullopt : parse_boolean(node.text)) return Value{*b};
        return wrong_type(node, node.quoted ? "remove the quotes" : "write true or false"), std::nullopt;
      case Kind::text:
        if (node.text == "???") return reject(node, key_.path + " must be given", "", {}), std::nullopt;
        return Value{node.text};
      case Kind::choice:
        return choice(node);
      case Kind::integer:
        return integer(node);
      case Kind::number:
        return number(node);
    }
    return std::nullopt;
  }

  std::optional<Value> choice(const Node& node) {
    const Choices& c = key_.choices;
    std::string_view name;
    for (std::string_view candidate : c.names)
      if (candidate == node.text) name = candidate;
    for (const Synonym& s : c.synonyms)
      if (name.empty() && s.spelling == node.text) {
        name = s.name;
        translated_ = std::string(name);
      }
    for (const Synonym& other : c.advice)
      if (name.empty() && other.spelling == node.text)
        return wrong_type(node, std::string(other.name)), std::nullopt;
    if (name.empty()) {
      wrong_type(node, node.text.size() <= 128 ? did_you_mean(nearest(node.text, c.names)) : "");
      return std::nullopt;
    }
    if (!c.built.empty() && std::find(c.built.begin(), c.built.end(), name) == c.built.end()) {
      std::string today;
      for (std::string_view b : c.built) today += (today.empty() ? "" : ", ") + std::string(b);
      for (const Synonym& other : c.advice)
        if (other.spelling == name)
          return reject(node, fmt::format("{}: '{}' is not supported", key_.path, name),
                        std::string(other.name), {"supported: " + today}),
                 std::nullopt;
      reject(node, fmt::format("{}: '{}' is a known value, but not supported yet", key_.path, name), "",
             {"supported today: " + today});
      return std::nullopt;
    }
    return Value{std::string(name)};
  }

  bool in_range(const Node& node, double v) {
    const bool low = key_.min_open ? v > key_.min : v >= key_.min;
    const bool high = key_.max_open ? v < key_.max : v <= key_.max;
    if (!low || !high)
      reject(node, fmt::format("{}: {} is out of range", key_.path, shown(node)),
             "expected " + key_.type_text(), {});
    return low && high;
  }

  std::optional<Value> not_numeric(const Node& node) {
    if (node.quoted && (parse_number(node.text) || parse_size(node.text)))
      return wrong_type(node, "remove the quotes"), std::nullopt;
    if (const auto power = parse_power(node.text)) {
      const bool unquoted = node.quoted && key_.power_ok && node.text.starts_with("2**");
      wrong_type(node, fmt::format("write {}{}", number_text(*power),
                                   unquoted ? ", or " + node.text + " without quotes" : ""));
      return std::nullopt;
    }
    const std::string guess = guess_number(key_, node.text);
    wrong_type(node, guess.empty() ? "" : fmt::format("did you mean {}?", guess));
    return std::nullopt;
  }

  std::optional<Value> integer(const Node& node) {
    if (!node.quoted) {
      const auto value = key_.size_ok ? parse_size(node.text) : parse_integer(node.text);
      if (value)
        return in_range(node, static_cast<double>(*value)) ? std::optional(Value{*value}) : std::nullopt;
      // All digits but not parsed: does not fit into 64 bits.
      if (const auto number = parse_number(node.text); number && std::abs(*number) >= 9e18) {
        in_range(node, *number);
        return std::nullopt;
      }
    }
    return not_numeric(node);
  }

  std::optional<Value> number(const Node& node) {
    if (node.text == key_.words && !key_.words.empty()) return Value{node.text};
    if (!node.quoted) {
      if (const auto b = parse_boolean(node.text); b && key_.boolean_ok) return Value{*b};
      auto value = parse_number(node.text);
      if (!value && key_.power_ok && node.text.starts_with("2**")) value = parse_power(node.text);
      if (value && key_.boolean_ok && (*value == 0 || *value == 1)) return Value{*value == 1};
      if (value) return in_range(node, *value) ? std::optional(Value{*value}) : std::nullopt;
    }
    return not_numeric(node);
  }

  const Key& key_;
  std::optional<Rejection> rejection_;
  std::string translated_;
};

}  // namespace

Converted convert(const Key& key, const Node& node) {
  return Converter(key).run(node);
}

}  // namespace nrl::config_detail

#include "core/config/load.h"

#include "core/config/convert.h"
#include "core/config/schema.h"
#include "core/config/source.h"
#include "core/config/validate.h"
#include "core/config/yaml.h"

#include "core/base/text.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <set>

namespace nrl {
namespace config_detail {
namespace {

constexpr size_t kMaxKeysListed = 12;
constexpr size_t kMaxProblems = 100;
constexpr std::string_view kModelPrefix = "policy.model.";

/// A value that was given for a key, and where.
struct Given {
  Node node;
  int source = 0;
  int parent_line = 0;
  Pos key_pos;
  std::string written;  ///< the path as written
};

class Loader {
 public:
  explicit Loader(ConfigResult& result) : result_(result), sources_(std::make_shared<Sources>()) {
    sources_->all.reserve(64);  // diagnostics hold no references, but parsing does
  }

  void add_file(const std::string& path) {
    std::string text;
    try {
      text = read_config_file(path);
    } catch (const Error& e) {
      Diagnostic d;
      d.file = path;
      d.exit = e.code();
      d.message = e.what();
      problems().push_back(std::move(d));
      result_.unsound.insert("");
      return;
    }
    add_text(path, std::move(text));
  }

  /// Lays a file, and before it what it inherits from, over what is there.
  void add_text(const std::string& name, std::string text) {
    const int source = static_cast<int>(sources_->all.size());
    sources_->all.emplace_back(name, std::move(text));
    const size_t before = problems().size();
    Node root = parse_yaml(sources_->all.back(), problems());
    if (problems().size() > before) result_.unsound.insert("");
    chain_.push_back(canonical(name));
    for (const Entry& entry : root.entries)
      if (entry.key == "defaults") inherit(source, entry);
    chain_.pop_back();
    std::erase_if(root.entries, [](const Entry& e) { return e.key == "defaults"; });
    result_.files.push_back(name);
    lay_over(source, root);
  }

  void add_override(const std::string& text) {
    const int source = static_cast<int>(sources_->all.size());
    sources_->all.emplace_back("command line: " + text, text, true);
    const size_t before = problems().size();
    Node root = parse_override(sources_->all.back(), problems());
    if (problems().size() > before) result_.unsound.insert(root.entries.empty() ? "" : root.entries[0].key);
    lay_over(source, root);
  }

  void finish() {
    apply_mixed_precision();
    resolve_references();
    std::vector<std::pair<const Key*, Value>> values;
    for (auto& [path, given] : given_) {
      const Key& key = *Schema::get().find(path);
      Converted converted = convert(key, given.node);
      if (converted.refusal) {
        Refusal& r = *converted.refusal;
        std::string& label = r.label;
        problem(given.source, r.pos, given.parent_line, path, std::move(r.message), std::move(label),
                std::move(r.notes));
        continue;
      }
      if (!converted.value) continue;
      if (!converted.translated.empty())
        result_.translated.push_back({fmt::format("{}: {}", given.written, given.node.text),
                                      fmt::format("{}: {}", path, converted.translated),
                                      place(given.source, given.node.pos)});
      result_.origins[path] = origin_of(given.source, given.node.pos, given.parent_line);
      if (key.set) key.set(result_.config, *converted.value);
      if (key.model) model_values_[path] = std::move(*converted.value);
    }
    collect_model();
    result_.sources = sources_;
    result_.add(validate(result_));
  }

 private:
  Diagnostics& problems() { return result_.diagnostics; }

  const Source& source(int i) const { return sources_->all[static_cast<size_t>(i)]; }
  std::string place(int i, Pos pos) const { return source(i).place(pos); }

  void problem(int where, Pos pos, int parent_line, std::string key, std::string message,
               std::string label = "", std::vector<std::string> notes = {}) {
    result_.unsound.insert(key);
    if (problems().size() >= kMaxProblems) return;
    problems().push_back(make_diagnostic(source(where), pos, parent_line, std::move(key), std::move(message),
                                         std::move(label), std::move(notes)));
  }

  static std::string canonical(const std::string& name) {
    std::error_code error;
    const auto path = std::filesystem::weakly_canonical(name, error);
    return error ? name : path.string();
  }

  void inherit(int from, const Entry& entry) {
    std::vector<Node> items =
        entry.value.kind == Node::Kind::list ? entry.value.items : std::vector{entry.value};
    for (const Node& item : items) {
      auto refuse = [&](std::string message, std::vector<std::string> notes = {}) {
        problem(from, item.pos, 0, "defaults", std::move(message), "", std::move(notes));
        result_.unsound.insert("");
      };
      if (item.kind != Node::Kind::scalar || item.text.empty()) {
        refuse("defaults: expected a file name or a list of file names");
        continue;
      }
      std::filesystem::path path(item.text);
      if (path.is_relative()) path = std::filesystem::path(source(from).name).parent_path() / path;
      const std::string name = path.lexically_normal().string();
      const std::string real = canonical(name);
      if (std::find(chain_.begin(), chain_.end(), real) != chain_.end()) {
        refuse(fmt::format("'{}' inherits from itself", clipped(item.text)),
               {"the chain is " + chain_text(real)});
      } else if (sources_->all.size() >= static_cast<size_t>(kMaxFiles)) {
        refuse(fmt::format("more than {} files inherited", kMaxFiles));
        return;
      } else {
        std::string text;
        try {
          text = read_config_file(name);
        } catch (const Error& e) {
          refuse(e.what(), {"names are relative to the folder of the file that holds 'defaults:'"});
          problems().back().exit = e.code();
          continue;
        }
        add_text(name, std::move(text));
      }
    }
  }

  std::string chain_text(const std::string& again) const {
    std::string out;
    for (const std::string& file : chain_) out += std::filesystem::path(file).filename().string() + " -> ";
    return out + std::filesystem::path(again).filename().string();
  }

  void lay_over(int source, const Node& root) {
    fresh_.clear();
    walk(source, root, "", 0);
  }

  void walk(int where, const Node& map, const std::string& section, int parent_line) {
    for (const Entry& entry : map.entries) {
      const std::string written = section.empty() ? entry.key : section + "." + entry.key;
      const std::string path = Schema::canonical_prefix(written);
      const Schema& schema = Schema::get();
      const bool is_map = entry.value.kind == Node::Kind::map;
      if (const Foreign* foreign = schema.find_foreign(path)) {
        problem(where, entry.key_pos, parent_line, path, fmt::format("'{}' is not a key of nrl-train", path),
                "", {foreign->advice});
        continue;
      }
      const Key* key = schema.find(path);
      const Schema::Aliased alias = schema.find_alias(path);
      const bool is_section = schema.is_section(path);
      if (is_section && (is_map || (entry.value.kind == Node::Kind::null && !key && !alias))) {
        if (path == "dpo")
          problem(where, entry.key_pos, parent_line, path, "the section 'dpo' belongs to algorithm dpo", "",
                  {"this version trains with algorithm: pretrain only"});
        else
          enter(where, entry, path, parent_line);
      } else if (key) {
        if (is_section &&
            !(entry.value.kind == Node::Kind::scalar && !entry.value.quoted &&
              is_null_text(entry.value.text)) &&
            entry.value.kind != Node::Kind::null)
          not_a_mapping(where, entry, path, parent_line);
        else
          give(where, path, written, entry, entry.value, parent_line);
      } else if (alias) {
        by_alias(where, alias, written, entry, parent_line);
      } else if (is_section) {
        not_a_mapping(where, entry, path, parent_line);
      } else {
        unknown(where, entry, path, parent_line);
      }
    }
  }

  void enter(int where, const Entry& entry, const std::string& path, int parent_line) {
    if (!source(where).is_override) result_.sections[path] = origin_of(where, entry.key_pos, parent_line);
    walk(where, entry.value, path, entry.key_pos.line);
  }

  Origin origin_of(int where, Pos pos, int parent_line) const {
    return {place(where, pos), where, pos.line, pos.column, pos.length, parent_line};
  }

  void not_a_mapping(int where, const Entry& entry, const std::string& path, int parent_line) {
    problem(where, entry.value.pos, parent_line, path, fmt::format("{}: expected a mapping", path), "",
            {"keys here: " + keys_of(path)});
  }

  std::string keys_of(const std::string& section) const {
    const auto names = Schema::get().children(section);
    std::string out;
    for (size_t i = 0; i < names.size() && i < kMaxKeysListed; ++i)
      out += (i ? ", " : "") + std::string(names[i]);
    if (names.size() > kMaxKeysListed)
      out += fmt::format(", ... ({} more: nrl-train explain{}{})", names.size() - kMaxKeysListed,
                         section.empty() ? "" : " ", section);
    return out;
  }

  void unknown(int where, const Entry& entry, const std::string& path, int parent_line) {
    if (problems().size() >= kMaxProblems) {  // suggestions are not free
      result_.unsound.insert("");
      return;
    }
    const Schema& schema = Schema::get();
    const size_t dot = path.rfind('.');
    const std::string section = dot == std::string::npos ? "" : path.substr(0, dot);
    const std::string near = schema.suggest(path);
    std::string label;
    std::vector<std::string> notes;
    if (!near.empty()) {
      result_.unsound.insert(near);
      const std::string in_section = section.empty() ? "" : section + ".";
      const std::string shown =
          near.starts_with(in_section) && near.find('.', in_section.size()) == std::string::npos
              ? near.substr(in_section.size())
              : near;
      label = fmt::format("did you mean '{}'?", shown);
      if (const Key* key = schema.find(near))
        label += fmt::format("  ({}: {}{})", near, key->type_text(),
                             key->default_yaml().empty() ? "" : ", default " + key->default_yaml());
    }
    if (const std::string keys = keys_of(section); !keys.empty()) notes.push_back("keys here: " + keys);
    problem(where, entry.key_pos, parent_line, path, fmt::format("unknown key '{}'", clipped(entry.key, 80)),
            std::move(label), std::move(notes));
  }

  void by_alias(int where, const Schema::Aliased& found, const std::string& written, const Entry& entry,
                int parent_line) {
    Node value = entry.value;
    if (found.alias->is_switch()) {
      const auto on =
          value.kind == Node::Kind::scalar && !value.quoted ? parse_boolean(value.text) : std::nullopt;
      if (!on) {
        problem(where, value.pos, parent_line, found.key->path,
                fmt::format("{}: expected true or false", written));
        return;
      }
      const std::string& meaning = *on ? found.alias->if_true : found.alias->if_false;
      if (meaning.empty()) {  // false of one switch among several says nothing
        if (*on) mixed_precision_ = Given{value, where, parent_line, entry.key_pos, written};
        return;
      }
      value.text = meaning;
    }
    result_.translated.push_back({fmt::format("{}: {}", written, text_of(entry.value)),
                                  fmt::format("{}: {}", found.key->path, text_of(value)),
                                  place(where, entry.key_pos)});
    give(where, found.key->path, written, entry, std::move(value), parent_line);
  }

  static std::string text_of(const Node& node) {
    if (node.kind == Node::Kind::scalar) return clipped(node.text, 80);
    return node.kind == Node::Kind::null ? "null" : "...";
  }

  void give(int where, const std::string& path, const std::string& written, const Entry& entry, Node value,
            int parent_line) {
    if (!fresh_.insert(path).second) {
      const Given& before = given_.at(path);
      if (same(before.node, value)) return;
      problem(where, entry.key_pos, parent_line, path,
              fmt::format("{} is given twice with different values", path), "",
              {fmt::format("first as '{}' at {}", before.written, place(before.source, before.key_pos))});
      return;
    }
    if (Schema::get().find(path)->model) {
      // A mapping and null in its place drive each other out.
      const std::string head = model_head(path);
      std::erase_if(given_, [&](const auto& e) {
        return path == head ? e.first.starts_with(head + ".") : e.first == head;
      });
      if (std::find(model_order_.begin(), model_order_.end(), path) == model_order_.end())
        model_order_.push_back(path);
    }
    given_[path] = Given{std::move(value), where, parent_line, entry.key_pos, written};
  }

  static bool same(const Node& a, const Node& b) {
    if (a.kind != b.kind || a.text != b.text || a.items.size() != b.items.size()) return false;
    for (size_t i = 0; i < a.items.size(); ++i)
      if (!same(a.items[i], b.items[i])) return false;
    return true;
  }

  /// `mixed_precision: true` of the seed documents: a 16-bit precision, bfloat16 unless one is named.
  void apply_mixed_precision() {
    if (!mixed_precision_) return;
    Given& mixed = *mixed_precision_;
    const auto precision = given_.find("policy.precision");
    if (precision == given_.end()) {
      mixed.node.text = "bfloat16";
      result_.translated.push_back(
          {mixed.written + ": true", "policy.precision: bfloat16", place(mixed.source, mixed.key_pos)});
      given_["policy.precision"] = mixed;
    } else if (const std::string& text = precision->second.node.text; text == "float32" || text == "fp32") {
      problem(mixed.source, mixed.node.pos, mixed.parent_line, "policy.precision",
              fmt::format("{}: true contradicts precision {}", mixed.written, text), "",
              {fmt::format("the precision is given as '{}' at {}", precision->second.written,
                           place(precision->second.source, precision->second.key_pos))});
    }
  }

  /// Replaces values that are exactly "${a.b}" by the value of that key.
  void resolve_references() {
    for (auto& [path, given] : given_) {
      if (given.node.kind != Node::Kind::scalar || given.node.text.find("${") == std::string::npos) continue;
      Node value = given.node;
      std::string complaint;
      for (int depth = 0; complaint.empty() && value.kind == Node::Kind::scalar &&
                          value.text.find("${") != std::string::npos;
           ++depth) {
        const std::string& text = value.text;
        const std::string name =
            text.starts_with("${") && text.ends_with("}") ? text.substr(2, text.size() - 3) : "";
        const auto target = given_.find(name);
        if (depth > 16)
          complaint = "references go round in a circle";
        else if (name.empty() || name.find_first_of("${}:") != std::string::npos || name.starts_with('.'))
          complaint = "only a whole value may be a reference, written ${section.key}";
        else if (target != given_.end())
          value = target->second.node;
        else if (const Key* key = Schema::get().find(name); !key)
          complaint = fmt::format("'{}' is not a key", clipped(name, 80));
        else if (const std::string text_default = key->default_yaml();
                 text_default.empty() || text_default[0] == '[')
          complaint = fmt::format("'{}' is not given", name);
        else
          value = {text_default == "null" ? Node::Kind::null : Node::Kind::scalar,
                   text_default,
                   false,
                   {},
                   {},
                   {}};
      }
      if (!complaint.empty()) {
        problem(given.source, given.node.pos, given.parent_line, path,
                fmt::format("{}: {}", path, complaint));
        value = {};
        unresolved_.push_back(path);
        continue;
      }
      set_place(value, given.node.pos);
      given.node = std::move(value);
    }
    for (const std::string& path : unresolved_) given_.erase(path);
  }

  static void set_place(Node& node, Pos pos) {
    node.pos = pos;
    for (Node& item : node.items) set_place(item, pos);
  }

  static std::string model_head(
      const std::string& path) {  // policy.model.rope_scaling.factor -> policy.model.rope_scaling
    return path.substr(0, path.find('.', kModelPrefix.size()));
  }

  /// policy.model as one JSON object, and the list of its values.
  void collect_model() {
    // Members of one mapping together, in the place of its first member.
    std::vector<std::string> heads;
    for (const std::string& path : model_order_)
      if (const std::string head = model_head(path);
          std::find(heads.begin(), heads.end(), head) == heads.end())
        heads.push_back(head);
    std::string json;
    for (const std::string& head : heads) {
      std::string members;
      std::string own;
      for (const std::string& path : model_order_) {
        const auto value = model_values_.find(path);
        if (model_head(path) != head || value == model_values_.end()) continue;
        result_.model_values.emplace_back(path, yaml_text(value->second));
        if (path == head)
          own = json_text(value->second);
        else
          members += (members.empty() ? "" : ", ") + json_string(path.substr(head.size() + 1)) + ": " +
                     json_text(value->second);
      }
      if (!members.empty()) own = "{" + members + "}";
      if (!own.empty())
        json += (json.empty() ? "" : ", ") + json_string(head.substr(kModelPrefix.size())) + ": " + own;
    }
    result_.config.policy.model_json = "{" + json + "}";
  }

  ConfigResult& result_;
  std::shared_ptr<Sources> sources_;
  std::map<std::string, Given> given_;  ///< canonical key -> the value in force
  std::set<std::string> fresh_;         ///< keys given by the layer in work
  std::vector<std::string> chain_;      ///< files whose `defaults:` are being followed
  std::optional<Given> mixed_precision_;
  std::vector<std::string> unresolved_;
  std::vector<std::string> model_order_;
  std::map<std::string, Value> model_values_;
};

template <class Start>
ConfigResult load(std::span<const std::string> overrides, Start start) {
  ConfigResult result;
  Loader loader(result);
  start(loader);
  // Without its file, complaints about overrides would only hide the cause.
  const bool missing = exit_code(result.diagnostics) == Exit::no_input;
  if (!missing)
    for (const std::string& text : overrides) loader.add_override(text);
  loader.finish();
  return result;
}

}  // namespace
}  // namespace config_detail

ConfigResult load_config(const std::string& path, std::span<const std::string> overrides) {
  return config_detail::load(overrides, [&](auto& loader) { loader.add_file(path); });
}

ConfigResult load_config_text(std::string_view text, const std::string& name,
                              std::span<const std::string> overrides) {
  return config_detail::load(overrides, [&](auto& loader) { loader.add_text(name, std::string(text)); });
}

}  // namespace nrl

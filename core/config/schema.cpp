#include "core/config/schema.h"

#include <algorithm>

#include <spdlog/fmt/fmt.h>

#include "core/base/error.h"
#include "core/base/text.h"

namespace nrl::config_detail {
namespace {

std::string parent_of(std::string_view path) {
  const size_t dot = path.rfind('.');
  return std::string(dot == std::string_view::npos ? "" : path.substr(0, dot));
}

std::string_view leaf_of(std::string_view path) {
  const size_t dot = path.rfind('.');
  return dot == std::string_view::npos ? path : path.substr(dot + 1);
}

bool plain(const Alias& alias) {
  return !alias.is_switch() && alias.factor.empty();
}

bool shares_algorithm(const Key& a, const Key& b) {
  const auto has = [&](Algorithm algorithm) { return b.belongs_to(algorithm); };
  return a.algorithms.empty() || b.algorithms.empty() ||
         std::any_of(a.algorithms.begin(), a.algorithms.end(), has);
}

}  // namespace

std::string Key::default_yaml() const {
  if (get) return yaml_text(get(Config{}));
  return default_text;
}

std::string Key::section() const {
  return parent_of(path);
}
std::string Key::leaf() const {
  return std::string(leaf_of(path));
}

bool Key::belongs_to(Algorithm algorithm) const {
  return algorithms.empty() || std::find(algorithms.begin(), algorithms.end(), algorithm) != algorithms.end();
}

std::string Key::type_text() const {
  std::string out;
  switch (kind) {
    case Kind::boolean:
      out = "true or false";
      break;
    case Kind::text:
      out = mappings_ok ? "mappings" : is_list ? "texts" : "text";
      break;
    case Kind::choice:
      for (std::string_view name : choices.names) {
        if (name == "auto" && auto_ok) continue;
        out += (out.empty() ? "" : " | ") + std::string(name);
      }
      break;
    case Kind::integer:
    case Kind::number: {
      out = boolean_ok ? "true, false or a " : "";
      out += kind == Kind::integer ? "integer" : "number";
      if (is_list) out += "s";
      const bool is_int = kind == Kind::integer;
      const double none_low =
          is_int ? std::numeric_limits<int32_t>::min() : std::numeric_limits<double>::lowest();
      const double none_high =
          is_int ? std::numeric_limits<int32_t>::max() : std::numeric_limits<double>::max();
      auto text = [&](double v) { return is_int ? std::to_string(static_cast<int64_t>(v)) : number_text(v); };
      const bool low = min > none_low, high = max < none_high && max < 1e12;
      if (low) out += fmt::format(" {} {}", min_open ? "above" : "from", text(min));
      if (high)
        out += fmt::format("{} {}", max_open ? (low ? " and below" : " below") : (low ? " to" : " up to"),
                           text(max));
      break;
    }
  }
  if (is_list) {
    if (list_length > 0)
      out = fmt::format("list of {} {}", list_length, out);
    else
      out = (kind == Kind::choice ? "list of: " : "list of ") + out;
    if (comma_ok) out += " (also as \"a,b,c\")";
    if (list_length == 0) out += ", or one alone";
    if (from_text) out += ", or " + text_name;
  }
  if (!words.empty()) out += ", or " + words;
  if (auto_ok) out += ", or auto";
  if (null_ok) out += ", or null";
  return out;
}

void Key::set_type(std::string_view text) {
  const std::string_view whole = text;
  const auto take = [&](std::string_view part) {
    const bool found = text.starts_with(part);
    if (found) text.remove_prefix(part.size());
    return found;
  };
  if (null_ok = text.ends_with(", or null"); null_ok)
    text.remove_suffix(std::string_view(", or null").size());
  if (const bool is_integer = take("integer"); is_integer || take("number")) {
    kind = is_integer ? Kind::integer : Kind::number;
    const auto bound = [&] {
      const size_t end = std::min(text.find(' '), text.size());
      const double value = parse_number(text.substr(0, end)).value();
      text.remove_prefix(end);
      return value;
    };
    if (take(" above ") && (min_open = true)) min = bound();
    if (take(" from ")) min = bound();
    if (take(" to ")) max = bound();
    if (take(" and below ") && (max_open = true)) max = bound();
  } else if (text == "text" || take("list of texts")) {
    is_list = text != "text";
  } else if (text == "true or false") {
    kind = Kind::boolean;
  } else {
    kind = Kind::choice;
    for (;;) {
      const size_t end = text.find(" | ");
      choices.names.push_back(text.substr(0, end));
      if (end == text.npos) break;
      text.remove_prefix(end + 3);
    }
  }
  NRL_CHECK(type_text() == whole, "{}: the type \"{}\" is read as \"{}\"", path, whole, type_text());
}

KeyBuilder& KeyBuilder::one_of(std::vector<std::string_view> names) {
  key_->kind = Kind::choice;
  key_->choices.names = std::move(names);
  std::erase_if(key_->choices.synonyms, [this](const Synonym& s) {
    const auto& all = key_->choices.names;
    return std::find(all.begin(), all.end(), s.name) == all.end();
  });
  return *this;
}

Key& Table::add(std::string path) {
  Key key;
  key.path = std::move(path);
  schema_.keys_.push_back(std::move(key));
  return schema_.keys_.back();
}

KeyBuilder& KeyBuilder::on_off(std::string path, std::string if_true, std::string if_false) {
  if (policy_ != "policy") {
    if (!path.starts_with("policy.")) return *this;
    path.replace(0, std::string_view("policy").size(), policy_);
  }
  key_->aliases.push_back({std::move(path), std::move(if_true), std::move(if_false)});
  return *this;
}

KeyBuilder& KeyBuilder::times(std::string path, std::string factor) {
  if (policy_ == "policy") key_->aliases.push_back({.path = std::move(path), .factor = std::move(factor)});
  return *this;
}

KeyBuilder& KeyBuilder::only_with(Need any_of) {
  for (Condition& condition : any_of)
    if (policy_ != "policy" && condition.key.starts_with("policy."))
      condition.key.replace(0, std::string_view("policy").size(), policy_);
  key_->needs.push_back(std::move(any_of));
  return *this;
}

KeyBuilder Table::planned(std::string path, std::string_view type, std::string default_text) {
  Key& key = add(std::move(path));
  key.set_type(type);
  key.single_ok = key.is_list && !default_text.starts_with('[');
  key.built = false;
  key.default_text = std::move(default_text);
  return KeyBuilder(key);
}

KeyBuilder PolicyTable::model(std::string_view name, Kind kind) {
  Key& key = table_.add(full("model") + "." + std::string(name));
  key.kind = kind;
  key.model = member_;
  if (kind == Kind::integer) key.max = std::numeric_limits<int32_t>::max();
  return KeyBuilder(key, section_);
}

void Table::section(std::string path, std::string help, std::vector<Algorithm> algorithms) {
  if (!algorithms.empty()) schema_.section_algorithms_[path] = std::move(algorithms);
  schema_.section_help_[std::move(path)] = std::move(help);
}

void Table::foreign(std::string path, std::string advice, std::string idle) {
  schema_.foreign_.emplace(path, Foreign{path, std::move(advice), std::move(idle)});
}

Schema::Schema(const std::function<void(Table&)>& fill) {
  Table table(*this);
  fill(table);
  for (Key& key : keys_)
    for (std::string section = key.section(); !section.empty(); section = parent_of(section)) {
      if (const auto it = section_algorithms_.find(section);
          key.algorithms.empty() && it != section_algorithms_.end()) {
        key.algorithms = it->second;
        key.algorithm_section = section;
      }
      if (const auto it = section_resume_.find(section); !key.resume && it != section_resume_.end())
        key.resume = it->second;
    }
  auto note_sections = [this](const std::string& path, bool own) {
    std::string child = path;
    for (std::string section = parent_of(path);; section = parent_of(section)) {
      if (!section.empty()) {
        bool& ours = sections_[section];
        ours = ours || own;
      }
      if (own) {
        std::vector<std::string>& names = children_[section];
        const std::string name(leaf_of(child));
        if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
      }
      if (section.empty()) break;
      child = section;
    }
  };
  for (size_t i = 0; i < keys_.size(); ++i) {
    const Key& key = keys_[i];
    NRL_CHECK(by_path_.emplace(key.path, i).second, "key {} is declared twice", key.path);
    note_sections(key.path, true);
    for (size_t a = 0; a < key.aliases.size(); ++a) {
      auto& owners = by_alias_[key.aliases[a].path];
      for (const auto& [other, index] : owners)
        NRL_CHECK(!shares_algorithm(key, keys_[other]) && plain(key.aliases[a]) &&
                      plain(keys_[other].aliases[index]),
                  "alias {} is declared twice", key.aliases[a].path);
      owners.emplace_back(i, a);
      note_sections(key.aliases[a].path, false);
    }
  }
  for (const auto& [path, foreign] : foreign_) note_sections(path, false);
  // Every loop has the same keys.
  const auto find_key = [&](const std::string& path) { return find(full_name(Config{}, path)); };
  for (const Key& key : keys_)
    for (const Need& need : key.needs)
      for (const Condition& condition : need)
        NRL_CHECK(key.get && find_key(condition.key) && find_key(condition.key)->get,
                  "{} needs {}, which is no key", key.path, condition.key);
  for (const auto& [alias, where] : by_alias_) {
    NRL_CHECK(!by_path_.contains(alias), "alias {} is a key as well", alias);
    NRL_CHECK(!find_foreign(alias), "alias {} is a key of another program as well", alias);
  }
  for (const Key& key : keys_)
    NRL_CHECK(!find_foreign(key.path), "key {} is a key of another program as well", key.path);
}

const Schema& Schema::get() {
  static const Schema schema([](Table& table) {
    add_top_keys(table);
    add_distributed_keys(table);
    add_policy_keys(table, "policy", &Config::policy);
    add_data_keys(table);
    add_run_keys(table);
    add_other_keys(table);
  });
  return schema;
}

const Key* Schema::find(std::string_view path) const {
  const auto it = by_path_.find(std::string(path));
  return it == by_path_.end() ? nullptr : &keys_[it->second];
}

Schema::Aliased Schema::find_alias(std::string_view path) const {
  const auto it = by_alias_.find(std::string(path));
  if (it == by_alias_.end()) return {};
  const auto& [key, alias] = it->second.front();
  return {&keys_[key], &keys_[key].aliases[alias]};
}

Schema::Aliased Schema::find_alias(std::string_view path, Algorithm algorithm) const {
  if (const auto it = by_alias_.find(std::string(path)); it != by_alias_.end())
    for (const auto& [key, alias] : it->second)
      if (keys_[key].belongs_to(algorithm)) return {&keys_[key], &keys_[key].aliases[alias]};
  return {};
}

const Foreign* Schema::find_foreign(std::string_view path) const {
  for (std::string section(path); !section.empty(); section = parent_of(section))
    if (const auto it = foreign_.find(section); it != foreign_.end()) return &it->second;
  return nullptr;
}

bool Schema::is_section(std::string_view path) const {
  return sections_.find(path) != sections_.end();
}

bool Schema::is_own_section(std::string_view path) const {
  const auto it = sections_.find(path);
  return it != sections_.end() && it->second;
}

std::string_view Schema::section_help(std::string_view path) const {
  const auto it = section_help_.find(path);
  return it == section_help_.end() ? std::string_view() : it->second;
}

std::vector<std::string_view> Schema::children(std::string_view section) const {
  const auto it = children_.find(section);
  if (it == children_.end()) return {};
  return {it->second.begin(), it->second.end()};
}

std::string Schema::canonical_prefix(std::string path) {
  static constexpr std::string_view from = "policy.hf_config_overrides";
  if (path.starts_with(from) && (path.size() == from.size() || path[from.size()] == '.'))
    path.replace(0, from.size(), "policy.model");
  return path;
}

std::string Schema::suggest(std::string_view path) const {
  const std::string section = parent_of(path);
  const std::string_view word = leaf_of(path);
  if (word.size() > 128) return "";
  const std::string prefix = section.empty() ? "" : section + ".";
  std::vector<std::string_view> here = children(section);
  if (const std::string_view near = nearest(word, here); !near.empty()) return prefix + std::string(near);
  // An alias in this section.
  std::vector<std::string_view> names;
  for (const auto& [alias, where] : by_alias_)
    if (parent_of(alias) == section) names.push_back(leaf_of(alias));
  std::sort(names.begin(), names.end());
  if (const std::string_view near = nearest(word, names); !near.empty())
    return find_alias(prefix + std::string(near)).key->path;
  // An exact name in another section, the shortest path first; then a near name anywhere.
  const Key* best = nullptr;
  for (const Key& key : keys_)
    if (leaf_of(key.path) == word && (!best || key.path.size() < best->path.size())) best = &key;
  if (best) return best->path;
  for (const auto& [name, own] : sections_)
    if (own && leaf_of(name) == word) return name;
  if (word.size() < 4) return "";
  for (const Key& key : keys_) {
    const std::string_view leaf = leaf_of(key.path);
    if (!nearest(word, std::span(&leaf, 1)).empty()) return key.path;
  }
  for (const Key& key : keys_)
    for (const Alias& alias : key.aliases) {
      const std::string_view leaf = leaf_of(alias.path);
      if (!nearest(word, std::span(&leaf, 1)).empty()) return key.path;
    }
  return "";
}

}  // namespace nrl::config_detail

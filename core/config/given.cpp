#include "core/config/given.h"

#include <algorithm>

#include "core/base/text.h"

namespace nrl::config_detail {
namespace {

constexpr size_t max_keys_listed = 12;

/// The section of a backend of NeMo RL that the path is or lies in; empty if none.
std::string_view backend_of(std::string_view path) {
  for (const std::string_view backend : {"policy.dtensor_cfg", "policy.megatron_cfg"})
    if (path == backend || (path.starts_with(backend) && path[backend.size()] == '.')) return backend;
  return "";
}

const Entry* find_entry(const Node& map, std::string_view key) {
  const auto it =
      std::find_if(map.entries.begin(), map.entries.end(), [&](const Entry& e) { return e.key == key; });
  return it == map.entries.end() ? nullptr : &*it;
}

std::optional<bool> boolean_in(const Node& node) {
  return node.kind == Node::Kind::scalar && !node.quoted ? parse_boolean(node.text) : std::nullopt;
}

/// The value of the switch of a backend, in or at a path of it; null: not there.
const Node* switch_of(std::string_view path, const Node& value) {
  if (path.substr(backend_of(path).size()) == ".enabled") return &value;
  const Entry* entry = path == backend_of(path) ? find_entry(value, "enabled") : nullptr;
  return entry ? &entry->value : nullptr;
}

/// True for null, an empty list or section, the settings of a feature that is off, and `idle`.
bool asks_for_nothing(const Node& value, std::string_view idle) {
  switch (value.kind) {
    case Node::Kind::null:
      return true;
    case Node::Kind::scalar:
      if (!value.quoted && is_null_text(value.text)) return true;
      if (const auto on = boolean_in(value)) return !idle.empty() && on == parse_boolean(idle);
      return !idle.empty() && value.text == idle;
    case Node::Kind::list:
      return value.items.empty();
    case Node::Kind::map:
      break;
  }
  const Entry* enabled = find_entry(value, "enabled");
  return value.entries.empty() || (enabled && boolean_in(enabled->value) == false);
}

std::string text_of(const Node& node) {
  if (node.kind == Node::Kind::scalar) return clipped(node.text, 80);
  return node.kind == Node::Kind::null ? "null" : "...";
}

bool same(const Node& a, const Node& b) {
  if (a.kind != b.kind || a.text != b.text || a.items.size() != b.items.size()) return false;
  for (size_t i = 0; i < a.items.size(); ++i)
    if (!same(a.items[i], b.items[i])) return false;
  return true;
}

}  // namespace

std::string model_head(const std::string& path) {
  constexpr std::string_view model = ".model.";
  return path.substr(0, path.find('.', path.find(model) + model.size()));
}

void GivenKeys::lay_over(int source, const Node& root) {
  const bool follows = on_command_line_;
  on_command_line_ = report_.source(source).is_override;
  if (!follows || !on_command_line_) {
    ++layer_;
  }
  walk(source, root, "", 0);
}

void GivenKeys::walk(int where, const Node& map, const std::string& section, int parent_line) {
  for (const Entry& entry : map.entries) {
    const std::string written = section.empty() ? entry.key : section + "." + entry.key;
    const std::string path = Schema::canonical_prefix(written);
    const bool is_map = entry.value.kind == Node::Kind::map;
    if (defer(where, entry, section, path, parent_line)) continue;
    if (const Foreign* foreign = schema_.find_foreign(path)) {
      if (asks_for_nothing(entry.value, foreign->path == path ? foreign->idle : "")) continue;
      report_.problem(where, entry.key_pos, parent_line, path,
                      fmt::format("'{}' is not a key of nrl-train", foreign->path), "", {foreign->advice});
      continue;
    }
    const Key* key = schema_.find(path);
    const Schema::Aliased alias = schema_.find_alias(path);
    const bool is_section = schema_.is_section(path);
    // A section that is also an alias of one of its keys (recompute: auto) is empty when it is null.
    const bool null_is_empty = !key && (!alias || alias.key->section() == path);
    if (is_section && (is_map || (entry.value.kind == Node::Kind::null && null_is_empty))) {
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

bool GivenKeys::defer(int where, const Entry& entry, const std::string& section, const std::string& path,
                      int parent_line) {
  const std::string_view backend = backend_of(path);
  if (backend.empty()) return false;
  // The switch of such a section was read by read_backends().
  if (!defers_) return switch_of(path, entry.value) == &entry.value;
  if (path == backend && entry.value.kind != Node::Kind::map) return false;
  deferred_.push_back({where, entry, section, path, parent_line, layer_, on_command_line_});
  return true;
}

void GivenKeys::read_backends() {
  defers_ = false;
  std::map<std::string_view, const Deferred*> off;
  for (const Deferred& d : deferred_)
    if (const Node* enabled = switch_of(d.path, d.entry.value)) {
      const std::string_view backend = backend_of(d.path);
      const auto on = boolean_in(*enabled);
      if (!on)
        report_.problem(d.where, enabled->pos, d.entry.key_pos.line, std::string(backend),
                        fmt::format("{}.enabled: expected true or false", backend));
      off[backend] = on.value_or(true) ? nullptr : &d;
    }
  for (const auto& [backend, d] : off)
    if (d)
      report_.result.translated.push_back({fmt::format("{}.enabled: false", backend),
                                           fmt::format("no section {}", backend),
                                           report_.place(d->where, d->entry.key_pos)});
  for (const Deferred& d : deferred_) {
    if (off[backend_of(d.path)]) continue;
    layer_ = d.layer;
    on_command_line_ = d.on_command_line;
    Node map;
    map.kind = Node::Kind::map;
    map.entries = {d.entry};
    walk(d.where, map, d.section, d.parent_line);
  }
}

void GivenKeys::move(const std::string& from, const std::string& to) {
  auto moved = values.extract(from);
  const Given& given = moved.mapped();
  if (const auto other = values.find(to); other != values.end()) {
    if (other->second.layer > given.layer || same(other->second.node, given.node)) return;
    if (other->second.layer == given.layer) return given_twice(given, to, other->second);
    values.erase(other);
  }
  for (Translation& t : report_.result.translated)
    if (t.given.starts_with(given.written + ": ") && t.canonical.starts_with(from + ": "))
      t.canonical.replace(0, from.size(), to);
  moved.key() = to;
  values.insert(std::move(moved));
}

void GivenKeys::given_twice(const Given& given, const std::string& path, const Given& before) {
  report_.problem(
      given.source, given.key_pos, given.parent_line, path,
      fmt::format("{} is given twice with different values", path), "",
      {fmt::format("first as '{}' at {}", before.written, report_.place(before.source, before.key_pos))});
}

void GivenKeys::enter(int where, const Entry& entry, const std::string& path, int parent_line) {
  if (!report_.source(where).is_override)
    report_.result.sections[path] = report_.origin(where, entry.key_pos, parent_line);
  walk(where, entry.value, path, entry.key_pos.line);
}

void GivenKeys::not_a_mapping(int where, const Entry& entry, const std::string& path, int parent_line) {
  std::vector<std::string> notes{"keys here: " + keys_of(path)};
  if (path == "policy.scheduler" && entry.value.kind == Node::Kind::list)
    notes.emplace_back(
        "a list is one of PyTorch's schedulers; LinearLR and ConstantLR are lr_decay_style: constant and "
        "lr_warmup_iters: STEPS, where the rate rises from 0");
  report_.problem(where, entry.value.pos, parent_line, path, fmt::format("{}: expected a mapping", path), "",
                  std::move(notes));
}

std::string GivenKeys::keys_of(const std::string& section) const {
  const auto names = schema_.children(section);
  std::string out;
  for (size_t i = 0; i < names.size() && i < max_keys_listed; ++i)
    out += (i ? ", " : "") + std::string(names[i]);
  if (names.size() > max_keys_listed)
    out += fmt::format(", ... ({} more: nrl-train explain{}{})", names.size() - max_keys_listed,
                       section.empty() ? "" : " ", section);
  return out;
}

std::string GivenKeys::nearest_key(std::string path) const {
  std::erase_if(path, [](char c) { return c == ' ' || c == '\t'; });
  const bool known = schema_.find(path) || schema_.find_alias(path) || schema_.is_section(path) ||
                     schema_.find_foreign(path);
  return known ? path : schema_.suggest(path);
}

void GivenKeys::unknown(int where, const Entry& entry, const std::string& path, int parent_line) {
  if (report_.full()) {  // suggestions are expensive
    report_.result.unsound.insert("");
    return;
  }
  const size_t dot = path.rfind('.');
  const std::string section = dot == std::string::npos ? "" : path.substr(0, dot);
  const std::string in_training = "training." + path;
  const Schema::Aliased of_trl = section.empty() ? schema_.find_alias(in_training) : Schema::Aliased{};
  const Foreign* other = section.empty() ? schema_.find_foreign(in_training) : nullptr;
  const std::string near = of_trl ? of_trl.key->path : other ? "" : nearest_key(path);
  std::string label;
  std::vector<std::string> notes;
  const bool spaced = path.find_first_of(" \t") != std::string::npos;
  if (spaced)
    notes.push_back(
        "a key is written without spaces: section.key: value in a file, section.key=value on the "
        "command line");
  if (!near.empty()) {
    const Schema::Aliased alias = schema_.find_alias(near);
    report_.result.unsound.insert(alias ? alias.key->path : near);
    const std::string in_section = section.empty() ? "" : section + ".";
    const std::string shown =
        !spaced && near.starts_with(in_section) && near.find('.', in_section.size()) == std::string::npos
            ? near.substr(in_section.size())
            : near;
    label = did_you_mean(shown);
    if (const Key* key = schema_.find(near))
      label += fmt::format("  ({}: {}{})", near, key->type_text(),
                           key->default_yaml().empty() ? "" : ", default " + key->default_yaml());
  }
  if (of_trl)
    notes.push_back("arguments of TRL's scripts are understood below a section 'training:'");
  else if (other)
    notes.push_back(other->advice);
  else if (const std::string keys = keys_of(section); !keys.empty())
    notes.push_back("keys here: " + keys);
  report_.problem(where, entry.key_pos, parent_line, path,
                  fmt::format("unknown key '{}'", clipped(entry.key, 80)), std::move(label),
                  std::move(notes));
}

void GivenKeys::by_alias(int where, const Schema::Aliased& found, const std::string& written,
                         const Entry& entry, int parent_line) {
  Node value = entry.value;
  if (found.alias->is_switch()) {
    const auto on = boolean_in(value);
    if (!on) {
      report_.problem(where, value.pos, parent_line, found.key->path,
                      fmt::format("{}: expected true or false", written));
      return;
    }
    const std::string& meaning = *on ? found.alias->if_true : found.alias->if_false;
    take_back(found.key->path, written);
    if (meaning.empty()) {  // false in one of several switches carries no information
      if (*on) mixed_precision = Given{value, where, parent_line, entry.key_pos, written, layer_};
      return;
    }
    value.text = meaning;
  }
  if (!found.alias->factor.empty()) {
    products[found.key->path] = {{std::move(value), where, parent_line, entry.key_pos, written, layer_},
                                 found.alias->factor};
    return;
  }
  report_.result.translated.push_back({fmt::format("{}: {}", written, text_of(entry.value)),
                                       fmt::format("{}: {}", found.key->path, text_of(value)),
                                       report_.place(where, entry.key_pos)});
  give(where, found.key->path, written, entry, std::move(value), parent_line);
}

void GivenKeys::take_back(const std::string& path, const std::string& written) {
  if (mixed_precision && mixed_precision->written == written) mixed_precision.reset();
  if (const auto it = values.find(path); it != values.end() && it->second.written == written)
    values.erase(it);
}

void GivenKeys::give(int where, const std::string& path, const std::string& written, const Entry& entry,
                     Node value, int parent_line) {
  Given given{std::move(value), where, parent_line, entry.key_pos, written, layer_};
  if (const auto it = values.find(path); it != values.end()) {
    const Given& before = it->second;
    if (before.layer > layer_) return;
    const auto refers = [&](const Node& node) {
      return node.kind == Node::Kind::scalar && node.text == "${" + path + "}";
    };
    if (before.layer == layer_ && !(on_command_line_ && before.written == written)) {
      if (!same(before.node, given.node) && !refers(given.node)) given_twice(given, path, before);
      return;
    }
  }
  if (schema_.find(path)->model) {
    // A mapping and a null for the same key replace each other.
    const std::string head = model_head(path);
    std::erase_if(values, [&](const auto& e) {
      return path == head ? e.first.starts_with(head + ".") : e.first == head;
    });
    if (std::find(model_order.begin(), model_order.end(), path) == model_order.end())
      model_order.push_back(path);
  }
  values[path] = std::move(given);
}

}  // namespace nrl::config_detail

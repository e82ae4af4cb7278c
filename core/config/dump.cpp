// Generated from the option table: the resolved configuration, `explain`, and the reference page.
#include <algorithm>
#include <cctype>
#include <functional>
#include <tuple>

#include "core/base/error.h"
#include "core/base/text.h"
#include "core/config/load.h"
#include "core/config/schema.h"

namespace nrl {
namespace config_detail {
namespace {

/// Calls on_key for every key and on_section for every section below `section`, in table order.
void walk(const std::string& section, const std::function<void(const std::string&)>& on_section,
          const std::function<void(const Key&)>& on_key) {
  const Schema& schema = Schema::get();
  auto path_of = [&](std::string_view name) {
    return section.empty() ? std::string(name) : section + "." + std::string(name);
  };
  for (const std::string_view name : schema.children(section))
    if (const Key* key = schema.find(path_of(name))) on_key(*key);
  for (const std::string_view name : schema.children(section)) {
    const std::string path = path_of(name);
    if (!schema.is_own_section(path)) continue;
    on_section(path);
    walk(path, on_section, on_key);
  }
}

std::string status_text(const Key& key) {
  if (!key.built) return fmt::format("Not supported yet: only {} is accepted", key.default_yaml());
  if (key.choices.built.empty()) return "Supported";
  std::string names;
  for (std::string_view name : key.choices.built) names += (names.empty() ? "" : ", ") + std::string(name);
  return "Supported today: " + names;
}

std::string aliases_text(const Key& key, std::string_view separator) {
  std::string out;
  for (const Alias& alias : key.aliases) out += (out.empty() ? "" : std::string(separator)) + alias.path;
  return out;
}

std::string explain_key(const Key& key) {
  std::string out = fmt::format("{}\n  {}\n  value    {}\n", key.path, key.help, key.type_text());
  if (!key.default_yaml().empty()) out += fmt::format("  default  {}\n", key.default_yaml());
  if (key.model) out += "  default  depends on model_type\n";
  if (key.size_ok) out += "  sizes    k, M, B and KiB, MiB, GiB are accepted (20k = 20000)\n";
  if (!key.choices.synonyms.empty()) {
    std::string synonyms;
    for (const Synonym& s : key.choices.synonyms)
      synonyms += fmt::format("{}{} = {}", synonyms.empty() ? "" : ", ", s.spelling, s.name);
    out += fmt::format("  same     {}\n", synonyms);
  }
  if (!key.aliases.empty()) out += fmt::format("  also as  {}\n", aliases_text(key, "\n           "));
  if (!key.algorithms.empty()) {
    std::string names;
    for (const Algorithm a : key.algorithms) names += (names.empty() ? "" : ", ") + std::string(name_of(a));
    out += fmt::format("  only in  algorithm {}\n", names);
  }
  for (const Need& need : key.needs) out += fmt::format("  only     with {}\n", text_of(need));
  out += fmt::format("  status   {}\n", status_text(key));
  return out;
}

constexpr size_t max_hits = 12;

/// Lower-case letters and digits; everything else, and "CamelCase" boundaries, becomes one space.
std::string plain_words(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (i > 0 && std::isupper(static_cast<unsigned char>(c)) &&
        std::islower(static_cast<unsigned char>(text[i - 1])))
      out += ' ';
    if (std::isalnum(static_cast<unsigned char>(c)))
      out += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    else if (!out.empty() && out.back() != ' ')
      out += ' ';
  }
  if (out.ends_with(' ')) out.pop_back();
  return out;
}

/// How well a key matches a search, higher is better; 0: no match.
int relevance(const Key& key, const std::string& words) {
  const auto ends_with_words = [&](const std::string& path) {
    const std::string plain = plain_words(path);
    return plain == words || plain.ends_with(" " + words);
  };
  if (ends_with_words(key.path)) return 5;
  if (std::any_of(key.aliases.begin(), key.aliases.end(),
                  [&](const Alias& a) { return ends_with_words(a.path); }))
    return 4;
  if (plain_words(key.path).find(words) != std::string::npos) return 3;
  if (std::any_of(key.aliases.begin(), key.aliases.end(),
                  [&](const Alias& a) { return plain_words(a.path).find(words) != std::string::npos; }))
    return 2;
  return plain_words(key.help).find(words) != std::string::npos ? 1 : 0;
}

/// The keys that match a text: those of the best kind of match, or all if only parts of names or meanings
/// match. Supported keys first, then shorter ones.
std::vector<const Key*> search(std::string_view text) {
  const std::string words = plain_words(text.substr(0, 128));
  if (words.size() < 2) return {};
  std::vector<std::pair<int, const Key*>> hits;
  for (const Key& key : Schema::get().keys())
    if (const int r = relevance(key, words)) hits.emplace_back(r, &key);
  std::stable_sort(hits.begin(), hits.end(), [](const auto& a, const auto& b) {
    const auto order = [](const auto& hit) {
      return std::tuple(-hit.first, !hit.second->built, hit.second->path.size());
    };
    return order(a) < order(b);
  });
  std::vector<const Key*> out;
  for (const auto& [r, key] : hits)
    if (hits.front().first < 4 || r == hits.front().first) out.push_back(key);
  return out;
}

std::string markdown_cell(std::string text) {
  std::string out;
  for (const char c : text) out += c == '|' ? "\\|" : std::string(1, c);
  return out;
}

/// Describes the meaning of the alias in a few words.
std::string meaning_of(const Key& key, const Alias& alias) {
  std::string out = key.path;
  const auto value = [](const std::string& text) { return text.empty() ? "-" : text; };
  if (alias.is_switch())
    out += fmt::format(" (true: {}; false: {})", value(alias.if_true), value(alias.if_false));
  if (!alias.factor.empty()) out += fmt::format(" (multiplied by {})", alias.factor);
  return out;
}

/// The first sentence of a help text, for lists of keys.
std::string first_sentence(const std::string& help) {
  constexpr size_t most = 110;
  for (size_t at = 0; (at = help.find(". ", at)) != std::string::npos; ++at)
    if (at > 0 && std::islower(static_cast<unsigned char>(help[at - 1])))
      return clipped(help.substr(0, at + 1), most);
  return clipped(help, most);
}

/// One line for every key and section in `section`.
std::string explain_section(const std::string& section) {
  const Schema& schema = Schema::get();
  const auto line = [](const std::string& name, const std::string& text) {
    return fmt::format("  {:<28} {}\n", name, text);
  };
  std::string out =
      fmt::format("{}\n  {}\n", section.empty() ? "(top level)" : section, schema.section_help(section));
  for (const std::string_view child : schema.children(section)) {
    const std::string name(child), path = section.empty() ? name : section + "." + name;
    if (schema.is_own_section(path))
      out += line(name + ".", "section: " + first_sentence(std::string(schema.section_help(path))));
    else if (const Key* key = schema.find(path))
      out += line(name, first_sentence(key->help) +
                            (key->built ? fmt::format(" [{}]", key->default_yaml().empty()
                                                                   ? "depends on model_type"
                                                                   : clipped(key->default_yaml(), 40))
                                        : " (not supported yet)"));
  }
  return out + fmt::format("nrl-train explain {}KEY describes a key in full; defaults are in brackets\n",
                           section.empty() ? "" : section + ".");
}

/// A section of other programs: what its keys are understood as.
std::string explain_aliases(const std::string& section) {
  const Schema& schema = Schema::get();
  std::string out =
      fmt::format("{}\n  A section of other programs, whose keys are understood as:\n", section);
  for (const Key& key : schema.keys())
    for (const Alias& alias : key.aliases)
      if (alias.path.starts_with(section + "."))
        out += fmt::format("  {:<44} {}\n", alias.path, meaning_of(key, alias));
  return out;
}

}  // namespace
}  // namespace config_detail

std::string dump_resolved(const ConfigResult& result) {
  using namespace config_detail;
  std::string out = "# The resolved configuration; comments say where each value came from.\n";
  std::vector<std::string> open;  // sections whose headers are already written
  auto line = [&](const std::string& path, const std::string& value) {
    std::vector<std::string> sections;
    for (size_t dot = path.find('.'); dot != std::string::npos; dot = path.find('.', dot + 1))
      sections.push_back(path.substr(0, dot));
    for (size_t i = 0; i < sections.size(); ++i)
      if (i >= open.size() || open[i] != sections[i])
        out += fmt::format("{:{}}{}:\n", "", 2 * i, sections[i].substr(sections[i].rfind('.') + 1));
    open = sections;
    const std::string text =
        fmt::format("{:{}}{}: {}", "", 2 * sections.size(), path.substr(path.rfind('.') + 1), value);
    out += fmt::format("{:<56}  # {}\n", text, clipped(result.where(path)));
  };
  auto on_key = [&](const Key& key) {
    if (key.get && key.belongs_to(result.config.algorithm)) line(key.path, yaml_text(key.get(result.config)));
  };
  auto on_section = [&](const std::string& section) {
    for (const auto& [path, value] : result.model_values)
      if (path.substr(0, path.find(".model.") + 6) == section) line(path, value);
  };
  walk("", on_section, on_key);
  return out;
}

std::string value_text(const Config& config, std::string_view name) {
  const config_detail::Key* key = config_detail::Schema::get().find(name);
  NRL_CHECK(key && !key->model, "no key {}", name);
  if (!key->get) return key->default_yaml();  // not built yet: it has no other value
  return config_detail::yaml_text(key->get(config));
}

ResumeRule resume_rule(std::string_view name) {
  const config_detail::Key* key = config_detail::Schema::get().find(name);
  return key ? key->resume.value_or(ResumeRule{}) : ResumeRule{};
}

std::vector<std::string> recorded_keys(const Config& config) {
  std::vector<std::string> out;
  for (const config_detail::Key& key : config_detail::Schema::get().keys())
    if (key.get && key.belongs_to(config.algorithm) && resume_rule(key.path).change != OnResume::unrelated)
      out.push_back(key.path);
  return out;
}

std::vector<std::string> allowed_values(std::string_view name) {
  using config_detail::Kind;
  const config_detail::Key* key = config_detail::Schema::get().find(name);
  if (!key) return {};
  if (key->kind == Kind::boolean) return {"false", "true"};
  const auto& values = key->choices.built.empty() ? key->choices.names : key->choices.built;
  return {values.begin(), values.end()};
}

std::vector<std::string> default_overrides(std::span<const std::string_view> names) {
  std::vector<std::string> out;
  for (const config_detail::Key& key : config_detail::Schema::get().keys())
    if (std::any_of(names.begin(), names.end(),
                    [&](std::string_view name) { return key.path == name || key.section() == name; }))
      out.push_back(key.path + "=" + key.default_yaml());
  return out;
}

std::string explain(std::string_view name, bool* known) {
  using namespace config_detail;
  const Schema& schema = Schema::get();
  std::string path = Schema::canonical_prefix(std::string(name));
  if (path.ends_with('.')) path.pop_back();
  if (known) *known = true;
  std::string out;
  if (const Key* key = schema.find(path)) out = explain_key(*key);
  if (path.empty() || schema.is_own_section(path)) return out + explain_section(path);
  if (!out.empty()) return out;
  if (const Schema::Aliased alias = schema.find_alias(path))
    return fmt::format("{} is understood as {}\n\n", path, meaning_of(*alias.key, *alias.alias)) +
           explain_key(*alias.key);
  if (const Foreign* foreign = schema.find_foreign(path))
    return fmt::format("{} is not a key of nrl-train: {}\n", path, foreign->advice);
  if (schema.is_section(path)) return explain_aliases(path);
  const std::vector<const Key*> hits = search(path);
  if (hits.size() == 1)
    return fmt::format("{} is found in {}\n\n", clipped(path), hits[0]->path) + explain_key(*hits[0]);
  if (!hits.empty()) {
    out = fmt::format("there is no key '{}'; it is found in {} keys{}:\n", clipped(path), hits.size(),
                      hits.size() > max_hits ? fmt::format(", the first {} of which are", max_hits) : "");
    for (size_t i = 0; i < hits.size() && i < max_hits; ++i)
      out += fmt::format("  {:<44} {}{}\n", hits[i]->path, hits[i]->help,
                         hits[i]->built ? "" : " (not supported yet)");
    return out + fmt::format("nrl-train explain {} explains the first one\n", hits[0]->path);
  }
  if (known) *known = false;
  const std::string near = schema.suggest(path);
  return fmt::format("there is no key '{}'{}\n", clipped(path),
                     near.empty() ? "; nrl-train explain lists the sections" : did_you_mean(near, "; "));
}

std::string config_markdown() {
  using namespace config_detail;
  const Schema& schema = Schema::get();
  std::string out =
      "# Configuration reference\n\n"
      "Generated from the option table (`core/config/{schema_*,other_keys}.cpp`); a test compares this page "
      "with it.\n"
      "Any key can be given on the command line too: `nrl-train CONFIG.yaml section.key=value`.\n"
      "`nrl-train explain KEY` prints one entry.\n\n"
      "- `defaults: base.yaml` (or a list) inherits from other files, relative to the file; later ones win,\n"
      "  the file itself last.\n"
      "- `${section.key}` as a whole value is replaced by the value of that key.\n"
      "- Integers are decimal. Where *sizes* is noted, k, M, B (1000) and KiB, MiB, GiB (1024) are "
      "accepted.\n"
      "- Unknown keys, duplicate keys, anchors, aliases and tags are errors. Booleans are `true` and "
      "`false`.\n"
      "- Keys that are not supported yet, and keys of other programs, have tables at the end of this page.\n"
      "- `policy.dtensor_cfg` and `policy.megatron_cfg` are not read where they say `enabled: false`, as in "
      "NeMo "
      "RL.\n"
      "- *Only with* says what another value than the default needs to have an effect. Without that the key "
      "is\n"
      "  rejected. It is ignored with a warning where the file turns off what it needs (`enabled: false`), "
      "as\n"
      "  files for NeMo RL and Megatron-LM do that hold the settings of features that are off, and silently\n"
      "  where the command line turns it off.\n";
  std::string heading;  // of a section none of whose keys has been written
  const std::string table = "\n| key | value | default | meaning |\n|---|---|---|---|\n";
  const auto row = [&](const Key& key, const std::string& name) {
    std::string meaning = key.help;
    for (const Need& need : key.needs)
      meaning += fmt::format(" *Only with* `{}`.", text_of(need, key.section()));
    if (key.size_ok) meaning += " *Sizes.*";
    if (key.built && !key.choices.built.empty()) meaning += " " + status_text(key) + ".";
    if (!key.aliases.empty()) meaning += " Also as `" + aliases_text(key, "`, `") + "`.";
    const std::string fallback = key.default_yaml();
    out += fmt::format("| `{}` | {} | {} | {} |\n", name, markdown_cell(key.type_text()),
                       fallback.empty() ? "" : "`" + markdown_cell(fallback) + "`", markdown_cell(meaning));
  };
  const auto on_key = [&](const Key& key) {
    if (!key.built) return;
    out += heading;
    heading.clear();
    row(key, key.leaf());
  };
  const auto on_section = [&](const std::string& section) {
    heading = fmt::format("\n## {}\n", section);
    if (const std::string_view help = schema.section_help(section); !help.empty())
      heading += fmt::format("\n{}\n", help);
    heading += table;
  };
  heading = "\n## Top level\n" + table;
  walk("", on_section, on_key);
  out += "\n## Keys that are not supported yet\n\nOnly the default is accepted.\n" + table;
  walk(
      "", [](const std::string&) {},
      [&](const Key& key) {
        if (!key.built) row(key, key.path);
      });
  out +=
      "\n## Keys of other programs\n\nThese keys and sections are refused, unless their value asks for "
      "nothing: "
      "null, an\nempty list or section, a section with `enabled: false`, or a value given here.\n\n| key | "
      "instead |\n|---|---|\n";
  for (const auto& [path, foreign] : schema.foreign())
    out += fmt::format("| `{}` | {}{} |\n", path, markdown_cell(foreign.advice),
                       foreign.idle.empty() ? "" : fmt::format(" (`{}` is skipped)", foreign.idle));
  return out;
}

}  // namespace nrl

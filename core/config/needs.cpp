#include "core/config/needs.h"

#include <algorithm>
#include <utility>

#include <spdlog/fmt/ranges.h>

#include "core/config/load.h"
#include "core/config/rule.h"
#include "core/config/source.h"

namespace nrl::config_detail {
namespace {

bool contains(const std::vector<std::string>& values, const std::string& value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

/// True if the value of a key that was given is from the command line.
bool on_command_line(const ConfigResult& result, std::string_view key) {
  const auto source = static_cast<size_t>(result.origins.at(std::string(key)).source);
  return result.sources->all[source].is_override;
}

class NeedsCheck {
 public:
  explicit NeedsCheck(const ConfigResult& result) : result_(result) {}

  IdleKeys run() {
    for (const Key& key : Schema::get().keys())
      if (asks(key) && result_.sound(key.path))
        if (const Need* need = missing(key)) judge(key, *need);
    for (const auto& [need, keys] : parked_) {
      warn(need, keys);
      out_.parked.insert(out_.parked.end(), keys.begin(), keys.end());
    }
    return std::move(out_);
  }

 private:
  std::string value(const Key& key) const { return yaml_text(key.get(result_.config)); }

  /// Whether the key has a value that asks for something.
  bool asks(const Key& key) const {
    return !key.needs.empty() && result_.given(key.path) && value(key) != key.default_yaml() &&
           !contains(key.idle, value(key));
  }

  /// The need with the names of its keys (full_name()).
  Need named(Need need) const {
    for (Condition& condition : need) condition.key = full_name(result_.config, condition.key);
    return need;
  }

  /// The need that the key lacks, or that a key lacks that it needs; null: nothing, or it is not known
  /// because of another error.
  const Need* missing(const Key& key) const {
    for (const Need& need : key.needs) {
      const Need* lacks = &need;
      for (const Condition& condition : need) {
        const std::string name = full_name(result_.config, condition.key);
        if (!result_.sound(name)) return nullptr;
        if (!condition.holds(result_.config)) continue;
        const Key& other = *Schema::get().find(name);
        lacks = asks(other) ? missing(other) : nullptr;
        if (!lacks) break;
      }
      if (lacks) return lacks;
    }
    return nullptr;
  }

  void judge(const Key& key, const Need& lacks) {
    const Need need = named(lacks);
    std::vector<std::string> others;
    for (const Condition& condition : need) others.push_back(condition.key);
    std::vector<std::string> notes = values_of(need, false);
    notes.push_back(fmt::format("Fix: remove it, or set {}", text_of(need)));
    Diagnostic problem = without_effect(
        result_, key.path,
        fmt::format("{}: {} has no effect without {}", key.path, value(key), text_of(need)), others, notes);
    if (problem.severity == Severity::error) {
      out_.problems.push_back(std::move(problem));
      return;
    }
    const auto same = std::find_if(parked_.begin(), parked_.end(),
                                   [&](const auto& entry) { return text_of(entry.first) == text_of(need); });
    if (same == parked_.end())
      parked_.push_back({need, {&key}});
    else
      same->second.push_back(&key);
  }

  void warn(const Need& need, const std::vector<const Key*>& keys) {
    std::vector<std::string> names;
    for (const Key* key : keys)
      if (!turned_off_later(need, *key)) names.push_back(key->path);
    if (names.empty()) return;
    out_.problems.push_back(diagnose(result_, names.front(),
                                     fmt::format("{} {} no effect without {}", fmt::join(names, ", "),
                                                 names.size() == 1 ? "has" : "have", text_of(need)),
                                     "", values_of(need, true), Severity::warning));
  }

  /// Whether the command line turned off what a key of the file needs, which says enough.
  bool turned_off_later(const Need& need, const Key& key) const {
    return !on_command_line(result_, key.path) &&
           std::any_of(need.begin(), need.end(), [&](const Condition& c) {
             return result_.given(c.key) && on_command_line(result_, c.key);
           });
  }

  /// The present values of what is needed, for notes; `given`: only those that were given.
  std::vector<std::string> values_of(const Need& need, bool given) const {
    std::vector<std::string> out;
    for (const Condition& condition : need)
      if (!given || result_.given(condition.key))
        out.push_back(filled_in(result_, fmt::format("<={}>", condition.key)));
    return out;
  }

  const ConfigResult& result_;
  IdleKeys out_;
  std::vector<std::pair<Need, std::vector<const Key*>>> parked_;  ///< keys by what they lack
};

}  // namespace

std::string full_name(const Config& config, const std::string& key) {
  constexpr std::string_view loop = "loop.";
  return key.starts_with(loop) ? loop_key(config, key.substr(loop.size())) : key;
}

bool Condition::holds(const Config& config) const {
  const Value value = Schema::get().find(full_name(config, key))->get(config);
  const auto listed = [&](const Value& v) { return contains(values, yaml_text(v)); };
  const auto* list = std::get_if<List>(&value.v);
  return is == (listed(value) || (list && std::any_of(list->begin(), list->end(), listed)));
}

std::string Condition::text(std::string_view section) const {
  const std::string prefix = std::string(section) + ".";
  const std::string name = key.starts_with(prefix) && key.find('.', prefix.size()) == std::string::npos
                               ? key.substr(prefix.size())
                               : key;
  if (key.starts_with("loop."))
    return Condition{.key = "the loop's " + key.substr(5), .is = is, .values = values, .phrase = phrase}
        .text();
  if (is) return fmt::format("{}: {}", name, fmt::join(values, " or "));
  return phrase.empty() ? name : name + " " + phrase;
}

std::string text_of(const Need& need, std::string_view section) {
  std::string out;
  for (size_t i = 0; i < need.size(); ++i)
    out += (i == 0 ? "" : i + 1 == need.size() ? " or " : ", ") + need[i].text(section);
  return out;
}

IdleKeys idle_keys(const ConfigResult& result) {
  return NeedsCheck(result).run();
}

}  // namespace nrl::config_detail

namespace nrl {

Diagnostic without_effect(const ConfigResult& result, std::string_view key, std::string message,
                          std::span<const std::string> others, std::vector<std::string> notes) {
  const auto on_command_line = [&](std::string_view k) { return config_detail::on_command_line(result, k); };
  const bool parked = std::any_of(others.begin(), others.end(), [&](const std::string& other) {
    return result.given(other) && result.given(key) && (on_command_line(other) || !on_command_line(key));
  });
  return diagnose(result, key, std::move(message), "", std::move(notes),
                  parked ? Severity::warning : Severity::error);
}

}  // namespace nrl

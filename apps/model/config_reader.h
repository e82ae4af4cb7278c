#pragma once
// Reads the keys of a config.json and collects what is wrong with them.

#include <initializer_list>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/model/config_problems.h"
#include "core/io/json.h"

namespace nrl::model {

/// The problems found so far. Reading continues behind a problem with a usable value, so that all independent
/// ones are found; a check of several keys must run only if all of them are good.
class ConfigProblems {
 public:
  /// One problem per key: a second one would only repeat the first in other words.
  void add(std::string key, std::vector<std::string> depends, std::string text);
  bool good(std::initializer_list<std::string_view> keys) const;
  std::vector<ModelProblem>& all() { return all_; }

  /// The keys that this model's family looks at.
  void note_read(std::string key) { read_.insert(std::move(key)); }
  bool was_read(const std::string& key) const { return read_.contains(key); }

 private:
  std::vector<ModelProblem> all_;
  std::set<std::string> read_;
};

/// Reads one object of a config.json. A null value is read as a missing key.
class ConfigReader {
 public:
  ConfigReader(const JsonValue& json, ConfigProblems& problems, std::string prefix = "")
      : json_(json), problems_(problems), prefix_(std::move(prefix)) {}

  template <class... Args>
  void refuse(std::string_view key, fmt::format_string<Args...> text, Args&&... args) const {
    problems_.add(path(key), {}, fmt::format(text, std::forward<Args>(args)...));
  }
  /// A problem between keys: `key` is the one to look at first.
  template <class... Args>
  void conflict(std::string_view key, std::vector<std::string> depends, fmt::format_string<Args...> text,
                Args&&... args) const {
    problems_.add(path(key), std::move(depends), fmt::format(text, std::forward<Args>(args)...));
  }
  bool good(std::initializer_list<std::string_view> keys) const { return problems_.good(keys); }

  /// A size; `other` is another spelling of its key.
  int64_t size(std::string_view key, std::string_view other = {}) const;
  int64_t size_or(std::string_view key, int64_t fallback, std::string_view other = {}) const;
  /// A finite number of at least 0.
  double number_or(std::string_view key, double fallback) const;
  /// The same, and above 0 also after rounding to float.
  double positive_or(std::string_view key, double fallback) const;
  double required(std::string_view key, std::string_view why) const;
  /// A probability below 1, also after rounding to float.
  float dropout_or(std::string_view key, double fallback) const;
  bool flag_or(std::string_view key, bool fallback) const;
  template <class T, size_t N>
  T choice_or(const std::pair<std::string_view, T> (&table)[N], std::string_view key, T fallback,
              std::string_view other = {}) const {
    const JsonValue* v = given(key, other);
    if (!v) return fallback;
    std::string known;
    for (const auto& [name, result] : table) {
      if (v->is_string() && name == v->as_string()) return result;
      known += (known.empty() ? "" : ", ") + std::string(name);
    }
    const std::string_view written = name(key, other);
    refuse(written, "{} {} is not supported; supported: {}", path(written), shown(*v), known);
    return fallback;
  }

  /// The value of a key that is present and not null.
  const JsonValue* given(std::string_view key, std::string_view other = {}) const;
  /// The value as it stands, null too, without noting the key as read.
  const JsonValue* find(std::string_view key) const { return json_.find(key); }
  void note_read(std::initializer_list<std::string_view> keys) const;

  /// Refuses a key that would change the mathematics unless it has the value that changes nothing.
  void must_be_off(std::string_view key, std::string_view what) const;
  void must_be_on(std::string_view key, std::string_view what) const;

 private:
  std::string path(std::string_view key) const { return prefix_ + std::string(key); }
  /// The spelling that is present, `key` when none is.
  std::string_view name(std::string_view key, std::string_view other) const;
  static std::string shown(const JsonValue& v);
  int64_t positive(std::string_view key, const JsonValue& v) const;
  /// Refuses two spellings of a size with different values.
  void agree(std::string_view key, std::string_view other) const;

  const JsonValue& json_;
  ConfigProblems& problems_;
  std::string prefix_;
};

/// The keys of `json` that nothing has read although they switch something on.
std::vector<std::string> unread_keys(const JsonValue& json, const ConfigProblems& problems);

}  // namespace nrl::model

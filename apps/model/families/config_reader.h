#pragma once
// Reads the keys of a config.json and collects all problems.

#include <initializer_list>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/model/families/config_problems.h"
#include "core/io/json.h"

namespace nrl::model {

/// The problems found so far. Reading continues after a problem with a usable value, so that all independent
/// problems are found. A check that involves several keys must only run if all of them are valid.
class ConfigProblems {
 public:
  /// Keeps only the first problem of a key.
  void add(std::string key, std::vector<std::string> depends, std::string text);
  bool valid(std::initializer_list<std::string_view> keys) const;
  std::vector<ModelProblem>& all() { return all_; }

  /// Records a key that this model family uses.
  void note_read(std::string key) { read_.insert(std::move(key)); }
  /// Takes it back: it was read, but the values of other keys leave it without effect.
  void note_unused(const std::string& key) { read_.erase(key); }
  bool was_read(const std::string& key) const { return read_.contains(key); }

 private:
  std::vector<ModelProblem> all_;
  std::set<std::string> read_;
};

/// Reads one object of a config.json. A null value counts as a missing key.
class ConfigReader {
 public:
  ConfigReader(const JsonValue& json, ConfigProblems& problems, std::string prefix = "")
      : json_(json), problems_(problems), prefix_(std::move(prefix)) {}

  template <class... Args>
  void refuse(std::string_view key, fmt::format_string<Args...> text, Args&&... args) const {
    problems_.add(path(key), {}, fmt::format(text, std::forward<Args>(args)...));
  }
  /// A problem that involves several keys, reported at `key`.
  template <class... Args>
  void conflict(std::string_view key, std::vector<std::string> depends, fmt::format_string<Args...> text,
                Args&&... args) const {
    problems_.add(path(key), std::move(depends), fmt::format(text, std::forward<Args>(args)...));
  }
  bool valid(std::initializer_list<std::string_view> keys) const { return problems_.valid(keys); }

  /// A size; `other` is an alias of its key.
  int64_t size(std::string_view key, std::string_view other = {}) const;
  int64_t size_or(std::string_view key, int64_t fallback, std::string_view other = {}) const;
  /// A finite number >= 0.
  double number_or(std::string_view key, double fallback) const;
  /// A finite number that is > 0 after rounding to float.
  double positive_or(std::string_view key, double fallback) const;
  double required(std::string_view key, std::string_view why) const;
  /// A probability that is < 1 after rounding to float.
  float dropout_or(std::string_view key, double fallback) const;
  bool flag_or(std::string_view key, bool fallback) const;
  template <class T, size_t N>
  T choice_or(const std::pair<std::string_view, T> (&table)[N], std::string_view key, T fallback,
              std::string_view other = {}) const {
    return choice_or<T>(std::span(table), key, fallback, other);
  }
  template <class T>
  T choice_or(std::span<const std::pair<std::string_view, T>> table, std::string_view key, T fallback,
              std::string_view other = {}) const {
    const JsonValue* v = given(key, other);
    if (!v) return fallback;
    std::string known;
    for (const auto& [name, result] : table) {
      if (v->is_string() && name == v->as_string()) return result;
      known += (known.empty() ? "" : ", ") + std::string(name);
    }
    const std::string_view spelling = name(key, other);
    refuse(spelling, "{} {} is not supported; expected one of {}", path(spelling), shown(*v), known);
    return fallback;
  }

  /// The value of a key that is present and not null, else a null pointer.
  const JsonValue* given(std::string_view key, std::string_view other = {}) const;
  /// The value including null, without recording the key as read.
  const JsonValue* find(std::string_view key) const { return json_.find(key); }
  void note_read(std::initializer_list<std::string_view> keys) const;
  void note_unused(std::initializer_list<std::string_view> keys) const;

  /// Refuses an unsupported feature unless its key has the neutral value.
  void must_be_off(std::string_view key, std::string_view what) const;
  void must_be_on(std::string_view key, std::string_view what) const;

 private:
  std::string path(std::string_view key) const { return prefix_ + std::string(key); }
  /// The spelling that is present; `key` when neither is.
  std::string_view name(std::string_view key, std::string_view other) const;
  static std::string shown(const JsonValue& v);
  int64_t positive(std::string_view key, const JsonValue& v) const;
  /// Refuses different values under two spellings of a key.
  void require_equal(std::string_view key, std::string_view other) const;

  const JsonValue& json_;
  ConfigProblems& problems_;
  std::string prefix_;
};

/// The keys of `json` that were not read, although their values ask for something.
std::vector<std::string> unread_keys(const JsonValue& json, const ConfigProblems& problems);

}  // namespace nrl::model

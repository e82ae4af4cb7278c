#pragma once
// The option table: every key once, with all its properties. Internal to core/config. Parser, validator,
// dump, `explain` and the reference page are generated from it.

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/config/config.h"
#include "core/config/resume_rule.h"
#include "core/config/value.h"

namespace nrl::config_detail {

/// The largest number of steps that a key may have.
constexpr double many_steps = 1e12;

enum class Kind { boolean, integer, number, text, choice };

/// An alias of a key. With `if_true`/`if_false` it is a switch that stands for values of the key (an empty
/// text: no value). With `factor`, its value times that of the key `factor`, if that is given, is the key's.
struct Alias {
  std::string path;
  std::string if_true = {};
  std::string if_false = {};
  std::string factor = {};
  bool is_switch() const { return !if_true.empty() || !if_false.empty(); }
};

/// A condition on the value of another key, or, if that is a list, on it ("[]") or any of its elements.
struct Condition {
  std::string key;
  bool is = true;  ///< one of `values`, in canonical YAML; false: none of them
  std::vector<std::string> values;
  std::string phrase = {};  ///< of !is, for messages: "above 1"; empty: any value is meant
  bool holds(const Config& config) const;
  /// "policy.fp8_cfg.enabled: true"; a key of `section` is named without it.
  std::string text(std::string_view section = {}) const;
};
inline Condition is(std::string key, std::vector<std::string> values) {
  return {.key = std::move(key), .values = std::move(values)};
}
inline Condition is_not(std::string key, std::string value, std::string phrase = {}) {
  return {.key = std::move(key), .is = false, .values = {std::move(value)}, .phrase = std::move(phrase)};
}

/// The name of a key: "loop.max_num_steps" is max_num_steps of the configured algorithm's loop.
std::string full_name(const Config& config, const std::string& key);

/// What a key needs to have an effect: any of these conditions.
using Need = std::vector<Condition>;
/// Its conditions, separated by "or".
std::string text_of(const Need& need, std::string_view section = {});

/// The values of a choice.
struct Choices {
  std::vector<std::string_view> names;
  std::vector<Synonym> synonyms;
  std::vector<std::string_view> built;  ///< empty: all of them
  std::vector<Synonym> advice;          ///< values of other programs, and what to do instead
};

struct Key {
  std::string path;
  Kind kind = Kind::text;
  bool is_list = false;  ///< a list of `kind`; a single value is a list of one
  int list_length = 0;   ///< 0: any
  bool null_ok = false;
  bool auto_ok = false;
  bool size_ok = false;      ///< integers with k, M, KiB, ...
  bool comma_ok = false;     ///< "969,30,1" is accepted as a list
  bool single_ok = false;    ///< a list key whose single value is distinct from a list of one (eos_token_id)
  bool power_ok = false;     ///< 2**15
  bool boolean_ok = false;   ///< numbers that may be true or false as well
  bool mappings_ok = false;  ///< a list of texts may have mappings, which become JSON
  /// A text that a list of integers may be given as: returns what is wrong with it. And its name.
  std::function<std::string(std::string_view text, std::vector<int64_t>& values)> from_text;
  std::string text_name;
  bool built = true;
  /// For keys of a model's config.json, which apps/model gets as JSON: the policy with that model.
  PolicyConfig Config::*model = nullptr;
  std::vector<Algorithm> algorithms;  ///< that have this key; empty: all
  std::string algorithm_section;      ///< the section that belongs to these algorithms
  double min = std::numeric_limits<double>::lowest(), max = std::numeric_limits<double>::max();
  bool min_open = false, max_open = false;
  std::string unlimited;  ///< a number of other programs that means null
  std::string words;      ///< further words allowed instead of a number, separated by '|'
  Choices choices;
  std::string help;
  std::vector<Need> needs;        ///< all of them; without one the key has no effect (idle_keys())
  std::vector<std::string> idle;  ///< values, in canonical YAML, that ask for nothing, like the default
  std::vector<Alias> aliases;
  std::string default_text;  ///< of keys without a member
  std::string feature;       ///< of keys that are not built: a switch; they are skipped where it is off
  std::optional<ResumeRule> resume;  ///< unset: as the section says, innermost first; else the default
  std::function<void(Config&, const Value&)> set;
  std::function<Value(const Config&)> get;

  /// Canonical YAML of the default; empty for model keys, which have none.
  std::string default_yaml() const;
  /// The allowed values: "integer from 1, or auto".
  std::string type_text() const;
  /// Sets the type from such a text. Not for texts of `auto`, `words` and the like.
  void set_type(std::string_view text);
  std::string section() const;
  std::string leaf() const;
  bool belongs_to(Algorithm algorithm) const;
};

/// A key or section of another program without a counterpart; `advice` is the fix. A section includes all its
/// keys.
struct Foreign {
  std::string path;
  std::string advice;
  std::string idle = {};  ///< a value that asks for nothing
};

class Table;

class Schema {
 public:
  /// All keys of the program.
  static const Schema& get();
  /// The keys that `fill` declares.
  explicit Schema(const std::function<void(Table&)>& fill);

  const std::vector<Key>& keys() const { return keys_; }
  const Key* find(std::string_view path) const;
  /// A key found by an alias.
  struct Aliased {
    const Key* key = nullptr;
    const Alias* alias = nullptr;
    explicit operator bool() const { return key != nullptr; }
  };
  Aliased find_alias(std::string_view path) const;
  /// The same of an alias that keys of several algorithms have.
  Aliased find_alias(std::string_view path, Algorithm algorithm) const;
  /// The entry of `path`, or of the innermost section of `path` that has one.
  const Foreign* find_foreign(std::string_view path) const;
  const std::map<std::string, Foreign>& foreign() const { return foreign_; }
  /// Whether keys or aliases begin with `path` + ".".
  bool is_section(std::string_view path) const;
  bool is_own_section(std::string_view path) const;
  std::string_view section_help(std::string_view path) const;
  /// Names of the keys and sections directly in a section ("" is the top), in table order.
  std::vector<std::string_view> children(std::string_view section) const;
  /// `path` with a foreign section prefix replaced: policy.hf_config_overrides.x -> policy.model.x.
  static std::string canonical_prefix(std::string path);
  /// The nearest known key for an unknown one: in its own section first, then anywhere;
  /// empty when there is none.
  std::string suggest(std::string_view path) const;

 private:
  friend class Table;
  std::vector<Key> keys_;
  std::map<std::string, std::string, std::less<>> section_help_;
  std::map<std::string, std::vector<Algorithm>> section_algorithms_;
  std::map<std::string, ResumeRule> section_resume_;
  std::unordered_map<std::string, size_t> by_path_;
  /// Key and alias of it; several only if their algorithms differ.
  std::unordered_map<std::string, std::vector<std::pair<size_t, size_t>>> by_alias_;
  std::map<std::string, Foreign> foreign_;
  std::map<std::string, bool, std::less<>> sections_;  ///< value: has keys of our own
  std::map<std::string, std::vector<std::string>, std::less<>> children_;
};

/// Builds a Key with chained calls.
class KeyBuilder {
 public:
  /// Aliases are written as for the section `policy`. In another policy-like section those below `policy.`
  /// move there, and the others, which refer to the policy, are dropped.
  explicit KeyBuilder(Key& key, std::string_view policy = "policy") : key_(&key), policy_(policy) {}
  KeyBuilder& at_least(double v) { return key_->min = v, *this; }
  KeyBuilder& above(double v) { return key_->min = v, key_->min_open = true, *this; }
  KeyBuilder& at_most(double v) { return key_->max = v, *this; }
  KeyBuilder& below(double v) { return key_->max = v, key_->max_open = true, *this; }
  KeyBuilder& size() { return key_->size_ok = true, *this; }
  KeyBuilder& comma() { return key_->comma_ok = true, *this; }
  KeyBuilder& power() { return key_->power_ok = true, *this; }
  KeyBuilder& nullable() { return key_->null_ok = true, *this; }
  KeyBuilder& automatic() { return key_->auto_ok = true, *this; }
  KeyBuilder& list() { return key_->is_list = true, *this; }
  KeyBuilder& mappings() { return key_->mappings_ok = true, *this; }
  KeyBuilder& or_single() { return key_->is_list = key_->single_ok = true, *this; }
  KeyBuilder& or_text(std::string name,
                      std::function<std::string(std::string_view, std::vector<int64_t>&)> parse) {
    key_->text_name = std::move(name);
    return key_->from_text = std::move(parse), *this;
  }
  KeyBuilder& unlimited(std::string number) { return key_->unlimited = std::move(number), *this; }
  /// A value that other programs have, and what to do instead.
  KeyBuilder& advice(std::string_view value, std::string_view instead) {
    return key_->choices.advice.push_back({value, instead}), *this;
  }
  KeyBuilder& words(std::string w) { return key_->words = std::move(w), *this; }
  /// The values of a choice; of a member with an enumeration: those that the key has.
  KeyBuilder& one_of(std::vector<std::string_view> names);
  /// The values that are supported; the others are rejected as not supported yet.
  KeyBuilder& built(std::vector<std::string_view> names) {
    return key_->choices.built = std::move(names), *this;
  }
  /// The key has no effect without one of these conditions. Keys that a condition names have needs of their
  /// own, which are not repeated here.
  KeyBuilder& only_with(Need any_of);
  /// A value, in canonical YAML, that asks for nothing, so that only_with() does not apply.
  KeyBuilder& idle(std::string value) { return key_->idle.push_back(std::move(value)), *this; }
  KeyBuilder& feature(std::string path) { return key_->feature = std::move(path), *this; }
  KeyBuilder& not_built() { return key_->built = false, *this; }
  /// Keys of different algorithms may share an alias, which then means the key of the configured one.
  KeyBuilder& alias(std::string path) { return on_off(std::move(path), "", ""); }
  KeyBuilder& on_off(std::string path, std::string if_true, std::string if_false);
  /// An alias of the policy whose value is multiplied by that of the key `factor`.
  KeyBuilder& times(std::string path, std::string factor);
  /// The rule for a resumed run that changes the key.
  KeyBuilder& resume(OnResume change, std::string_view consequence = {}) {
    return key_->resume = {.change = change, .consequence = consequence}, *this;
  }
  /// It may if checkpointing.allow_changes has `word`.
  KeyBuilder& resume(ResumeChange word, std::string_view consequence = {}) {
    return key_->resume = {OnResume::needs_word, word, consequence}, *this;
  }
  KeyBuilder& help(std::string text) { return key_->help = std::move(text), *this; }

 private:
  Key* key_;
  std::string policy_;
};

namespace binding {

template <class T>
struct Traits;

template <Kind K, class T, class Stored>
struct Scalar {
  static void describe(Key& key) { key.kind = K; }
  static T from(const Value& v) { return T(std::get<Stored>(v.v)); }
  static Value to(const T& v) { return {Stored(v)}; }
};
template <>
struct Traits<bool> : Scalar<Kind::boolean, bool, bool> {};
template <>
struct Traits<int64_t> : Scalar<Kind::integer, int64_t, int64_t> {
  static void describe(Key& key) {
    key.kind = Kind::integer;
    key.min = std::numeric_limits<int32_t>::min();
    key.max = std::numeric_limits<int32_t>::max();
  }
};
template <>
struct Traits<double> : Scalar<Kind::number, double, double> {};
template <>
struct Traits<std::string> : Scalar<Kind::text, std::string, std::string> {};

template <class E>
requires requires {
  EnumNames<E>::names;
}
struct Traits<E> {
  static void describe(Key& key) {
    key.kind = Kind::choice;
    key.choices.names.assign(std::begin(EnumNames<E>::names), std::end(EnumNames<E>::names));
    for (const Synonym& s : EnumNames<E>::synonyms)
      if (!s.spelling.empty()) key.choices.synonyms.push_back(s);
  }
  static E from(const Value& v) {
    const std::string& text = std::get<std::string>(v.v);
    int i = 0;
    while (EnumNames<E>::names[i] != text) ++i;
    return static_cast<E>(i);
  }
  static Value to(const E& v) { return {std::string(name_of(v))}; }
};

/// "fp32", "bf16", ... in YAML. fp8 is e4m3: with a scale per block it loses half of what e5m2 loses
/// (tests/comm/reducer_test.cpp measures it for gradients).
template <>
struct Traits<DType> {
  struct Name {
    DType dtype;
    std::string_view name;
    std::string_view synonym;
  };
  static constexpr Name all[] = {{DType::f32, "fp32", "float32"},
                                 {DType::bf16, "bf16", "bfloat16"},
                                 {DType::f16, "fp16", "float16"},
                                 {DType::e4m3, "fp8", ""}};
  static void describe(Key& key) {
    key.kind = Kind::choice;
    for (const Name& n : all) {
      key.choices.names.push_back(n.name);
      if (!n.synonym.empty()) key.choices.synonyms.push_back({n.synonym, n.name});
    }
  }
  static DType from(const Value& v) {
    const auto is = [&](const Name& n) { return n.name == std::get<std::string>(v.v); };
    return std::find_if(std::begin(all), std::end(all), is)->dtype;
  }
  static Value to(const DType& v) {
    const auto is = [&](const Name& n) { return n.dtype == v; };
    return {std::string(std::find_if(std::begin(all), std::end(all), is)->name)};
  }
};

/// Text in YAML: "auto", "never", or else a directory.
template <>
struct Traits<ResumeFrom> {
  static void describe(Key& key) { key.kind = Kind::text; }
  static ResumeFrom from(const Value& v) {
    const auto& text = std::get<std::string>(v.v);
    if (text == "auto") return {ResumeMode::automatic};
    if (text == "never") return {ResumeMode::never};
    return {ResumeMode::directory, text};
  }
  static Value to(const ResumeFrom& v) {
    if (v.mode == ResumeMode::directory) return {v.directory};
    return {std::string(v.mode == ResumeMode::never ? "never" : "auto")};
  }
};

/// A number in YAML, or "dynamic".
template <>
struct Traits<LossScaling> {
  static void describe(Key& key) {
    key.kind = Kind::number;
    key.words = "dynamic";
    key.power_ok = true;
  }
  static LossScaling from(const Value& v) {
    if (const auto* number = std::get_if<double>(&v.v)) return {.scale = *number};
    return {.dynamic = true};
  }
  static Value to(const LossScaling& v) { return v.dynamic ? Value{std::string("dynamic")} : Value{v.scale}; }
};

/// true or false in YAML, or a fraction.
template <>
struct Traits<Share> {
  static void describe(Key& key) {
    key.kind = Kind::number;
    key.boolean_ok = true;
    key.min = 0;
    key.max = 1;
  }
  static Share from(const Value& v) {
    if (const auto* all = std::get_if<bool>(&v.v)) return {*all ? 1.0 : 0.0};
    return {std::get<double>(v.v)};
  }
  static Value to(const Share& v) {
    return v.value == 0 || v.value == 1 ? Value{v.value == 1} : Value{v.value};
  }
};

template <class T>
struct Traits<std::vector<T>> {
  static void describe(Key& key) {
    Traits<T>::describe(key);
    key.is_list = true;
  }
  static std::vector<T> from(const Value& v) {
    std::vector<T> out;
    for (const Value& item : std::get<List>(v.v)) out.push_back(Traits<T>::from(item));
    return out;
  }
  static Value to(const std::vector<T>& v) {
    List out;
    for (const T& item : v) out.push_back(Traits<T>::to(item));
    return {std::move(out)};
  }
};

template <class T, size_t N>
struct Traits<std::array<T, N>> {
  static void describe(Key& key) {
    Traits<T>::describe(key);
    key.is_list = true;
    key.list_length = static_cast<int>(N);
  }
  static std::array<T, N> from(const Value& v) {
    std::array<T, N> out{};
    for (size_t i = 0; i < N; ++i) out[i] = Traits<T>::from(std::get<List>(v.v)[i]);
    return out;
  }
  static Value to(const std::array<T, N>& v) { return Traits<std::vector<T>>::to({v.begin(), v.end()}); }
};

template <class T>
struct Traits<std::optional<T>> {
  static void describe(Key& key) {
    Traits<T>::describe(key);
    key.null_ok = true;
  }
  static std::optional<T> from(const Value& v) {
    if (std::holds_alternative<Null>(v.v)) return std::nullopt;
    return Traits<T>::from(v);
  }
  static Value to(const std::optional<T>& v) { return v ? Traits<T>::to(*v) : Value{Null{}}; }
};

template <class T>
struct Traits<AutoOr<T>> {
  static void describe(Key& key) {
    Traits<T>::describe(key);
    key.auto_ok = true;
  }
  static AutoOr<T> from(const Value& v) {
    if (std::holds_alternative<Auto>(v.v)) return {};
    return Traits<T>::from(v);
  }
  static Value to(const AutoOr<T>& v) { return v.is_auto() ? Value{Auto{}} : Traits<T>::to(v.value()); }
};

}  // namespace binding

/// Filled by the schema_*.cpp files.
class Table {
 public:
  explicit Table(Schema& schema) : schema_(schema) {}

  /// A key bound to a member; type, `auto`, `null` and default come from the member.
  template <class F>
  KeyBuilder key(std::string path, F member) {
    return KeyBuilder(bind(std::move(path), member));
  }
  /// A known key whose feature is not built yet: only its default is accepted. `type`: as Key::type_text().
  KeyBuilder planned(std::string path, std::string_view type, std::string default_text);
  /// With algorithms: all keys of the section are errors under any other algorithm.
  void section(std::string path, std::string help, std::vector<Algorithm> algorithms = {});
  /// The rule for keys of the section that have none of their own.
  void resume(std::string section, OnResume change) { schema_.section_resume_[section] = {.change = change}; }
  void foreign(std::string path, std::string advice, std::string idle = "");

 private:
  friend class PolicyTable;
  template <class F>
  Key& bind(std::string path, F member) {
    using T = std::remove_cvref_t<decltype(member(std::declval<Config&>()))>;
    Key& key = add(std::move(path));
    binding::Traits<T>::describe(key);
    key.set = [member](Config& c, const Value& v) { member(c) = binding::Traits<T>::from(v); };
    key.get = [member](const Config& c) { return binding::Traits<T>::to(member(c)); };
    return key;
  }
  Key& add(std::string path);
  Schema& schema_;
};

/// The same for a policy-like section: paths are relative to it, members to its PolicyConfig.
class PolicyTable {
 public:
  PolicyTable(Table& table, std::string section, PolicyConfig Config::*member)
      : table_(table), section_(std::move(section)), member_(member) {}

  template <class F>
  KeyBuilder key(std::string_view path, F member) {
    Key& key = table_.bind(
        full(path), [ member, policy = member_ ](auto& c) -> auto& { return member(c.*policy); });
    return KeyBuilder(key, section_);
  }
  /// A key of the model's config.json.
  KeyBuilder model(std::string_view name, Kind kind);
  /// The same of one that changes the mathematics, but no shape: a resumed run may change it if it is
  /// allowed.
  KeyBuilder formula(std::string_view name, Kind kind) {
    return model(name, kind).resume(ResumeChange::model);
  }
  void section(std::string_view path, std::string help) { table_.section(full(path), std::move(help)); }
  void resume(std::string_view section, OnResume change) { table_.resume(full(section), change); }

 private:
  std::string full(std::string_view path) const {
    return path.empty() ? section_ : section_ + "." + std::string(path);
  }
  Table& table_;
  const std::string section_;
  PolicyConfig Config::*const member_;
};

// NRL_KEY(table, a.b): the key "a.b" bound to Config::a.b.
#define NRL_KEY(table, member) \
  table.key(                   \
      #member, [](auto& c) -> auto& { return c.member; })

/// Any evaluation during the run.
Need evaluates();
/// Algorithms that train on examples (trains_on_examples()), that read records of a prompt and a completion,
/// and that train on token files.
Need on_examples();
Need on_prompts();
Need on_tokens();

void add_top_keys(Table& table);
void add_run_keys(Table& table);
/// The loop of an algorithm.
void add_loop(Table& table, Algorithm algorithm, LoopConfig Config::*loop);
/// Rollouts that a policy generates.
void add_rollout_keys(Table& t);
/// Algorithms dpo, rm and grpo, and their losses.
void add_objective_keys(Table& table);
void add_distributed_keys(Table& table);
/// The keys of the policy-like section `section`, stored in `member`.
void add_policy_keys(Table& table, const std::string& section, PolicyConfig Config::*member);
void add_model_keys(PolicyTable& table);
void add_adapter_keys(PolicyTable& table);
void add_data_keys(Table& table);
/// Keys that are not built yet, and keys of other trainers.
void add_reliability_keys(Table& table);
void add_other_keys(Table& table);

}  // namespace nrl::config_detail

#include "apps/model/families/config_reader.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/base/text.h"

namespace nrl::model {
namespace {

// Whether a value leaves a feature off.
bool is_neutral(const JsonValue& v) {
  return v.is_null() || (v.is_bool() && !v.as_bool()) || (v.is_number() && v.as_double() == 0) ||
         (v.is_array() && v.items().empty());
}

// Defaults of Megatron-LM's keys of experts, which its files have for every model.
bool is_default(const JsonMember& m) {
  static constexpr std::pair<std::string_view, std::string_view> defaults[] = {
      {"moe_router_load_balancing_type", "\"none\""}, {"moe_router_load_balancing_type", "\"aux_loss\""},
      {"moe_token_dispatcher_type", "\"alltoall\""},  {"moe_router_score_function", "\"softmax\""},
      {"moe_token_drop_policy", "\"probs\""},         {"moe_router_bias_update_rate", "0.001"}};
  return std::ranges::find(defaults, std::pair<std::string_view, std::string_view>(m.key, m.value.dump())) !=
         std::end(defaults);
}

}  // namespace

void ConfigProblems::add(std::string key, std::vector<std::string> depends, std::string text) {
  for (const ModelProblem& p : all_)
    if (!key.empty() && p.key == key) return;
  if (!key.empty()) depends.push_back(key);
  all_.push_back({std::move(key), std::move(text), std::move(depends)});
}

bool ConfigProblems::valid(std::initializer_list<std::string_view> keys) const {
  for (const ModelProblem& p : all_)
    for (std::string_view key : keys)
      if (std::find(p.depends.begin(), p.depends.end(), key) != p.depends.end()) return false;
  return true;
}

int64_t ConfigReader::size(std::string_view key, std::string_view other) const {
  require_equal(key, other);
  if (const JsonValue* v = given(key, other)) return positive(name(key, other), *v);
  std::vector<std::string> depends;
  if (!other.empty()) depends.push_back(path(other));
  problems_.add(path(key), std::move(depends), fmt::format("{} is missing: every model needs it", path(key)));
  return 1;
}

int64_t ConfigReader::size_or(std::string_view key, int64_t fallback, std::string_view other) const {
  require_equal(key, other);
  const JsonValue* v = given(key, other);
  return v ? positive(name(key, other), *v) : fallback;
}

double ConfigReader::number_or(std::string_view key, double fallback) const {
  const JsonValue* v = given(key);
  if (!v) return fallback;
  if (v->is_number() && v->as_double() >= 0 && std::isfinite(v->as_double())) return v->as_double();
  refuse(key, "{} must be a finite number of at least 0, found {}", path(key), shown(*v));
  return fallback;
}

double ConfigReader::positive_or(std::string_view key, double fallback) const {
  const double x = number_or(key, fallback);
  if (static_cast<float>(x) > 0 && std::isfinite(static_cast<float>(x))) return x;
  refuse(key, "{} must be a finite number above 0, found {}", path(key), shown(*given(key)));
  return fallback;
}

double ConfigReader::required(std::string_view key, std::string_view why) const {
  if (given(key)) return positive_or(key, 1);
  refuse(key, "{} is missing: {} needs it", path(key), why);
  return 1;
}

float ConfigReader::dropout_or(std::string_view key, double fallback) const {
  const double p = number_or(key, fallback);
  if (static_cast<float>(p) < 1) return static_cast<float>(p);
  refuse(key, "{} must be at least 0 and below 1, found {}", path(key), p);
  return 0;
}

bool ConfigReader::flag_or(std::string_view key, bool fallback) const {
  const JsonValue* v = given(key);
  if (!v || v->is_bool()) return v ? v->as_bool() : fallback;
  refuse(key, "{} must be true or false, found {}", path(key), shown(*v));
  return fallback;
}

const JsonValue* ConfigReader::given(std::string_view key, std::string_view other) const {
  problems_.note_read(path(key));
  if (!other.empty()) problems_.note_read(path(other));
  const JsonValue* v = json_.find(name(key, other));
  return v && !v->is_null() ? v : nullptr;
}

void ConfigReader::note_read(std::initializer_list<std::string_view> keys) const {
  for (std::string_view key : keys) problems_.note_read(path(key));
}

void ConfigReader::note_unused(std::initializer_list<std::string_view> keys) const {
  for (std::string_view key : keys) problems_.note_unused(path(key));
}

void ConfigReader::must_be_off(std::string_view key, std::string_view what) const {
  if (const JsonValue* v = given(key); v && !is_neutral(*v))
    refuse(key, "{}: {} is not supported", path(key), what);
}

void ConfigReader::must_be_on(std::string_view key, std::string_view what) const {
  if (!flag_or(key, true)) refuse(key, "{}: {} is not supported", path(key), what);
}

void ConfigReader::require_equal(std::string_view key, std::string_view other) const {
  const JsonValue *a = given(key), *b = other.empty() ? nullptr : given(other);
  if (a && b && a->dump() != b->dump())
    conflict(other, {path(key)},
             "{} ({}) and {} ({}) are aliases with different values. Fix: set only one of them", path(other),
             shown(*b), path(key), shown(*a));
}

std::string_view ConfigReader::name(std::string_view key, std::string_view other) const {
  const auto present = [&](std::string_view k) {
    const JsonValue* v = k.empty() ? nullptr : json_.find(k);
    return v && !v->is_null();
  };
  return !present(key) && present(other) ? other : key;
}

std::string ConfigReader::shown(const JsonValue& v) {
  if (v.is_array() || v.is_object()) return std::string(v.kind());
  return v.is_string() ? fmt::format("'{}'", clipped(v.as_string(), 60)) : v.dump();
}

int64_t ConfigReader::positive(std::string_view key, const JsonValue& v) const {
  // With these bounds no product of two sizes can overflow.
  const int64_t limit = key == "num_hidden_layers" || key == "n_layer" ? 4096
                        : key == "hidden_size" || key == "n_embd"      ? 1 << 20
                                                                       : 1 << 24;
  if (!v.is_integer()) {
    refuse(key, "{} must be an integer, found {}", path(key), shown(v));
  } else if (const double n = v.as_double(); n >= 1 && n <= static_cast<double>(limit)) {
    return v.as_int();
  } else {
    refuse(key, "{} must be between 1 and {}, found {}", path(key), limit, shown(v));
  }
  return 1;
}

std::vector<std::string> unread_keys(const JsonValue& json, const ConfigProblems& problems) {
  static constexpr std::string_view informative[] = {
      "architectures", "use_cache", "pretraining_tp", "transformers_version",
      "torch_dtype",   "dtype",     "bos_token_id",   "eos_token_id",
      "pad_token_id",  "id2label",  "label2id",       "problem_type"};
  std::vector<std::string> unread;
  for (const JsonMember& member : json.members()) {
    if (std::ranges::find(informative, member.key) != std::end(informative)) continue;
    if (!member.value.is_object()) {
      if (!is_neutral(member.value) && !is_default(member) && !problems.was_read(member.key))
        unread.push_back(member.key);
      continue;
    }
    for (const JsonMember& inner :
         member.value.members())  // rope_scaling and rope_parameters have the same keys
      if (!is_neutral(inner.value) && !problems.was_read("rope_scaling." + inner.key) &&
          !problems.was_read("rope_parameters." + inner.key))
        unread.push_back(member.key + "." + inner.key);
  }
  return unread;
}

}  // namespace nrl::model

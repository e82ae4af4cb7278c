#include "apps/reward/spec.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <string_view>
#include <utility>

#include "core/base/error.h"
#include "core/base/text.h"

namespace nrl::reward {
namespace {

enum class Is { text, texts, number, positive, count, flag, object };

struct Option {
  std::string_view name;
  Is is;
  bool required = false;
};

struct Type {
  std::string_view name;
  std::vector<Option> options;
};

const Option answer_key{"answer_key", Is::text}, extract{"extract", Is::text},
    ignore_case{"ignore_case", Is::flag};

const std::vector<Type>& types() {
  static const std::vector<Type> all = {
      {"exact", {answer_key, extract, ignore_case}},
      {"contains", {answer_key, extract, ignore_case}},
      {"regex", {{"pattern", Is::text, true}, extract}},
      {"number", {answer_key, extract, {"tolerance", Is::positive}}},
      {"math", {answer_key, extract}},
      {"multiset", {answer_key, extract}},
      {"format", {{"tags", Is::texts, true}}},
      {"length", {{"max_tokens", Is::count, true}, {"buffer_tokens", Is::count, true}}},
      {"json", {extract, {"schema", Is::object}}},
      {"command",
       {{"command", Is::text, true},
        {"workers", Is::count},
        {"time_limit_s", Is::positive},
        {"memory_mib", Is::count},
        {"network", Is::flag}}},
      {"http",
       {{"url", Is::text, true},
        {"batch", Is::count},
        {"workers", Is::count},
        {"retries", Is::count},
        {"time_limit_s", Is::positive}}},
  };
  return all;
}

template <class Range>
[[noreturn]] void unknown(const std::string& where, std::string_view what, std::string_view given,
                          const Range& names) {
  fail(Exit::config, "{}: there is no {} '{}'. Fix: {}", where, what, clipped(given, 60),
       alternatives(names));
}

void check(const Spec& spec, const Option& option, const JsonValue& value) {
  const auto wrong = [&](std::string_view expected) {
    fail(Exit::config, "{}.{}: expected {}, found {}", spec.where, option.name, expected, value.kind());
  };
  const auto number = [&] { return value.is_number() ? value.as_double() : NAN; };
  switch (option.is) {
    case Is::text:
      if (!value.is_string() || value.as_string().empty()) wrong("a text");
      return;
    case Is::texts:
      if (!value.is_array() || value.items().empty() ||
          !std::ranges::all_of(value.items(), [](const JsonValue& v) { return v.is_string(); }))
        wrong("a list of texts");
      return;
    case Is::number:
      if (!std::isfinite(number())) wrong("a number");
      return;
    case Is::positive:
      if (!(number() > 0)) wrong("a number above 0");
      return;
    case Is::count:
      if (!value.is_integer() || value.as_int() < 1 || value.as_int() > (int64_t{1} << 30))
        wrong("an integer from 1");
      return;
    case Is::flag:
      if (!value.is_bool()) wrong("true or false");
      return;
    case Is::object:
      if (!value.is_object()) wrong("a mapping");
      return;
  }
}

Spec parse(const std::string& text, size_t index) {
  Spec spec{
      .where = fmt::format("reward[{}]", index), .type = {}, .name = {}, .options = JsonValue::object()};
  JsonValue value =
      text.starts_with('{') ? parse_json(text, spec.where) : JsonValue::object({{"type", text}});
  const auto member = [&](std::string_view key) -> JsonValue {
    const JsonValue* found = value.find(key);
    return found ? *found : JsonValue();
  };
  std::vector<std::string_view> names;
  for (const Type& type : types()) names.push_back(type.name);
  const JsonValue type_name = member("type");
  if (!type_name.is_string())
    fail(Exit::config, "{}.type is missing. Fix: {}", spec.where, alternatives(names));
  spec.type = type_name.as_string();
  if (spec.type == "model")
    fail(Exit::config,
         "{}.type: model: a reward model beside the policy is not supported yet. Fix: type: http or command, "
         "with a program that runs the directory which algorithm: rm wrote, in transformers "
         "AutoModelForSequenceClassification",
         spec.where);
  const auto type = std::ranges::find(types(), spec.type, &Type::name);
  if (type == types().end()) unknown(spec.where + ".type", "type", spec.type, names);
  spec.name = spec.type;
  if (const JsonValue name = member("name"); !name.is_null()) {
    check(spec, {"name", Is::text}, name);
    spec.name = name.as_string();
    if (spec.name.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_") !=
        std::string::npos)
      fail(Exit::config, "{}.name: '{}' has other characters than letters, digits and '_'", spec.where,
           clipped(spec.name, 60));
  }
  if (const JsonValue weight = member("weight"); !weight.is_null()) {
    check(spec, {"weight", Is::number}, weight);
    spec.weight = weight.as_double();
  }
  std::vector<std::string_view> options = {"type", "name", "weight"};
  for (const Option& option : type->options) options.push_back(option.name);
  for (const JsonMember& given : value.members()) {
    if (std::ranges::find(options, given.key) == options.end())
      unknown(spec.where, fmt::format("option of type {},", spec.type), given.key, options);
    const auto option = std::ranges::find(type->options, given.key, &Option::name);
    if (option == type->options.end()) continue;
    check(spec, *option, given.value);
    spec.options.set(given.key, given.value);
  }
  for (const Option& option : type->options)
    if (option.required && !spec.options.contains(option.name))
      fail(Exit::config, "{}: type {} needs {}", spec.where, spec.type, option.name);
  return spec;
}

}  // namespace

std::vector<Spec> parse_specs(const std::vector<std::string>& texts) {
  std::vector<Spec> specs;
  std::set<std::string> names;
  for (size_t i = 0; i < texts.size(); ++i) {
    specs.push_back(parse(texts[i], i));
    if (!names.insert(specs.back().name).second)
      fail(Exit::config, "reward[{}].name: '{}' is the name of another entry. Fix: give both names", i,
           specs.back().name);
  }
  return specs;
}

}  // namespace nrl::reward

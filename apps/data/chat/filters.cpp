#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/data/chat/builtins.h"
#include "apps/data/chat/builtins_internal.h"
#include "apps/data/chat/machine.h"
#include "apps/data/chat/print.h"
#include "apps/data/chat/text.h"
#include "apps/data/unicode.h"
#include "core/base/error.h"

namespace nrl::data::chat {
namespace {

std::optional<std::string_view> text_if(const Value* value) {
  return value && value->is(Kind::string) ? std::optional(value->text()) : std::nullopt;
}

/// The subject of a filter of texts as a string.
Value subject_text(Machine& machine, const Value& subject) {
  return subject.is(Kind::string) ? subject : Value::of(machine.string_of(subject));
}

Value missing_item(Machine& machine, std::string_view text) {
  return Value::undefined(machine.arena.make(Missing{Missing::What::text, {}, Value::of(text)}));
}

/// The items for filters that take any false value for an empty list.
Items items_or_none(Machine& machine, const Value& subject) {
  return truth(subject) ? machine.iterate(subject) : Items();
}

/// The value at a path such as "function.name" or "0".
Value value_at(Machine& machine, Value value, const Value& path) {
  if (!path.is(Kind::string)) return machine.item(value, path);
  for (const std::string_view part : split(path.text(), ".", -1, false)) {
    int64_t index = 0;
    const auto result = std::from_chars(part.data(), part.data() + part.size(), index);
    const bool is_index =
        !part.empty() && part[0] != '-' && result.ec == std::errc() && result.ptr == part.end();
    value = machine.item(value, is_index ? Value::of(index) : Value::of(part));
  }
  return value;
}

/// The value by which sort and unique compare.
Value sort_key(Machine& machine, const Value& value, bool case_sensitive) {
  return value.is(Kind::string) && !case_sensitive ? machine.text(to_lower(value.text())) : value;
}

void sort_by_key(Machine& machine, std::vector<std::pair<Value, Value>>& keyed, bool reverse) {
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    // Python keeps the order of equal elements in a reversed sort, too.
    const auto& [low, high] = reverse ? std::tie(b, a) : std::tie(a, b);
    if (low.first.is(Kind::undefined)) machine.error(missing_text(low.first));
    if (high.first.is(Kind::undefined)) machine.error(missing_text(high.first));
    return order(low.first, high.first, "<", machine.budget) < 0;
  });
}

Value values_of(Machine& machine, const std::vector<std::pair<Value, Value>>& keyed) {
  std::vector<Value> values;
  for (const auto& [key, value] : keyed) values.push_back(value);
  return machine.list(values);
}

Value sorted(Machine& machine, const Value& subject, const Arguments& arguments) {
  const auto [reverse, case_sensitive, attribute] =
      bind<3>("sort", arguments, 0, {"reverse", "case_sensitive", "attribute"});
  const bool exact = case_sensitive && truth(*case_sensitive);
  const Items items = machine.iterate(subject);
  std::vector<std::pair<Value, Value>> keyed;
  for (size_t i = 0; i < items.size; ++i) {
    std::vector<Value> keys;
    if (const auto paths = text_if(attribute)) {
      for (const std::string_view path : split(*paths, ",", -1, false))
        keys.push_back(sort_key(machine, value_at(machine, items.data[i], Value::of(path)), exact));
    } else {
      const bool plain = !attribute || attribute->is(Kind::none);
      keys.push_back(
          sort_key(machine, plain ? items.data[i] : value_at(machine, items.data[i], *attribute), exact));
    }
    keyed.emplace_back(keys.size() == 1 ? keys[0] : machine.list(keys), items.data[i]);
  }
  sort_by_key(machine, keyed, reverse && truth(*reverse));
  return values_of(machine, keyed);
}

Value dictsorted(Machine& machine, const Value& subject, const Arguments& arguments) {
  const auto [case_sensitive, by, reverse] =
      bind<3>("dictsort", arguments, 0, {"case_sensitive", "by", "reverse"});
  if (subject.is(Kind::undefined)) machine.error(missing_text(subject));
  if (!subject.is(Kind::dict))
    machine.error(fmt::format("'{}' object has no attribute 'items'", type_name(subject)));
  const auto what = text_if(by);
  if (by && (!what || (*what != "key" && *what != "value")))
    machine.error("You can only sort by either \"key\" or \"value\"");
  std::vector<std::pair<Value, Value>> keyed;
  for (size_t i = 0; i < subject.dict->size; ++i) {
    const Entry& entry = subject.dict->entries[i];
    keyed.emplace_back(sort_key(machine, what == "value" ? entry.value : entry.key,
                                case_sensitive && truth(*case_sensitive)),
                       pair_of(machine, entry));
  }
  sort_by_key(machine, keyed, reverse && truth(*reverse));
  return values_of(machine, keyed);
}

Value unique_items(Machine& machine, const Value& subject, const Arguments& arguments) {
  const auto [case_sensitive, attribute] = bind<2>("unique", arguments, 0, {"case_sensitive", "attribute"});
  const Items items = machine.iterate(subject);
  std::vector<Value> keys, values;
  for (size_t i = 0; i < items.size; ++i) {
    const bool plain = !attribute || attribute->is(Kind::none);
    const Value value = plain ? items.data[i] : value_at(machine, items.data[i], *attribute);
    const Value key = sort_key(machine, value, case_sensitive && truth(*case_sensitive));
    if (!hashable(key, machine.budget)) machine.error(fmt::format("unhashable type: '{}'", type_name(key)));
    if (std::any_of(keys.begin(), keys.end(), [&](const Value& k) { return equal(k, key, machine.budget); }))
      continue;
    keys.push_back(key);
    values.push_back(items.data[i]);
  }
  return machine.list(values, Flavor::iterator);
}

Value mapped_items(Machine& machine, const Value& subject, const Arguments& arguments) {
  std::vector<Value> values;
  const Items items = items_or_none(machine, subject);
  if (arguments.size == 0) {
    const auto [attribute, fallback] = bind<2>("map", arguments, 1, {"attribute", "default"});
    for (size_t i = 0; i < items.size; ++i) {
      machine.budget.spend(1);
      const Value value = value_at(machine, items.data[i], *attribute);
      values.push_back(value.is(Kind::undefined) && fallback && truth(*fallback) ? *fallback : value);
    }
  } else {
    const auto name = text_if(arguments.items);
    const auto filter = name ? filter_named(*name) : std::nullopt;
    if (!filter) machine.error(fmt::format("No filter named '{}'.", machine.string_of(arguments.items[0])));
    if (*filter == Filter::map || *filter == Filter::select || *filter == Filter::reject ||
        *filter == Filter::selectattr || *filter == Filter::rejectattr)
      machine.error("map() of a filter of filters is not supported");
    for (size_t i = 0; i < items.size; ++i) {
      machine.budget.spend(1);
      values.push_back(apply_filter(machine, *filter, items.data[i], arguments.without(1)));
    }
  }
  return machine.list(values, Flavor::iterator);
}

/// select, reject and their forms for an attribute.
Value selected(Machine& machine, const Value& subject, Arguments arguments, bool by_attribute, bool wanted) {
  Value path;
  if (by_attribute) {
    if (arguments.size == 0) machine.error("Missing parameter for attribute name");
    path = arguments.items[0];
    arguments = arguments.without(1);
  }
  std::optional<Test> test;
  if (arguments.size > 0) {
    const auto name = text_if(arguments.items);
    test = name ? test_named(*name) : std::nullopt;
    if (!test) machine.error(fmt::format("No test named '{}'.", machine.string_of(arguments.items[0])));
    arguments = arguments.without(1);
  }
  std::vector<Value> values;
  const Items items = items_or_none(machine, subject);
  for (size_t i = 0; i < items.size; ++i) {
    machine.budget.spend(1);
    const Value value = by_attribute ? value_at(machine, items.data[i], path) : items.data[i];
    if ((test ? apply_test(machine, *test, value, arguments) : truth(value)) == wanted)
      values.push_back(items.data[i]);
  }
  return machine.list(values, Flavor::iterator);
}

Value indented(Machine& machine, const Value& subject, const Arguments& arguments) {
  const auto [width, first, blank] = bind<3>("indent", arguments, 0, {"width", "first", "blank"});
  if (subject.is(Kind::undefined)) machine.error(missing_text(subject));
  if (!subject.is(Kind::string))
    machine.error(fmt::format("unsupported operand type(s) for +=: '{}' and 'str'", type_name(subject)));
  std::string indention(4, ' ');
  if (const auto text = text_if(width)) {
    indention = *text;
  } else if (width) {
    const int64_t spaces = std::max<int64_t>(0, machine.index_of(*width));
    check_text(static_cast<size_t>(spaces));
    indention.assign(static_cast<size_t>(spaces), ' ');
  }
  machine.budget.spend(most_breaks(subject.text()));
  const std::string source = std::string(subject.text()) + '\n';
  const std::vector<std::string_view> lines = split_lines(source, false);
  const bool all = blank && truth(*blank);
  std::string result;
  if (first && truth(*first)) result += indention;
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) {
      result += '\n';
      if (all || !lines[i].empty()) result += indention;
    }
    result += lines[i];
    check_text(result.size());
  }
  return machine.text(result, subject.safe);
}

Value joined(Machine& machine, const Value& subject, const Arguments& arguments) {
  const auto [separator, attribute] = bind<2>("join", arguments, 0, {"d", "attribute"});
  const std::string_view between = separator ? machine.string_of(*separator) : std::string_view();
  const Items items = machine.iterate(subject);
  std::string result;
  for (size_t i = 0; i < items.size; ++i) {
    if (i > 0) result += between;
    const bool plain = !attribute || attribute->is(Kind::none);
    print(result, plain ? items.data[i] : value_at(machine, items.data[i], *attribute));
    machine.budget.spend(1);
  }
  return machine.text(result);
}

Value length_of(Machine& machine, const Value& subject) {
  const auto whole = [](size_t n) { return Value::of(static_cast<int64_t>(n)); };
  switch (subject.kind) {
    case Kind::undefined:
      return whole(0);
    case Kind::string:
      machine.budget.spend_bytes(subject.size);
      return whole(code_points(subject.text()));
    case Kind::dict:
      return whole(subject.dict->size);
    case Kind::list:
      if (subject.list->flavor != Flavor::iterator) return whole(subject.list->size);
      break;
    default:
      break;
  }
  machine.error(fmt::format("object of type '{}' has no len()", type_name(subject)));
}

Value last_of(Machine& machine, const Value& subject) {
  const bool reversible = subject.kind != Kind::list || subject.list->flavor != Flavor::iterator;
  if (!reversible || subject.is_number() || subject.is(Kind::none))
    machine.error(fmt::format("'{}' object is not reversible", type_name(subject)));
  const Items items = machine.iterate(subject);
  return items.size > 0 ? items.data[items.size - 1]
                        : missing_item(machine, "No last item, sequence was empty.");
}

Value first_of(Machine& machine, const Value& subject) {
  if (subject.is(Kind::list) && subject.list->flavor == Flavor::iterator &&
      subject.list->taken < subject.list->size)
    return subject.list->items[subject.list->taken++];
  const Items items = machine.iterate(subject);
  return items.size > 0 ? items.data[0] : missing_item(machine, "No first item, sequence was empty.");
}

Value reversed(Machine& machine, const Value& subject) {
  const Items items = machine.iterate(subject);
  std::vector<Value> values(items.data, items.data + items.size);
  std::reverse(values.begin(), values.end());
  if (!subject.is(Kind::string)) {
    const bool from_iterator = subject.is(Kind::list) && subject.list->flavor == Flavor::iterator;
    return machine.list(values, from_iterator ? Flavor::list : Flavor::iterator);
  }
  std::string text;
  for (const Value& value : values) text += value.text();
  return machine.text(text, subject.safe);
}

/// Python's int(text, base) with underscores between digits; nullopt for a text that is not one.
std::optional<int64_t> parse_whole(std::string_view text, int64_t base) {
  text = strip(text, Side::both);
  std::string digits;
  if (!text.empty() && (text[0] == '-' || text[0] == '+')) {
    if (text[0] == '-') digits += '-';
    text.remove_prefix(1);
  }
  const char mark = text.size() > 1 && text[0] == '0' ? static_cast<char>(text[1] | 0x20) : '\0';
  if ((base == 16 && mark == 'x') || (base == 8 && mark == 'o') || (base == 2 && mark == 'b'))
    text.remove_prefix(2);
  if (text.empty() || text[0] == '_' || text.back() == '_' || text[0] == '-' ||
      text.find("__") != std::string_view::npos)
    return std::nullopt;
  for (const char c : text)
    if (c != '_') digits += c;
  int64_t value = 0;
  const auto result =
      std::from_chars(digits.data(), digits.data() + digits.size(), value, static_cast<int>(base));
  if (result.ec == std::errc::result_out_of_range)
    fail(Exit::data, "integers beyond 64 bits are not supported");
  return result.ec == std::errc() && result.ptr == digits.data() + digits.size() ? std::optional(value)
                                                                                 : std::nullopt;
}

/// Python's float(text), without underscores; nullopt for a text that is not one.
std::optional<double> parse_real(std::string_view text) {
  text = strip(text, Side::both);
  if (text.starts_with('+')) text.remove_prefix(1);
  double value = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  return result.ec == std::errc() && result.ptr == text.data() + text.size() ? std::optional(value)
                                                                             : std::nullopt;
}

Value to_whole(Machine& machine, const Value& subject, const Arguments& arguments) {
  const auto [fallback, base] = bind<2>("int", arguments, 0, {"default", "base"});
  if (subject.is(Kind::undefined)) machine.error(missing_text(subject));
  std::optional<double> real;
  if (subject.is_whole()) return Value::of(subject.whole());
  if (subject.is(Kind::string)) {
    const int64_t radix = base ? machine.index_of(*base) : 10;
    if (radix < 2 || radix > 36) machine.error("int() base must be >= 2 and <= 36");
    if (const auto whole = parse_whole(subject.text(), radix)) return Value::of(*whole);
    real = parse_real(subject.text());
  } else if (subject.is(Kind::real)) {
    real = subject.real;
  }
  if (real && std::isfinite(*real)) {
    if (std::fabs(*real) >= 9.2e18) machine.error("integers beyond 64 bits are not supported");
    return Value::of(static_cast<int64_t>(*real));
  }
  return fallback ? *fallback : Value::of(int64_t{0});
}

Value to_real(Machine& machine, const Value& subject, const Arguments& arguments) {
  const auto [fallback] = bind<1>("float", arguments, 0, {"default"});
  if (subject.is(Kind::undefined)) machine.error(missing_text(subject));
  if (subject.is_number()) return Value::of(subject.number());
  if (const auto real = subject.is(Kind::string) ? parse_real(subject.text()) : std::nullopt)
    return Value::of(*real);
  return fallback ? *fallback : Value::of(0.0);
}

Value to_json(Machine& machine, const Value& subject, const Arguments& arguments) {
  const auto [ascii, indent, separators, sort_keys] =
      bind<4>("tojson", arguments, 0, {"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style;
  style.ensure_ascii = ascii && truth(*ascii);
  style.sort_keys = sort_keys && truth(*sort_keys);
  if (indent && !indent->is(Kind::none)) {
    const auto text = text_if(indent);
    const int64_t spaces = text ? 0 : std::clamp<int64_t>(machine.index_of(*indent), 0, 1000);
    style.indent = text ? std::string(*text) : std::string(static_cast<size_t>(spaces), ' ');
    style.item_separator = ",";
  }
  if (separators && !separators->is(Kind::none)) {
    const Items both = machine.iterate(*separators);
    if (both.size != 2 || !both.data[0].is(Kind::string) || !both.data[1].is(Kind::string))
      machine.error("tojson: separators must be two strings");
    style.item_separator = both.data[0].text();
    style.key_separator = both.data[1].text();
  }
  std::string json;
  print_json(json, subject, style, machine.budget);
  return machine.text(json);
}

Value default_of(const Value& subject, const Arguments& arguments) {
  const auto [fallback, boolean] = bind<2>("default", arguments, 0, {"default_value", "boolean"});
  const bool replaced = subject.is(Kind::undefined) || (boolean && truth(*boolean) && !truth(subject));
  if (!replaced) return subject;
  return fallback ? *fallback : Value::of(std::string_view());
}

}  // namespace

Value apply_filter(Machine& machine, Filter filter, const Value& subject, const Arguments& arguments) {
  const auto none = [&] { bind("the filter", arguments, nullptr, 0, 0, nullptr); };
  switch (filter) {
    case Filter::default_value:
      return default_of(subject, arguments);
    case Filter::trim: {
      const auto [chars] = bind<1>("trim", arguments, 0, {"chars"});
      const Value text = subject_text(machine, subject);
      if (!chars || chars->is(Kind::none)) return Value::of(strip(text.text(), Side::both), text.safe);
      return call_method(machine, Method::strip, text, {chars, 1});
    }
    case Filter::tojson:
      return to_json(machine, subject, arguments);
    case Filter::length:
      none();
      return length_of(machine, subject);
    case Filter::first:
      none();
      return first_of(machine, subject);
    case Filter::last:
      none();
      return last_of(machine, subject);
    case Filter::join:
      return joined(machine, subject, arguments);
    case Filter::string:
      none();
      return subject_text(machine, subject);
    case Filter::safe:
      none();
      return Value::of(subject_text(machine, subject).text(), true);
    case Filter::list: {
      none();
      const Items items = machine.iterate(subject);
      return machine.list({items.data, items.data + items.size});
    }
    case Filter::items:
      none();
      if (subject.is(Kind::undefined)) return machine.list({}, Flavor::iterator);
      if (!subject.is(Kind::dict)) machine.error("Can only get item pairs from a mapping.");
      return dict_view(machine, *subject.dict, Flavor::iterator);
    case Filter::replace: {
      const auto [old, by, limit] = bind<3>("replace", arguments, 2, {"old", "new", "count"});
      const Value text = Value::of(subject_text(machine, subject).text());
      const int64_t most = limit && !limit->is(Kind::none) ? machine.index_of(*limit) : -1;
      return replace_bounded(machine, text, machine.string_of(*old), machine.string_of(*by), most);
    }
    case Filter::lower:
    case Filter::upper:
    case Filter::title:
    case Filter::capitalize: {
      none();
      const Value text = subject_text(machine, subject);
      return machine.text(filter == Filter::lower   ? to_lower(text.text())
                          : filter == Filter::upper ? to_upper(text.text())
                          : filter == Filter::title ? title_words(text.text())
                                                    : capitalize(text.text()),
                          text.safe);
    }
    case Filter::integer:
      return to_whole(machine, subject, arguments);
    case Filter::real:
      return to_real(machine, subject, arguments);
    case Filter::abs:
      none();
      if (subject.is(Kind::undefined)) machine.error(missing_text(subject));
      if (!subject.is_number())
        machine.error(fmt::format("bad operand type for abs(): '{}'", type_name(subject)));
      if (subject.is(Kind::real)) return Value::of(std::fabs(subject.real));
      if (subject.whole() == INT64_MIN) machine.error("integers beyond 64 bits are not supported");
      return Value::of(std::abs(subject.whole()));
    case Filter::indent:
      return indented(machine, subject, arguments);
    case Filter::dictsort:
      return dictsorted(machine, subject, arguments);
    case Filter::sort:
      return sorted(machine, subject, arguments);
    case Filter::unique:
      return unique_items(machine, subject, arguments);
    case Filter::reverse:
      none();
      return reversed(machine, subject);
    case Filter::map:
      return mapped_items(machine, subject, arguments);
    case Filter::select:
      return selected(machine, subject, arguments, false, true);
    case Filter::reject:
      return selected(machine, subject, arguments, false, false);
    case Filter::selectattr:
      return selected(machine, subject, arguments, true, true);
    case Filter::rejectattr:
      return selected(machine, subject, arguments, true, false);
  }
  return Value::undefined();
}

}  // namespace nrl::data::chat

#include <algorithm>
#include <string>
#include <string_view>
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

bool is_absent(const Value* value) {
  return !value || value->is(Kind::none);
}

std::string_view text_argument(const Value& value, std::string_view callee) {
  if (!value.is(Kind::string))
    fail(Exit::data, "{}() argument must be str, not {}", callee, type_name(value));
  return value.text();
}

/// The part of a text between two optional indices, of which negative ones count from the end.
struct Part {
  std::string_view text;
  size_t before = 0;     ///< code points before the part
  bool outside = false;  ///< the part begins after the text
};

Part part_of(Machine& machine, std::string_view text, const Value* start, const Value* end) {
  if (is_absent(start) && is_absent(end)) return {text};
  machine.budget.spend_bytes(text.size());
  const auto size = static_cast<int64_t>(code_points(text));
  const auto index = [&](const Value* value, int64_t absent) {
    if (is_absent(value)) return absent;
    const int64_t given = machine.index_of(*value);
    return given < 0 ? std::max<int64_t>(0, given + size) : given;
  };
  const int64_t first = index(start, 0), last = std::min(index(end, size), size);
  if (first > size || first > last) return {{}, 0, true};
  const size_t begin = byte_of(text, static_cast<size_t>(first));
  const size_t stop = byte_of(text, static_cast<size_t>(last));
  return {text.substr(begin, stop - begin), static_cast<size_t>(first)};
}

/// str.find(), rfind() and index(): the index of the first or last occurrence, -1 if there is none.
int64_t position(Machine& machine, std::string_view text, const Arguments& arguments, Method method) {
  const std::string_view callee = name_of(method);
  const auto [sub, start, end] = bind<3>(callee, arguments, 1, {"", "", ""});
  const std::string_view wanted = text_argument(*sub, callee);
  const Part part = part_of(machine, text, start, end);
  if (part.outside) return -1;
  machine.budget.spend(part.text.size() / 1024 * (1 + wanted.size() / 16));
  const size_t at = method == Method::rfind ? part.text.rfind(wanted) : part.text.find(wanted);
  if (at == std::string_view::npos) return -1;
  return static_cast<int64_t>(part.before + code_points(part.text.substr(0, at)));
}

bool has_affix(Machine& machine, std::string_view text, const Arguments& arguments, Method method) {
  const std::string_view callee = name_of(method);
  const auto [affix, start, end] = bind<3>(callee, arguments, 1, {"", "", ""});
  const Part part = part_of(machine, text, start, end);
  const auto matches = [&](const Value& one) {
    if (!one.is(Kind::string))
      fail(Exit::data, "{} first arg must be str or a tuple of str, not {}", callee, type_name(one));
    if (part.outside) return false;
    return method == Method::startswith ? part.text.starts_with(one.text()) : part.text.ends_with(one.text());
  };
  if (!affix->is(Kind::list) || affix->list->flavor != Flavor::tuple) return matches(*affix);
  return std::any_of(affix->list->items, affix->list->items + affix->list->size, matches);
}

Value split_text(Machine& machine, const Value& self, const Arguments& arguments, bool from_right) {
  const auto [separator, limit] = bind<2>(from_right ? "rsplit" : "split", arguments, 0, {"sep", "maxsplit"});
  const int64_t most = limit ? machine.index_of(*limit) : -1;
  std::vector<std::string_view> parts;
  machine.budget.spend_bytes(self.size);
  if (is_absent(separator)) {
    machine.budget.spend(most_breaks(self.text()));
    parts = split_at_spaces(self.text(), most, from_right);
  } else {
    const std::string_view text = text_argument(*separator, "split");
    if (text.empty()) fail(Exit::data, "empty separator");
    machine.budget.spend(self.size / 1024 * (text.size() / 16));
    machine.budget.spend(count(self.text(), text));
    parts = split(self.text(), text, most, from_right);
  }
  std::vector<Value> values;
  for (const std::string_view part : parts) values.push_back(Value::of(part, self.safe));
  return machine.list(values);
}

Value strip_text(Machine& machine, const Value& self, const Arguments& arguments, Method method) {
  const auto [chars] = bind<1>(name_of(method), arguments, 0, {""});
  const Side side = method == Method::lstrip   ? Side::left
                    : method == Method::rstrip ? Side::right
                                               : Side::both;
  if (is_absent(chars)) return Value::of(strip(self.text(), side), self.safe);
  if (!chars->is(Kind::string)) fail(Exit::data, "{} arg must be None or str", name_of(method));
  machine.budget.spend(self.size / 1024 * (1 + chars->size / 16));
  return Value::of(strip(self.text(), chars->text(), side), self.safe);
}

Value replace_text(Machine& machine, const Value& self, const Arguments& arguments) {
  const auto [old, by, limit] = bind<3>("replace", arguments, 2, {"", "", ""});
  const std::string_view from = text_argument(*old, "replace"), to = text_argument(*by, "replace");
  const int64_t most = limit ? machine.index_of(*limit) : -1;
  return replace_bounded(machine, self, from, self.safe && !by->safe ? escape_html(to) : std::string(to),
                         most);
}

Value join_items(Machine& machine, const Value& self, const Arguments& arguments) {
  const auto [iterable] = bind<1>("join", arguments, 1, {""});
  const Items items = machine.iterate(*iterable);
  std::string joined;
  for (size_t i = 0; i < items.size; ++i) {
    if (!items.data[i].is(Kind::string))
      fail(Exit::data, "sequence item {}: expected str instance, {} found", i, type_name(items.data[i]));
    if (i > 0) joined += self.text();
    joined += items.data[i].text();
    machine.budget.spend(1);
    check_text(joined.size());
  }
  return machine.text(joined, self.safe);
}

Value call_of_str(Machine& machine, Method method, const Value& self, const Arguments& arguments) {
  const std::string_view text = self.text();
  const auto none = [&] { bind(name_of(method), arguments, nullptr, 0, 0, nullptr); };
  switch (method) {
    case Method::strip:
    case Method::lstrip:
    case Method::rstrip:
      return strip_text(machine, self, arguments, method);
    case Method::split:
      return split_text(machine, self, arguments, false);
    case Method::rsplit:
      return split_text(machine, self, arguments, true);
    case Method::startswith:
    case Method::endswith:
      return Value::of(has_affix(machine, text, arguments, method));
    case Method::find:
    case Method::rfind:
      return Value::of(position(machine, text, arguments, method));
    case Method::index: {
      const int64_t at = position(machine, text, arguments, method);
      if (at < 0) fail(Exit::data, "substring not found");
      return Value::of(at);
    }
    case Method::count: {
      const auto [sub, start, end] = bind<3>("count", arguments, 1, {"", "", ""});
      const std::string_view wanted = text_argument(*sub, "count");
      const Part part = part_of(machine, text, start, end);
      machine.budget.spend(part.text.size() / 1024 * (1 + wanted.size() / 16));
      return Value::of(static_cast<int64_t>(part.outside ? 0 : count(part.text, wanted)));
    }
    case Method::replace:
      return replace_text(machine, self, arguments);
    case Method::join:
      return join_items(machine, self, arguments);
    case Method::lower:
      none();
      return machine.text(to_lower(text), self.safe);
    case Method::upper:
      none();
      return machine.text(to_upper(text), self.safe);
    case Method::title:
      none();
      return machine.text(title_letters(text), self.safe);
    case Method::capitalize:
      none();
      return machine.text(capitalize(text), self.safe);
    case Method::removeprefix:
    case Method::removesuffix: {
      const auto [affix] = bind<1>(name_of(method), arguments, 1, {""});
      const std::string_view wanted = text_argument(*affix, name_of(method));
      if (method == Method::removeprefix)
        return Value::of(text.starts_with(wanted) ? text.substr(wanted.size()) : text, self.safe);
      return Value::of(text.ends_with(wanted) ? text.substr(0, text.size() - wanted.size()) : text,
                       self.safe);
    }
    case Method::splitlines: {
      const auto [keep] = bind<1>("splitlines", arguments, 0, {"keepends"});
      std::vector<Value> lines;
      machine.budget.spend(most_breaks(text));
      for (const std::string_view line : split_lines(text, keep && truth(*keep)))
        lines.push_back(Value::of(line, self.safe));
      return machine.list(lines);
    }
    default:
      return Value::undefined();
  }
}

Value call_of_dict(Machine& machine, Method method, const Dict& dict, const Arguments& arguments) {
  if (method == Method::get) {
    const auto [key, fallback] = bind<2>("get", arguments, 1, {"", ""});
    if (!hashable(*key, machine.budget)) fail(Exit::data, "unhashable type: '{}'", type_name(*key));
    const Value* const found = find(dict.entries, dict.size, *key, machine.budget);
    return found ? *found : fallback ? *fallback : Value();
  }
  bind(name_of(method), arguments, nullptr, 0, 0, nullptr);
  if (method == Method::copy) return Value::of(&dict);  // nothing changes it
  return dict_view(machine, dict,
                   method == Method::keys     ? Flavor::dict_keys
                   : method == Method::values ? Flavor::dict_values
                                              : Flavor::dict_items);
}

Value call_of_list(Machine& machine, Method method, const List& list, const Arguments& arguments) {
  if (method == Method::copy) {
    bind("copy", arguments, nullptr, 0, 0, nullptr);
    return Value::of(machine.arena.make(list));
  }
  const auto [wanted] = bind<1>(name_of(method), arguments, 1, {""});
  int64_t found = 0;
  for (size_t i = 0; i < list.size; ++i) {
    if (!equal(list.items[i], *wanted, machine.budget)) continue;
    if (method == Method::index) return Value::of(static_cast<int64_t>(i));
    ++found;
  }
  if (method == Method::index) {
    std::string text;
    print_repr(text, *wanted);
    fail(Exit::data, "{} is not in list", text);
  }
  return Value::of(found);
}

}  // namespace

Value replace_bounded(Machine& machine, const Value& subject, std::string_view old, std::string_view by,
                      int64_t most) {
  const std::string_view text = subject.text();
  machine.budget.spend(text.size() / 1024 * (1 + old.size() / 16));
  if (!old.empty() && text.find(old) == std::string_view::npos) return subject;
  const size_t parts = by.size() > old.size() ? count(text, old) : 0;
  if (parts > 0) check_text(text.size() + parts * by.size());
  return machine.text(replace(text, old, by, most), subject.safe);
}

Value dict_view(Machine& machine, const Dict& dict, Flavor flavor) {
  machine.budget.spend(dict.size);
  Value* const items = machine.arena.array<Value>(dict.size);
  for (size_t i = 0; i < dict.size; ++i) {
    const Entry& entry = dict.entries[i];
    new (items + i) Value(flavor == Flavor::dict_keys     ? entry.key
                          : flavor == Flavor::dict_values ? entry.value
                                                          : pair_of(machine, entry));
  }
  List view;
  view.items = items;
  view.size = dict.size;
  view.flavor = flavor;
  return Value::of(machine.arena.make(view));
}

Value pair_of(Machine& machine, const Entry& entry) {
  Value* const both = machine.arena.array<Value>(2);
  new (both) Value(entry.key);
  new (both + 1) Value(entry.value);
  List pair;
  pair.items = both;
  pair.size = 2;
  pair.flavor = Flavor::tuple;
  return Value::of(machine.arena.make(pair));
}

Value call_method(Machine& machine, Method method, const Value& self, const Arguments& arguments) {
  if (self.is(Kind::string)) return call_of_str(machine, method, self, arguments);
  if (self.is(Kind::dict)) return call_of_dict(machine, method, *self.dict, arguments);
  return call_of_list(machine, method, *self.list, arguments);
}

}  // namespace nrl::data::chat

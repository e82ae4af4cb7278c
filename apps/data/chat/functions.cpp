#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "apps/data/chat/builtins.h"
#include "apps/data/chat/machine.h"
#include "apps/data/chat/print.h"
#include "apps/data/chat/text.h"
#include "apps/data/unicode.h"
#include "core/base/error.h"

namespace nrl::data::chat {
namespace {

template <class T>
using Named = std::pair<std::string_view, T>;

constexpr Named<Filter> filters[] = {
    {"abs", Filter::abs},
    {"capitalize", Filter::capitalize},
    {"count", Filter::length},
    {"d", Filter::default_value},
    {"default", Filter::default_value},
    {"dictsort", Filter::dictsort},
    {"first", Filter::first},
    {"float", Filter::real},
    {"indent", Filter::indent},
    {"int", Filter::integer},
    {"items", Filter::items},
    {"join", Filter::join},
    {"last", Filter::last},
    {"length", Filter::length},
    {"list", Filter::list},
    {"lower", Filter::lower},
    {"map", Filter::map},
    {"reject", Filter::reject},
    {"rejectattr", Filter::rejectattr},
    {"replace", Filter::replace},
    {"reverse", Filter::reverse},
    {"safe", Filter::safe},
    {"select", Filter::select},
    {"selectattr", Filter::selectattr},
    {"sort", Filter::sort},
    {"string", Filter::string},
    {"title", Filter::title},
    {"tojson", Filter::tojson},
    {"trim", Filter::trim},
    {"unique", Filter::unique},
    {"upper", Filter::upper},
};

constexpr Named<Test> tests[] = {
    {"!=", Test::unequal},
    {"<", Test::less},
    {"<=", Test::less_equal},
    {"==", Test::equal},
    {">", Test::greater},
    {">=", Test::greater_equal},
    {"boolean", Test::boolean},
    {"callable", Test::callable},
    {"defined", Test::defined},
    {"divisibleby", Test::divisibleby},
    {"eq", Test::equal},
    {"equalto", Test::equal},
    {"even", Test::even},
    {"false", Test::is_false},
    {"float", Test::real},
    {"ge", Test::greater_equal},
    {"greaterthan", Test::greater},
    {"gt", Test::greater},
    {"in", Test::in},
    {"integer", Test::integer},
    {"iterable", Test::iterable},
    {"le", Test::less_equal},
    {"lessthan", Test::less},
    {"lower", Test::lower},
    {"lt", Test::less},
    {"mapping", Test::mapping},
    {"ne", Test::unequal},
    {"none", Test::none},
    {"number", Test::number},
    {"odd", Test::odd},
    {"sequence", Test::sequence},
    {"string", Test::string},
    {"true", Test::is_true},
    {"undefined", Test::undefined},
    {"upper", Test::upper},
};

constexpr Named<Method> methods[] = {
    {"append", Method::append},
    {"capitalize", Method::capitalize},
    {"clear", Method::clear},
    {"copy", Method::copy},
    {"count", Method::count},
    {"endswith", Method::endswith},
    {"extend", Method::extend},
    {"find", Method::find},
    {"get", Method::get},
    {"index", Method::index},
    {"insert", Method::insert},
    {"items", Method::items},
    {"join", Method::join},
    {"keys", Method::keys},
    {"lower", Method::lower},
    {"lstrip", Method::lstrip},
    {"pop", Method::pop},
    {"popitem", Method::popitem},
    {"remove", Method::remove},
    {"removeprefix", Method::removeprefix},
    {"removesuffix", Method::removesuffix},
    {"replace", Method::replace},
    {"reverse", Method::reverse},
    {"rfind", Method::rfind},
    {"rsplit", Method::rsplit},
    {"rstrip", Method::rstrip},
    {"setdefault", Method::setdefault},
    {"sort", Method::sort},
    {"split", Method::split},
    {"splitlines", Method::splitlines},
    {"startswith", Method::startswith},
    {"strip", Method::strip},
    {"title", Method::title},
    {"update", Method::update},
    {"upper", Method::upper},
    {"values", Method::values},
};

constexpr Named<Function> functions[] = {
    {"dict", Function::dict},
    {"namespace", Function::name_space},
    {"raise_exception", Function::raise_exception},
    {"range", Function::range},
    {"strftime_now", Function::strftime_now},
};

template <class Table>
auto find_named(const Table& table, std::string_view name) -> decltype(&table[0].second) {
  const auto entry =
      std::find_if(std::begin(table), std::end(table), [&](const auto& e) { return e.first == name; });
  return entry == std::end(table) ? nullptr : &entry->second;
}

bool is_of_str(Method method) {
  return method >= Method::capitalize && method <= Method::upper;
}

/// Entries of the positional argument of dict() and namespace(): of a dict, or pairs.
void add_entries(Machine& machine, const Value& source, Buffer<Entry>& entries) {
  const auto add = [&](const Value& key, const Value& value) {
    if (!hashable(key, machine.budget)) machine.error(fmt::format("unhashable type: '{}'", type_name(key)));
    if (const Value* const known = find(entries.data, entries.size, key, machine.budget))
      const_cast<Value&>(*known) = value;
    else
      entries.push(machine.arena, {key, value});
  };
  if (source.is(Kind::dict)) {
    for (size_t i = 0; i < source.dict->size; ++i)
      add(source.dict->entries[i].key, source.dict->entries[i].value);
    return;
  }
  const Items pairs = machine.iterate(source);
  for (size_t i = 0; i < pairs.size; ++i) {
    const Items pair = machine.iterate(pairs.data[i]);
    if (pair.size != 2)
      machine.error(
          fmt::format("dictionary update sequence element #{} has length {}; 2 is required", i, pair.size));
    add(pair.data[0], pair.data[1]);
  }
}

Buffer<Entry> entries_of(Machine& machine, std::string_view callee, const Arguments& arguments) {
  if (arguments.size > 1)
    machine.error(fmt::format("{} expected at most 1 argument, got {}", callee, arguments.size));
  Buffer<Entry> entries;
  if (arguments.size == 1) add_entries(machine, arguments.items[0], entries);
  for (size_t i = 0; i < arguments.keyword_count; ++i) {
    const Value key = Value::of(arguments.keywords[i].name);
    if (const Value* const known = find(entries.data, entries.size, key, machine.budget))
      const_cast<Value&>(*known) = arguments.keywords[i].value;
    else
      entries.push(machine.arena, {key, arguments.keywords[i].value});
  }
  return entries;
}

Value make_range(Machine& machine, const Arguments& arguments) {
  const auto [first, second, third] = bind<3>("range", arguments, 1, {"", "", ""});
  List range;
  range.flavor = Flavor::range;
  range.start = second ? machine.index_of(*first) : 0;
  range.stop = machine.index_of(second ? *second : *first);
  range.step = third ? machine.index_of(*third) : 1;
  if (range.step == 0) machine.error("range() arg 3 must not be zero");
  for (const int64_t part : {range.start, range.stop, range.step})
    if (std::abs(part) >> 60 != 0) machine.error("integers beyond 60 bits are not supported in range()");
  const int64_t distance = range.step > 0 ? range.stop - range.start : range.start - range.stop;
  const int64_t size = distance > 0 ? (distance - 1) / std::abs(range.step) + 1 : 0;
  if (size > 100000)
    machine.error("Range too big. The sandbox blocks ranges larger than MAX_RANGE (100000).");
  range.size = static_cast<size_t>(size);
  machine.budget.spend(range.size / 16);
  Value* const items = machine.arena.array<Value>(range.size);
  for (size_t i = 0; i < range.size; ++i)
    new (items + i) Value(Value::of(range.start + static_cast<int64_t>(i) * range.step));
  range.items = items;
  return Value::of(machine.arena.make(range));
}

Value format_time(Machine& machine, const Arguments& arguments) {
  const auto [format] = bind<1>("strftime_now", arguments, 1, {"format"});
  if (!format->is(Kind::string))
    machine.error(fmt::format("strftime() argument 1 must be str, not {}", type_name(*format)));
  std::tm now{};
  if (machine.now()) {
    now = *machine.now();
  } else {
    const std::time_t seconds = std::time(nullptr);
    localtime_r(&seconds, &now);
  }
  if (format->text().find('\0') != std::string_view::npos) machine.error("embedded null character");
  // The mark tells an empty text from one that does not fit.
  const std::string pattern = std::string(format->text()) + '.';
  std::string text(4096 + 16 * pattern.size(), '\0');
  const size_t size = std::strftime(text.data(), text.size(), pattern.c_str(), &now);
  if (size == 0) machine.error("the time is longer than supported");
  const std::string_view result(text.data(), size - 1);
  require_utf8(result);
  return machine.text(result);
}

}  // namespace

std::optional<Filter> filter_named(std::string_view name) {
  const Filter* const filter = find_named(filters, name);
  return filter ? std::optional(*filter) : std::nullopt;
}

std::optional<Test> test_named(std::string_view name) {
  const Test* const test = find_named(tests, name);
  return test ? std::optional(*test) : std::nullopt;
}

Method method_named(std::string_view name) {
  const Method* const method = find_named(methods, name);
  return method ? *method : Method::unknown;
}

Function function_named(std::string_view name) {
  const Function* const function = find_named(functions, name);
  return function ? *function : Function::unknown;
}

std::string_view name_of(Method method) {
  for (const auto& [name, value] : methods)
    if (value == method) return name;
  return {};
}

bool modifies(Method method) {
  return method >= Method::append;
}

bool has_method(const Value& value, Method method) {
  switch (value.kind) {
    case Kind::string:
      return is_of_str(method);
    case Kind::dict:
      return (method >= Method::copy && method <= Method::values) || method == Method::clear ||
             method == Method::pop || method >= Method::popitem;
    case Kind::list:
      if (!value.list->is_indexed()) return false;
      if (method == Method::count || method == Method::index) return true;
      return value.list->flavor == Flavor::list &&
             (method == Method::copy || (method >= Method::append && method <= Method::sort));
    default:
      return false;
  }
}

void bind(std::string_view callee, const Arguments& arguments, const std::string_view* names, size_t count,
          size_t required, const Value** values) {
  if (arguments.size > count)
    fail(Exit::data, "{}() takes at most {} arguments ({} given)", callee, count, arguments.size);
  for (size_t i = 0; i < arguments.size; ++i) values[i] = arguments.items + i;
  for (size_t k = 0; k < arguments.keyword_count; ++k) {
    const Keyword& keyword = arguments.keywords[k];
    const std::string_view* const name = std::find(names, names + count, keyword.name);
    if (name == names + count)
      fail(Exit::data, "{}() got an unexpected keyword argument '{}'", callee, keyword.name);
    const Value*& value = values[name - names];
    if (value) fail(Exit::data, "{}() got multiple values for argument '{}'", callee, keyword.name);
    value = &keyword.value;
  }
  for (size_t i = 0; i < required; ++i)
    if (!values[i]) fail(Exit::data, "{}() misses argument {}", callee, i + 1);
}

Value call_function(Machine& machine, Function function, const Arguments& arguments) {
  switch (function) {
    case Function::unknown:
      break;
    case Function::range:
      return make_range(machine, arguments);
    case Function::strftime_now:
      return format_time(machine, arguments);
    case Function::raise_exception: {
      const auto [message] = bind<1>("raise_exception", arguments, 1, {"message"});
      Machine::raise(machine.string_of(*message));
    }
    case Function::dict: {
      const Buffer<Entry> entries = entries_of(machine, "dict", arguments);
      return Value::of(static_cast<const Dict*>(machine.arena.make(Dict{entries.data, entries.size})));
    }
    case Function::name_space: {
      Value value;
      value.kind = Kind::name_space;
      value.space = machine.arena.make(Namespace{entries_of(machine, "namespace", arguments)});
      for (size_t i = 0; i < value.space->entries.size; ++i) {
        const Value& key = value.space->entries.data[i].key;
        if (key.is(Kind::string) && key.text().starts_with('_'))
          machine.error(fmt::format(
              "Chat templates cannot store underscore-prefixed attributes on a namespace, but got '{}'. "
              "Please rename the attribute.",
              key.text()));
      }
      return value;
    }
  }
  return Value::undefined();
}

}  // namespace nrl::data::chat

#pragma once
// The filters, tests, methods and global functions of templates.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "apps/data/chat/value.h"

namespace nrl::data::chat {

class Machine;

enum class Filter : uint8_t {
  abs,
  capitalize,
  default_value,
  dictsort,
  first,
  indent,
  integer,
  items,
  join,
  last,
  length,
  list,
  lower,
  map,
  real,
  reject,
  rejectattr,
  replace,
  reverse,
  safe,
  select,
  selectattr,
  sort,
  string,
  title,
  tojson,
  trim,
  unique,
  upper,
};

enum class Test : uint8_t {
  boolean,
  callable,
  defined,
  divisibleby,
  equal,
  even,
  greater,
  greater_equal,
  in,
  integer,
  is_false,
  is_true,
  iterable,
  less,
  less_equal,
  lower,
  mapping,
  none,
  number,
  odd,
  real,
  sequence,
  string,
  undefined,
  unequal,
  upper,
};

enum class Method : uint8_t {
  unknown,
  // of str
  capitalize,
  count,
  endswith,
  find,
  index,
  join,
  lower,
  lstrip,
  removeprefix,
  removesuffix,
  replace,
  rfind,
  rsplit,
  rstrip,
  split,
  splitlines,
  startswith,
  strip,
  title,
  upper,
  // of dict
  copy,  // and of list
  get,
  items,
  keys,
  values,
  // of list (and of dict: clear, pop): they modify, which the sandbox forbids
  append,
  clear,
  extend,
  insert,
  pop,
  remove,
  reverse,
  sort,
  // of dict, modifying
  popitem,
  setdefault,
  update,
};

enum class Function : uint8_t { unknown, dict, name_space, raise_exception, range, strftime_now };

std::optional<Filter> filter_named(std::string_view name);
std::optional<Test> test_named(std::string_view name);
/// Method::unknown, Function::unknown for other names.
Method method_named(std::string_view name);
Function function_named(std::string_view name);
std::string_view name_of(Method method);

/// True for methods that change their object.
bool modifies(Method method);
/// True if the Python type of `value` has the method.
bool has_method(const Value& value, Method method);

struct Keyword {
  std::string_view name;
  Value value;
};

/// Arguments of a call.
struct Arguments {
  const Value* items = nullptr;
  size_t size = 0;
  const Keyword* keywords = nullptr;
  size_t keyword_count = 0;

  /// All but the first `count` positional arguments.
  Arguments without(size_t count) const { return {items + count, size - count, keywords, keyword_count}; }
};

/// Assigns arguments to parameters by position and name into `values`; null for those not given. A parameter
/// with an empty name cannot be given by name. Error (Exit::data) naming `callee` for other arguments.
void bind(std::string_view callee, const Arguments& arguments, const std::string_view* names, size_t count,
          size_t required, const Value** values);

template <size_t N>
std::array<const Value*, N> bind(std::string_view callee, const Arguments& arguments, size_t required,
                                 const std::array<std::string_view, N>& names) {
  std::array<const Value*, N> values{};
  bind(callee, arguments, names.data(), N, required, values.data());
  return values;
}

// Errors of these are Error (Exit::data) with Python's or Jinja's message.
Value apply_filter(Machine& machine, Filter filter, const Value& subject, const Arguments& arguments);
bool apply_test(Machine& machine, Test test, const Value& subject, const Arguments& arguments);
Value call_method(Machine& machine, Method method, const Value& self, const Arguments& arguments);
Value call_function(Machine& machine, Function function, const Arguments& arguments);

}  // namespace nrl::data::chat

#include "apps/data/chat/value.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/base/error.h"

namespace nrl::data::chat {
namespace {

// Exact for every pair of int64 and double: a long double has a significand of 64 bits.
static_assert(__LDBL_MANT_DIG__ >= 64 || sizeof(long double) > sizeof(double));

int order_of_numbers(const Value& a, const Value& b) {
  if (a.is_whole() && b.is_whole()) return a.whole() < b.whole() ? -1 : a.whole() > b.whole();
  const auto wide = [](const Value& v) {
    return v.is(Kind::real) ? static_cast<long double>(v.real) : static_cast<long double>(v.whole());
  };
  return wide(a) < wide(b) ? -1 : wide(a) > wide(b);
}

bool is_nan(const Value& value) {
  return value.is(Kind::real) && std::isnan(value.real);
}

void check_depth(int depth) {
  if (depth > most_value_depth) fail(Exit::data, "values are nested deeper than {} levels", most_value_depth);
}

bool equal_dicts(const Dict& a, const Dict& b, Budget& budget, int depth) {
  if (a.size != b.size) return false;
  for (size_t i = 0; i < a.size; ++i) {
    const Value* const other = find(b.entries, b.size, a.entries[i].key, budget);
    if (!other || !equal(a.entries[i].value, *other, budget, depth + 1)) return false;
  }
  return true;
}

}  // namespace

void Budget::exhausted() {
  fail(Exit::data, "the template takes more than {} steps", most_steps);
}

std::string_view Arena::keep(std::string_view text) {
  if (text.empty()) return {};
  char* const copy = array<char>(text.size());
  std::memcpy(copy, text.data(), text.size());
  return {copy, text.size()};
}

void* Arena::allocate_block(size_t bytes) {
  constexpr size_t usual = size_t{32} << 10;
  const size_t wanted = std::max(bytes, std::min(usual << std::min<size_t>(blocks_.size(), 8), most_bytes));
  if (bytes > most_bytes || wanted > most_bytes - total_)
    fail(Exit::data, "the template makes values of more than {} MiB", most_bytes >> 20);
  blocks_.push_back(std::unique_ptr<std::byte[]>(new std::byte[wanted]));
  total_ += wanted;
  std::byte* const block = blocks_.back().get();
  // The rest of the larger block serves the following requests.
  if (wanted - bytes > left_) {
    at_ = block + bytes;
    left_ = wanted - bytes;
  }
  return block;
}

std::string_view type_name(const Value& value) {
  switch (value.kind) {
    case Kind::undefined:
      return "Undefined";
    case Kind::none:
      return "NoneType";
    case Kind::boolean:
      return "bool";
    case Kind::integer:
      return "int";
    case Kind::real:
      return "float";
    case Kind::string:
      return value.safe ? "Markup" : "str";
    case Kind::dict:
      return "dict";
    case Kind::name_space:
      return "TemplateNamespace";
    case Kind::macro:
      return "Macro";
    case Kind::method:
      return "builtin_function_or_method";
    case Kind::function:
      return "function";
    case Kind::loop:
      return "LoopContext";
    case Kind::list:
      break;
  }
  switch (value.list->flavor) {
    case Flavor::list:
      return "list";
    case Flavor::tuple:
      return "tuple";
    case Flavor::range:
      return "range";
    case Flavor::dict_keys:
      return "dict_keys";
    case Flavor::dict_values:
      return "dict_values";
    case Flavor::dict_items:
      return "dict_items";
    case Flavor::iterator:
      return "generator";
  }
  return "object";
}

bool truth(const Value& value) {
  switch (value.kind) {
    case Kind::undefined:
    case Kind::none:
      return false;
    case Kind::boolean:
      return value.boolean;
    case Kind::integer:
      return value.integer != 0;
    case Kind::real:
      return value.real != 0;
    case Kind::string:
      return value.size != 0;
    case Kind::list:
      return value.list->flavor == Flavor::iterator || value.list->size != 0;
    case Kind::dict:
      return value.dict->size != 0;
    default:
      return true;
  }
}

const Value* find(const Entry* entries, size_t size, const Value& key, Budget& budget) {
  budget.spend(size / 16);
  if (key.is(Kind::string)) {
    for (size_t i = 0; i < size; ++i) {
      const Value& k = entries[i].key;
      if (k.is(Kind::string) && k.text() == key.text()) return &entries[i].value;
    }
    return nullptr;
  }
  for (size_t i = 0; i < size; ++i)
    if (equal(entries[i].key, key, budget)) return &entries[i].value;
  return nullptr;
}

bool equal(const Value& a, const Value& b, Budget& budget, int depth) {
  budget.spend(1);
  check_depth(depth);
  if (a.is_number() && b.is_number()) return !is_nan(a) && !is_nan(b) && order_of_numbers(a, b) == 0;
  if (a.kind != b.kind) return false;
  switch (a.kind) {
    case Kind::undefined:
    case Kind::none:
      return true;
    case Kind::string:
      budget.spend_bytes(a.size);
      return a.text() == b.text();
    case Kind::list:
      if (a.list == b.list) return true;
      if (a.list->flavor != b.list->flavor || a.list->size != b.list->size) return false;
      if (a.list->flavor == Flavor::dict_values || a.list->flavor == Flavor::iterator) return false;
      for (size_t i = 0; i < a.list->size; ++i)
        if (!equal(a.list->items[i], b.list->items[i], budget, depth + 1)) return false;
      return true;
    case Kind::dict:
      return a.dict == b.dict || equal_dicts(*a.dict, *b.dict, budget, depth);
    case Kind::method:
      return a.method == b.method && a.self == b.self;
    case Kind::function:
      return a.function == b.function;
    case Kind::name_space:
      return a.space == b.space;
    case Kind::macro:
      return a.macro == b.macro;
    default:
      return a.loop == b.loop;
  }
}

int order(const Value& a, const Value& b, std::string_view sign, Budget& budget, int depth) {
  budget.spend(1);
  check_depth(depth);
  if (a.is_number() && b.is_number()) return order_of_numbers(a, b);
  if (a.is(Kind::string) && b.is(Kind::string)) {
    budget.spend_bytes(a.size);
    return a.text().compare(b.text());  // the order of UTF-8 bytes is the order of code points
  }
  if (a.is(Kind::list) && b.is(Kind::list) && a.list->flavor == b.list->flavor &&
      (a.list->flavor == Flavor::list || a.list->flavor == Flavor::tuple)) {
    for (size_t i = 0; i < a.list->size && i < b.list->size; ++i)
      if (!equal(a.list->items[i], b.list->items[i], budget, depth + 1))
        return order(a.list->items[i], b.list->items[i], sign, budget, depth + 1);
    return a.list->size < b.list->size ? -1 : a.list->size > b.list->size;
  }
  fail(Exit::data, "'{}' not supported between instances of '{}' and '{}'", sign, type_name(a), type_name(b));
}

bool hashable(const Value& value, Budget& budget, int depth) {
  budget.spend(1);
  check_depth(depth);
  if (value.is(Kind::dict)) return false;
  if (!value.is(Kind::list)) return true;
  if (value.list->flavor == Flavor::list || value.list->flavor == Flavor::dict_keys ||
      value.list->flavor == Flavor::dict_items)
    return false;
  for (size_t i = 0; value.list->flavor == Flavor::tuple && i < value.list->size; ++i)
    if (!hashable(value.list->items[i], budget, depth + 1)) return false;
  return true;
}

}  // namespace nrl::data::chat

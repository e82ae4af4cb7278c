#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "apps/data/chat/machine.h"
#include "apps/data/chat/nesting.h"
#include "apps/data/chat/print.h"
#include "apps/data/chat/text.h"
#include "apps/data/unicode.h"
#include "core/base/error.h"

namespace nrl::data::chat {
namespace {

/// Values of a template that has no variable of the name.
const Value* global(const Expression& e, Value& function) {
  if (e.function == Function::unknown) return nullptr;
  function.kind = Kind::function;
  function.function = e.function;
  return &function;
}

/// True for names that Python keeps for itself, to which the sandbox gives no access.
bool is_internal(std::string_view name) {
  return name.size() > 4 && name.starts_with("__") && name.ends_with("__");
}

const Value* find_in_space(const Namespace& space, const Value& key, Budget& budget) {
  return find(space.entries.data, space.entries.size, key, budget);
}

}  // namespace

const Value* Machine::lookup(NameId name) const {
  for (const Frame* frame = frame_; frame; frame = frame->parent)
    for (size_t i = 0; i < frame->variables.size; ++i)
      if (frame->variables.data[i].name == name) return &frame->variables.data[i].value;
  return nullptr;
}

Value Machine::name(const Expression& e) {
  Value function;
  if (const Value* const known = lookup(e.name)) return *known;
  if (const Value* const known = global(e, function)) return *known;
  return missing(Missing::What::name, {}, Value::of(program_.names[e.name]));
}

Value Machine::missing(Missing::What what, const Value& owner, const Value& key) {
  return Value::undefined(arena.make(Missing{what, owner, key}));
}

Value Machine::bound(const Value& object, Method method) {
  if (modifies(method)) return missing(Missing::What::unsafe, object, Value::of(name_of(method)));
  Value value;
  value.kind = Kind::method;
  value.method = method;
  value.self = arena.make(object);
  return value;
}

Value Machine::attribute(const Value& object, const Value& key, Method method) {
  if (object.is(Kind::undefined)) error(missing_text(object));
  if (is_internal(key.text())) return missing(Missing::What::unsafe, object, key);
  if (method != Method::unknown && has_method(object, method)) return bound(object, method);
  const Value* found = nullptr;
  if (object.is(Kind::dict)) found = find(object.dict->entries, object.dict->size, key, budget);
  if (object.is(Kind::name_space)) found = find_in_space(*object.space, key, budget);
  if (object.is(Kind::loop)) return loop_attribute(*object.loop, key);
  return found ? *found : missing(Missing::What::attribute, object, key);
}

Value Machine::item(const Value& object, const Value& key) {
  switch (object.kind) {
    case Kind::undefined:
      error(missing_text(object));
    case Kind::dict:
      if (hashable(key, budget))
        if (const Value* const found = find(object.dict->entries, object.dict->size, key, budget))
          return *found;
      break;
    case Kind::list:
    case Kind::string: {
      if (!key.is_whole() || (object.is(Kind::list) && !object.list->is_indexed())) break;
      const bool is_list = object.is(Kind::list);
      const size_t size = is_list ? object.list->size : code_points(object.text());
      const int64_t index = key.whole() < 0 ? key.whole() + static_cast<int64_t>(size) : key.whole();
      if (index < 0 || index >= static_cast<int64_t>(size)) break;
      if (is_list) return object.list->items[index];
      budget.spend_bytes(object.size);
      const std::string_view rest = object.text().substr(byte_of(object.text(), static_cast<size_t>(index)));
      return Value::of(rest.substr(0, byte_of(rest, 1)), object.safe);
    }
    default:
      break;
  }
  if (!key.is(Kind::string)) return missing(Missing::What::element, object, key);
  if (object.is(Kind::dict)) {
    // The item is known to be absent.
    const Method method = method_named(key.text());
    if (method != Method::unknown && has_method(object, method)) return bound(object, method);
    return missing(is_internal(key.text()) ? Missing::What::unsafe : Missing::What::attribute, object, key);
  }
  return attribute(object, key, method_named(key.text()));
}

Value Machine::slice(const Expression& e) {
  const Value object = evaluate(*e.a);
  Value parts[3];
  for (size_t i = 0; i < 3; ++i)
    if (e.items[i]) parts[i] = evaluate(*e.items[i]);
  if (object.is(Kind::undefined)) error(missing_text(object));
  const bool is_text = object.is(Kind::string);
  if (object.is(Kind::dict)) error("unhashable type: 'slice'");
  if (!is_text && !(object.is(Kind::list) && object.list->is_indexed()))
    error(fmt::format("'{}' object is not subscriptable", type_name(object)));
  for (const Value& part : parts)
    if (!part.is(Kind::none) && !part.is_whole())
      error("slice indices must be integers or None or have an __index__ method");
  const int64_t step = parts[2].is(Kind::none) ? 1 : std::max(parts[2].whole(), -INT64_MAX);
  if (step == 0) error("slice step cannot be zero");
  if (is_text) budget.spend_bytes(object.size);
  const auto size = static_cast<int64_t>(is_text ? code_points(object.text()) : object.list->size);
  const auto limit = [&](const Value& part, int64_t absent) {
    if (part.is(Kind::none)) return absent;
    const int64_t low = step < 0 ? -1 : 0, high = step < 0 ? size - 1 : size;
    const int64_t index = part.whole() < 0 ? part.whole() + size : part.whole();
    return std::clamp(index, low, std::max(low, high));
  };
  const int64_t begin = limit(parts[0], step < 0 ? size - 1 : 0), end = limit(parts[1], step < 0 ? -1 : size);
  const int64_t distance = step > 0 ? end - begin : begin - end;
  const size_t count = distance > 0 ? static_cast<size_t>((distance - 1) / std::abs(step) + 1) : 0;
  if (is_text) {
    if (step == 1) {
      const size_t first = byte_of(object.text(), static_cast<size_t>(begin));
      const std::string_view rest = object.text().substr(first);
      return Value::of(rest.substr(0, byte_of(rest, count)), object.safe);
    }
    const Items characters = iterate(object);
    std::string picked;
    for (size_t i = 0; i < count; ++i)
      picked += characters.data[begin + static_cast<int64_t>(i) * step].text();
    return text(picked, object.safe);
  }
  List list = *object.list;
  list.size = count;
  if (list.flavor == Flavor::range) {
    // Unsigned, as the step of an empty range may be of any size.
    const auto product = [](int64_t x, int64_t y) {
      return static_cast<uint64_t>(x) * static_cast<uint64_t>(y);
    };
    const auto first = static_cast<uint64_t>(object.list->start);
    list.start = static_cast<int64_t>(first + product(begin, object.list->step));
    list.stop = static_cast<int64_t>(first + product(end, object.list->step));
    list.step = static_cast<int64_t>(product(object.list->step, step));
  }
  if (step == 1 || count == 0) {
    list.items += count == 0 ? 0 : begin;
    return Value::of(arena.make(list));
  }
  budget.spend(count);
  Value* const items = arena.array<Value>(count);
  for (size_t i = 0; i < count; ++i)
    new (items + i) Value(object.list->items[begin + static_cast<int64_t>(i) * step]);
  list.items = items;
  return Value::of(arena.make(list));
}

Arguments Machine::arguments(const Expression& e) {
  Value* const items = arena.array<Value>(e.items.size());
  for (size_t i = 0; i < e.items.size(); ++i) new (items + i) Value(evaluate(*e.items[i]));
  Keyword* const keywords = arena.array<Keyword>(e.keywords.size());
  for (size_t i = 0; i < e.keywords.size(); ++i)
    new (keywords + i) Keyword{e.keywords[i].name, evaluate(*e.keywords[i].value)};
  const Arguments given{items, e.items.size(), keywords, e.keywords.size()};
  return e.b || e.c ? unpacked(e, given) : given;
}

// The arguments with the ones of * and **.
Arguments Machine::unpacked(const Expression& e, const Arguments& given) {
  Buffer<Value> items;
  Buffer<Keyword> keywords;
  for (size_t i = 0; i < given.size; ++i) items.push(arena, given.items[i]);
  for (size_t i = 0; i < given.keyword_count; ++i) keywords.push(arena, given.keywords[i]);
  if (e.b) {
    const Items more = iterate(evaluate(*e.b));
    budget.spend(more.size);
    for (size_t i = 0; i < more.size; ++i) items.push(arena, more.data[i]);
  }
  const Value named = e.c ? evaluate(*e.c) : Value();
  if (e.c && !named.is(Kind::dict))
    error(fmt::format("argument after ** must be a mapping, not {}", type_name(named)));
  for (size_t i = 0; e.c && i < named.dict->size; ++i) {
    budget.spend(1 + keywords.size);
    const Entry& entry = named.dict->entries[i];
    if (!entry.key.is(Kind::string)) error("keywords must be strings");
    for (size_t k = 0; k < keywords.size; ++k)
      if (keywords.data[k].name == entry.key.text())
        error(fmt::format("got multiple values for keyword argument '{}'", entry.key.text()));
    keywords.push(arena, {entry.key.text(), entry.value});
  }
  return {items.data, items.size, keywords.data, keywords.size};
}

Value Machine::call(const Expression& e, bool into_output) {
  const Expression& callee = *e.a;
  if (callee.op == Op::attribute) {
    // Without a value for the bound method.
    const Value self = evaluate(*callee.a);
    if (!modifies(callee.method) && has_method(self, callee.method)) {
      const Arguments given = arguments(e);
      at_ = e.at;
      return call_method(*this, callee.method, self, given);
    }
    at_ = callee.at;
    const Value value = attribute(self, callee.value, callee.method);
    return call_value(value, arguments(e), into_output);
  }
  const Value value = evaluate(callee);
  const Arguments given = arguments(e);
  at_ = e.at;
  return call_value(value, given, into_output);
}

Value Machine::call_value(const Value& callee, const Arguments& arguments, bool into_output) {
  switch (callee.kind) {
    case Kind::undefined:
      error(missing_text(callee));
    case Kind::method:
      return call_method(*this, callee.method, *callee.self, arguments);
    case Kind::function:
      return call_function(*this, callee.function, arguments);
    case Kind::macro: {
      if (into_output) {
        run_macro(*callee.macro, arguments);
        return Value::of(std::string_view());
      }
      const size_t begin = out_.size();
      ++captures_;
      run_macro(*callee.macro, arguments);
      --captures_;
      return take_text(begin);
    }
    default:
      error(fmt::format("'{}' object is not callable", type_name(callee)));
  }
}

bool Machine::contains(const Value& container, const Value& value) {
  switch (container.kind) {
    case Kind::undefined:
      return false;
    case Kind::string:
      if (!value.is(Kind::string))
        error(fmt::format("'in <string>' requires string as left operand, not {}", type_name(value)));
      budget.spend(container.size / 1024 * (1 + value.size / 16));
      return container.text().find(value.text()) != std::string_view::npos;
    case Kind::dict:
      if (!hashable(value, budget)) error(fmt::format("unhashable type: '{}'", type_name(value)));
      return find(container.dict->entries, container.dict->size, value, budget) != nullptr;
    case Kind::list: {
      const Items items = iterate(container);
      for (size_t i = 0; i < items.size; ++i)
        if (equal(items.data[i], value, budget)) return true;
      return false;
    }
    default:
      error(fmt::format("argument of type '{}' is not iterable", type_name(container)));
  }
}

bool Machine::compare(Comparison op, const Value& a, const Value& b) {
  const auto ordered = [&](std::string_view sign) {
    if (a.is(Kind::undefined)) error(missing_text(a));
    if (b.is(Kind::undefined)) error(missing_text(b));
    return order(a, b, sign, budget);
  };
  switch (op) {
    case Comparison::equal:
      return equal(a, b, budget);
    case Comparison::unequal:
      return !equal(a, b, budget);
    case Comparison::less:
      return ordered("<") < 0;
    case Comparison::less_equal:
      return ordered("<=") <= 0;
    case Comparison::greater:
      return ordered(">") > 0;
    case Comparison::greater_equal:
      return ordered(">=") >= 0;
    case Comparison::in:
      return contains(b, a);
    case Comparison::not_in:
      return !contains(b, a);
  }
  return false;
}

Value Machine::comparison(const Expression& e) {
  Value left = evaluate(*e.a);
  for (size_t i = 0; i < e.items.size(); ++i) {
    const Value right = evaluate(*e.items[i]);
    if (!compare(e.comparisons[i], left, right)) return Value::of(false);
    left = right;
  }
  return Value::of(true);
}

Value Machine::sequence(const Expression& e) {
  if (e.op != Op::dict) {
    Value* const items = arena.array<Value>(e.items.size());
    for (size_t i = 0; i < e.items.size(); ++i) new (items + i) Value(evaluate(*e.items[i]));
    return Value::of(
        arena.make(List{items, e.items.size(), e.op == Op::list ? Flavor::list : Flavor::tuple}));
  }
  Buffer<Entry> entries;
  for (size_t i = 0; i < e.items.size(); i += 2) {
    const Value key = evaluate(*e.items[i]);
    const Value value = evaluate(*e.items[i + 1]);
    if (!hashable(key, budget)) error(fmt::format("unhashable type: '{}'", type_name(key)));
    if (const Value* const known = find(entries.data, entries.size, key, budget))
      const_cast<Value&>(*known) = value;
    else
      entries.push(arena, {key, value});
  }
  return Value::of(arena.make(Dict{entries.data, entries.size}));
}

Value Machine::evaluate(const Expression& e) {
  const Nesting nesting(depth_);
  budget.spend(1);
  switch (e.op) {
    case Op::constant:
      return e.value;
    case Op::name:
      return name(e);
    case Op::attribute: {
      const Value object = evaluate(*e.a);
      at_ = e.at;
      return attribute(object, e.value, e.method);
    }
    case Op::item: {
      const Value object = evaluate(*e.a), key = evaluate(*e.b);
      at_ = e.at;
      return item(object, key);
    }
    case Op::logical_not:
      return Value::of(!truth(evaluate(*e.a)));
    case Op::logical_and: {
      const Value left = evaluate(*e.a);
      return truth(left) ? evaluate(*e.b) : left;
    }
    case Op::logical_or: {
      const Value left = evaluate(*e.a);
      return truth(left) ? left : evaluate(*e.b);
    }
    case Op::compare:
      return comparison(e);
    case Op::test: {
      const Value subject = evaluate(*e.a);
      const Arguments given = arguments(e);
      at_ = e.at;
      return Value::of(apply_test(*this, e.test, subject, given));
    }
    case Op::filter: {
      const Value subject = evaluate(*e.a);
      const Arguments given = arguments(e);
      at_ = e.at;
      return apply_filter(*this, e.filter, subject, given);
    }
    case Op::call:
      return call(e, false);
    default:
      return evaluate_rare(e);
  }
}

Value Machine::evaluate_rare(const Expression& e) {
  switch (e.op) {
    case Op::block_text:
      return block_text_;
    case Op::slice:
      return slice(e);
    case Op::list:
    case Op::tuple:
    case Op::dict:
      return sequence(e);
    case Op::conditional:
      if (truth(evaluate(*e.b))) return evaluate(*e.a);
      return e.c ? evaluate(*e.c)
                 : missing(
                       Missing::What::text, {},
                       Value::of(std::string_view("the inline if-expression evaluated to false and no else "
                                                  "section was defined.")));
    case Op::add:
    case Op::concat:
      return join_text(e);
    default:
      return arithmetic(e);
  }
}

void Machine::append_operand(const Value& operand, bool& safe, size_t begin) {
  if (operand.safe && !safe) {
    const std::string escaped = escape_html(std::string_view(out_).substr(begin));
    out_.resize(begin);
    append(escaped);
    safe = true;
  }
  budget.spend_bytes(operand.size);
  append(safe && !operand.safe ? escape_html(operand.text()) : operand.text());
}

// Appends a sum of strings to the output, left to right, without making the partial sums. Returns false, with
// the value in `other`, if the sum is not a string; the output is unchanged then.
bool Machine::append_sum(const Expression& e, bool& safe, Value& other) {
  const Nesting nesting(depth_);
  budget.spend(1);
  const size_t begin = out_.size();
  if (e.op != Op::add) {
    other = evaluate(e);
    if (!other.is(Kind::string)) return false;
    safe = other.safe;
    append(other.text());
    return true;
  }
  const bool is_text = append_sum(*e.a, safe, other);
  const Value right = evaluate(*e.b);
  at_ = e.at;
  if (is_text && right.is(Kind::string)) {
    append_operand(right, safe, begin);
    return true;
  }
  const Value left = is_text ? take_text(begin, safe) : other;
  other = sum(left, right);
  if (!other.is(Kind::string)) return false;
  safe = other.safe;
  append(other.text());
  return true;
}

// The value of + or ~, which is built at the end of the output.
Value Machine::join_text(const Expression& e) {
  const size_t begin = out_.size();
  bool safe = false;
  Value other;
  ++captures_;
  if (e.op == Op::add) {
    const bool is_text = append_sum(e, safe, other);
    --captures_;
    return is_text ? take_text(begin, safe) : other;
  }
  for (const Expression* item : e.items) output(*item);
  --captures_;
  return take_text(begin);
}

void Machine::output(const Expression& e) {
  const Nesting nesting(depth_);
  switch (e.op) {
    case Op::add: {
      bool safe = false;
      Value other;
      if (!append_sum(e, safe, other)) print(out_, other);
      return check_text(out_.size());
    }
    case Op::concat:
      for (const Expression* item : e.items) output(*item);
      return;
    case Op::conditional:
      if (truth(evaluate(*e.b)))
        output(*e.a);
      else if (e.c)
        output(*e.c);
      return;
    case Op::call: {
      const Value value = call(e, true);
      if (!value.is(Kind::string)) return print(out_, value);
      return append(value.text());
    }
    default: {
      const Value value = evaluate(e);
      if (!value.is(Kind::string)) return print(out_, value);
      budget.spend_bytes(value.size);
      append(value.text());
    }
  }
}

}  // namespace nrl::data::chat

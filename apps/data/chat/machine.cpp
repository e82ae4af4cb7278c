#include "apps/data/chat/machine.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "apps/data/chat/nesting.h"
#include "apps/data/chat/print.h"
#include "apps/data/unicode.h"
#include "core/base/error.h"

namespace nrl::data::chat {
namespace {

/// The error of raise_exception(), whose text is the template's own.
class Raised : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace

Machine::Machine(const ChatTemplate::Program& program, const std::tm* now, Rendered& rendered)
    : program_(program), now_(now), rendered_(rendered), out_(rendered.text) {
  frame_ = new_frame(nullptr);
}

void Machine::define(std::string_view name, const Value& value) {
  if (const auto id = program_.ids.find(name); id != program_.ids.end()) assign_name(id->second, value);
}

void Machine::run() {
  try {
    execute(program_.body);
  } catch (const Raised& raised) {
    throw Error(Exit::data, raised.what());
  } catch (const Error& e) {
    fail_at(program_.name, at_, e.what());
  }
}

void Machine::raise(std::string_view text) {
  throw Raised(std::string(text));
}

void Machine::error(const std::string& text) const {
  throw Error(Exit::data, text);
}

Value Machine::text(std::string_view bytes, bool safe) {
  check_text(bytes.size());
  budget.spend_bytes(bytes.size());
  return Value::of(arena.keep(bytes), safe);
}

Value Machine::list(const std::vector<Value>& items, Flavor flavor) {
  Value* const data = arena.array<Value>(items.size());
  std::uninitialized_copy(items.begin(), items.end(), data);
  return Value::of(arena.make(List{data, items.size(), flavor}));
}

std::string_view Machine::string_of(const Value& value) {
  if (value.is(Kind::string)) return value.text();
  std::string printed;
  print(printed, value);
  return text(printed).text();
}

int64_t Machine::index_of(const Value& value) const {
  if (value.is(Kind::undefined)) error(missing_text(value));
  if (!value.is_whole())
    error(fmt::format("'{}' object cannot be interpreted as an integer", type_name(value)));
  return value.whole();
}

Items Machine::iterate(const Value& value) {
  switch (value.kind) {
    case Kind::undefined:
      return {};
    case Kind::list: {
      List& list = *value.list;
      if (list.flavor != Flavor::iterator) return {list.items, list.size};
      const size_t taken = std::exchange(list.taken, list.size);
      return {list.items + taken, list.size - taken};
    }
    case Kind::dict: {
      const Dict& dict = *value.dict;
      budget.spend(dict.size);
      Value* const keys = arena.array<Value>(dict.size);
      for (size_t i = 0; i < dict.size; ++i) new (keys + i) Value(dict.entries[i].key);
      return {keys, dict.size};
    }
    case Kind::string: {
      const std::string_view text = value.text();
      budget.spend(text.size());
      Buffer<Value> characters;
      for (size_t at = 0; at < text.size();) {
        const size_t begin = at;
        next_character(text, at);
        characters.push(arena, Value::of(text.substr(begin, at - begin)));
      }
      return {characters.data, characters.size};
    }
    default:
      error(fmt::format("'{}' object is not iterable", type_name(value)));
  }
}

Frame* Machine::new_frame(Frame* parent) {
  return arena.make(Frame{parent, {}, false});
}

Frame* Machine::reused_frame(Frame* frame) {
  if (frame->captured) return new_frame(frame->parent);
  frame->variables.size = 0;
  return frame;
}

void Machine::append(std::string_view text) {
  check_text(out_.size() + text.size());
  out_ += text;
}

Machine::Flow Machine::execute(const Body& body) {
  for (const Statement* statement : body) {
    if (statement->kind == Statement::Kind::text) {
      budget.spend(1);
      append(statement->text);
    } else if (const Flow flow = execute(*statement); flow != Flow::normal) {
      return flow;
    }
  }
  return Flow::normal;
}

Machine::Flow Machine::execute(const Statement& s) {
  const Nesting nesting(depth_);
  budget.spend(1);
  at_ = s.at;
  switch (s.kind) {
    case Statement::Kind::text:
      append(s.text);
      return Flow::normal;
    case Statement::Kind::output:
      output(*s.value);
      return Flow::normal;
    case Statement::Kind::branches:
      return run_branches(s);
    case Statement::Kind::loop:
      return run_loop(s);
    case Statement::Kind::set:
      assign(s.target, evaluate(*s.value));
      return Flow::normal;
    case Statement::Kind::set_block:
      set_block(s);
      return Flow::normal;
    case Statement::Kind::macro:
      define_macro(s);
      return Flow::normal;
    case Statement::Kind::leave:
      return Flow::leave;
    case Statement::Kind::next:
      return Flow::next;
    case Statement::Kind::generation:
      run_generation(s);
      return Flow::normal;
  }
  return Flow::normal;
}

Machine::Flow Machine::run_branches(const Statement& s) {
  for (const Branch& branch : s.branches)
    if (!branch.condition || truth(evaluate(*branch.condition))) return execute(branch.body);
  return Flow::normal;
}

void Machine::attribute_output() {
  if (captures_ > 0) return;
  if (owner_ >= 0 && out_.size() > owner_begin_) {
    Region& region = rendered_.messages[static_cast<size_t>(owner_)];
    if (region.begin == region.end) region.begin = owner_begin_;
    region.end = out_.size();
  }
  owner_begin_ = out_.size();
}

int64_t Machine::message_of(const Target& target, const Value& value) const {
  if (target.kind == Target::Kind::name) return value.is(Kind::dict) ? value.dict->message : -1;
  if (!value.is(Kind::list) || !value.list->is_indexed()) return -1;
  for (size_t i = 0; i < target.parts.size() && i < value.list->size; ++i)
    if (const int64_t message = message_of(target.parts[i], value.list->items[i]); message >= 0)
      return message;
  return -1;
}

const Value* Machine::fetch(Loop& loop, size_t index) {
  if (!loop.statement->filter) return index < loop.size ? loop.items + index : nullptr;
  while (loop.passed.size <= index && loop.scanned < loop.size) {
    const Value& candidate = loop.items[loop.scanned++];
    Frame* const before = std::exchange(frame_, new_frame(loop.scope));
    assign(loop.statement->target, candidate);
    if (truth(evaluate(*loop.statement->filter))) loop.passed.push(arena, candidate);
    frame_ = before;
  }
  return index < loop.passed.size ? loop.passed.data + index : nullptr;
}

Machine::Flow Machine::run_loop(const Statement& s) {
  const Items items = iterate(evaluate(*s.value));
  Frame* const outer = frame_;
  Loop* const loop = arena.make(Loop{&s, outer, items.data, items.size, 0, 0, {}});
  Value loop_value;
  loop_value.kind = Kind::loop;
  loop_value.loop = loop;
  Frame* frame = new_frame(outer);
  bool any = false;
  for (size_t i = 0;; ++i) {
    const Value* const current = fetch(*loop, i);
    if (!current) break;
    any = true;
    loop->index = i;
    budget.spend(1);
    frame_ = frame = reused_frame(frame);
    assign_name(s.name, loop_value);
    assign(s.target, *current);
    const int64_t message = message_of(s.target, *current);
    const int64_t owner = owner_;
    if (message >= 0) {
      attribute_output();
      owner_ = message;
    }
    const Flow flow = execute(s.body);
    if (message >= 0) {
      attribute_output();
      owner_ = owner;
    }
    frame_ = outer;
    if (flow == Flow::leave) break;
  }
  if (any) return Flow::normal;
  frame_ = new_frame(outer);
  const Flow flow = execute(s.otherwise);
  frame_ = outer;
  return flow;
}

Value Machine::loop_attribute(Loop& loop, const Value& key) {
  const std::string_view name = key.text();
  const auto whole = [](size_t n) { return Value::of(static_cast<int64_t>(n)); };
  const auto length = [&] {
    if (!loop.statement->filter) return loop.size;
    while (loop.scanned < loop.size) fetch(loop, loop.passed.size);
    return loop.passed.size;
  };
  if (name == "index0") return whole(loop.index);
  if (name == "index") return whole(loop.index + 1);
  if (name == "first") return Value::of(loop.index == 0);
  if (name == "last") return Value::of(fetch(loop, loop.index + 1) == nullptr);
  if (name == "length") return whole(length());
  if (name == "revindex") return whole(length() - loop.index);
  if (name == "revindex0") return whole(length() - loop.index - 1);
  if (name == "depth") return whole(1);
  if (name == "depth0") return whole(0);
  const auto outside = [&](std::string_view text) {
    return missing(Missing::What::text, {}, Value::of(text));
  };
  if (name == "previtem")
    return loop.index > 0 ? *fetch(loop, loop.index - 1) : outside("there is no previous item");
  if (name == "nextitem") {
    const Value* const next = fetch(loop, loop.index + 1);
    return next ? *next : outside("there is no next item");
  }
  Value self;
  self.kind = Kind::loop;
  self.loop = &loop;
  return missing(Missing::What::attribute, self, key);
}

Value Machine::take_text(size_t begin, bool safe) {
  const Value result = text(std::string_view(out_).substr(begin), safe);
  out_.resize(begin);
  return result;
}

void Machine::run_generation(const Statement& s) {
  const size_t begin = out_.size();
  Frame* const outer = std::exchange(frame_, new_frame(frame_));
  execute(s.body);
  frame_ = outer;
  if (captures_ == 0) rendered_.generation.push_back({begin, out_.size()});
}

void Machine::set_block(const Statement& s) {
  const size_t begin = out_.size();
  Frame* const outer = std::exchange(frame_, new_frame(frame_));
  ++captures_;
  execute(s.body);
  --captures_;
  frame_ = outer;
  block_text_ = take_text(begin);
  assign(s.target, evaluate(*s.value));
}

void Machine::assign_name(NameId name, const Value& value) {
  Buffer<Variable>& variables = frame_->variables;
  for (size_t i = 0; i < variables.size; ++i) {
    if (variables.data[i].name != name) continue;
    variables.data[i].value = value;
    return;
  }
  variables.push(arena, {name, value});
}

void Machine::assign(const Target& target, const Value& value) {
  if (target.kind == Target::Kind::name) return assign_name(target.name, value);
  if (target.kind == Target::Kind::tuple) {
    const Items items = iterate(value);
    const size_t wanted = target.parts.size();
    if (items.size < wanted)
      error(fmt::format("not enough values to unpack (expected {}, got {})", wanted, items.size));
    if (items.size > wanted) error(fmt::format("too many values to unpack (expected {})", wanted));
    for (size_t i = 0; i < wanted; ++i) assign(target.parts[i], items.data[i]);
    return;
  }
  const Value* const object = lookup(target.name);
  if (!object || !object->is(Kind::name_space)) error("cannot assign attribute on non-namespace object");
  set_attribute(*object->space, target.attribute, value);
}

void Machine::set_attribute(Namespace& space, std::string_view name, const Value& value) {
  if (name.starts_with('_'))
    error(
        fmt::format("Chat templates cannot store underscore-prefixed attributes on a namespace, but got "
                    "'{}'. Please rename the "
                    "attribute.",
                    name));
  const Value key = Value::of(name);
  if (const Value* const known = find(space.entries.data, space.entries.size, key, budget))
    const_cast<Value&>(*known) = value;
  else
    space.entries.push(arena, {key, value});
}

void Machine::define_macro(const Statement& s) {
  Value value;
  value.kind = Kind::macro;
  value.macro = arena.make(Macro{&s, frame_});
  for (Frame* frame = frame_; frame && !frame->captured; frame = frame->parent) frame->captured = true;
  assign_name(s.name, value);
}

void Machine::run_macro(const Macro& macro, const Arguments& arguments) {
  const Nesting nesting(depth_);
  const Statement& s = *macro.definition;
  const std::vector<Parameter>& parameters = s.parameters;
  if (arguments.size > parameters.size())
    error(fmt::format("macro '{}' takes not more than {} argument(s)", s.text, parameters.size()));
  Frame* const caller = std::exchange(frame_, new_frame(macro.scope));
  size_t used = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const std::string& name = program_.names[parameters[i].name];
    const Keyword* const keyword =
        std::find_if(arguments.keywords, arguments.keywords + arguments.keyword_count,
                     [&](const Keyword& k) { return k.name == name; });
    const bool named = keyword != arguments.keywords + arguments.keyword_count;
    used += named;
    Value value;
    if (i < arguments.size) {
      if (named) error(fmt::format("macro '{}' got multiple values for argument '{}'", s.text, name));
      value = arguments.items[i];
    } else if (named) {
      value = keyword->value;
    } else if (parameters[i].fallback) {
      value = evaluate(*parameters[i].fallback);
    } else {
      value = missing(Missing::What::text, {}, text(fmt::format("parameter '{}' was not provided", name)));
    }
    assign_name(parameters[i].name, value);
  }
  if (used < arguments.keyword_count) {
    for (size_t i = 0; i < arguments.keyword_count; ++i) {
      const auto is_this = [&](const Parameter& p) {
        return program_.names[p.name] == arguments.keywords[i].name;
      };
      if (std::none_of(parameters.begin(), parameters.end(), is_this))
        error(fmt::format("macro '{}' takes no keyword argument '{}'", s.text, arguments.keywords[i].name));
    }
  }
  execute(s.body);
  frame_ = caller;
}

}  // namespace nrl::data::chat

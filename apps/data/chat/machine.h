#pragma once
// Evaluates a parsed template for one conversation.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/data/chat/ast.h"
#include "apps/data/chat/builtins.h"
#include "apps/data/chat/chat_template.h"
#include "apps/data/chat/value.h"

namespace nrl::data::chat {

struct Variable {
  NameId name = 0;
  Value value;
};

/// The variables of a block; names that it lacks are looked up in its parent.
struct Frame {
  Frame* parent = nullptr;
  Buffer<Variable> variables;
  bool captured = false;  ///< a macro refers to it
};

struct Macro {
  const Statement* definition = nullptr;
  Frame* scope = nullptr;
};

/// The variable loop. Items that a condition rejects are left out; conditions are evaluated no earlier than
/// Jinja does.
struct Loop {
  const Statement* statement = nullptr;
  Frame* scope = nullptr;
  const Value* items = nullptr;
  size_t size = 0;
  size_t index = 0;      ///< of the current item among those that pass
  size_t scanned = 0;    ///< items whose condition is known; only with a condition
  Buffer<Value> passed;  ///< only with a condition
};

/// The items of an iterable.
struct Items {
  const Value* data = nullptr;
  size_t size = 0;
};

class Machine {
 public:
  Machine(const ChatTemplate::Program& program, const std::tm* now, Rendered& rendered);

  /// Defines a variable of the template; names that the template does not use are ignored.
  void define(std::string_view name, const Value& value);
  /// Renders into the result. Errors carry the place in the template.
  void run();

  // For filters, tests and methods.
  Arena arena;
  Budget budget;
  /// Throws Error (Exit::data); run() adds the place.
  [[noreturn]] void error(const std::string& text) const;
  /// A string in the arena.
  Value text(std::string_view bytes, bool safe = false);
  /// A new list.
  Value list(const std::vector<Value>& items, Flavor flavor = Flavor::list);
  /// The items of iter(value). Iterators are empty afterwards. Error (Exit::data) if it is not iterable.
  Items iterate(const Value& value);
  /// object[key] as Jinja evaluates it: an attribute if there is no such item; undefined if there is none.
  Value item(const Value& object, const Value& key);
  bool contains(const Value& container, const Value& value);
  /// str(value), which lies in the arena or in the value.
  std::string_view string_of(const Value& value);
  /// The value as a size or an index.
  int64_t index_of(const Value& value) const;
  const std::tm* now() const { return now_; }
  /// Throws the error of raise_exception(), to which run() adds nothing.
  [[noreturn]] static void raise(std::string_view text);

 private:
  enum class Flow : uint8_t { normal, leave, next };

  // machine.cpp: statements
  Flow execute(const Body& body);
  Flow execute(const Statement& statement);
  Flow run_branches(const Statement& statement);
  Flow run_loop(const Statement& statement);
  void run_generation(const Statement& statement);
  void set_block(const Statement& statement);
  void assign(const Target& target, const Value& value);
  void assign_name(NameId name, const Value& value);
  void set_attribute(Namespace& space, std::string_view name, const Value& value);
  Frame* new_frame(Frame* parent);
  Frame* reused_frame(Frame* frame);
  void define_macro(const Statement& statement);
  void run_macro(const Macro& macro, const Arguments& arguments);
  const Value* fetch(Loop& loop, size_t index);
  Value loop_attribute(Loop& loop, const Value& key);
  int64_t message_of(const Target& target, const Value& value) const;
  void attribute_output();
  void append(std::string_view text);

  // expressions.cpp
  void output(const Expression& e);
  Value evaluate(const Expression& e);
  Value evaluate_rare(const Expression& e);
  const Value* lookup(NameId name) const;
  Value name(const Expression& e);
  Value attribute(const Value& object, const Value& key, Method method);
  Value missing(Missing::What what, const Value& owner, const Value& key);
  Value bound(const Value& object, Method method);
  Value slice(const Expression& e);
  Value call(const Expression& e, bool into_output);
  Value call_value(const Value& callee, const Arguments& arguments, bool into_output);
  Arguments arguments(const Expression& e);
  Arguments unpacked(const Expression& e, const Arguments& given);
  Value comparison(const Expression& e);
  bool compare(Comparison op, const Value& a, const Value& b);
  Value arithmetic(const Expression& e);
  Value sum(const Value& a, const Value& b);
  Value product(const Value& a, const Value& b);
  bool append_sum(const Expression& e, bool& safe, Value& other);
  void append_operand(const Value& operand, bool& safe, size_t begin);
  Value join_text(const Expression& e);
  Value sequence(const Expression& e);
  Value take_text(size_t begin, bool safe = false);

  const ChatTemplate::Program& program_;
  const std::tm* const now_;
  Rendered& rendered_;
  std::string& out_;
  Frame* frame_ = nullptr;
  Place at_;
  int depth_ = 0;
  int captures_ = 0;  ///< texts under way that are not part of the output yet
  int64_t owner_ = -1;
  size_t owner_begin_ = 0;
  Value block_text_;
};

}  // namespace nrl::data::chat

#pragma once
// The parsed form of a template.

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "apps/data/chat/builtins.h"
#include "apps/data/chat/chat_template.h"
#include "apps/data/chat/lexer.h"
#include "apps/data/chat/value.h"

namespace nrl::data::chat {

/// Index into Program::names.
using NameId = uint32_t;

enum class Op : uint8_t {
  constant,
  block_text,  ///< the text of the block that is being set
  name,
  attribute,
  item,
  slice,
  call,
  filter,
  test,
  negative,
  positive,
  logical_not,
  logical_and,
  logical_or,
  compare,
  add,
  subtract,
  multiply,
  divide,
  floor_divide,
  modulo,
  concat,
  list,
  tuple,
  dict,
  conditional,
};

enum class Comparison : uint8_t { equal, unequal, less, less_equal, greater, greater_equal, in, not_in };

struct Expression;

struct KeywordArgument {
  std::string name;
  const Expression* value = nullptr;
};

/// Operands: `a` and `b`; of conditional: value `a` if `b`, else `c` (may be null). `items` are elements, the
/// arguments (`b`, `c`: the ones unpacked by * and **), the other operands of a comparison, or begin, end and
/// step of a slice (null: not given). A dict has its keys and values in turn.
struct Expression {
  Op op = Op::constant;
  Filter filter{};
  Test test{};
  Method method{};      ///< with the name of an attribute
  Function function{};  ///< with the name of a global
  Place at;
  int height = 1;
  NameId name = 0;
  const Expression *a = nullptr, *b = nullptr, *c = nullptr;
  std::vector<const Expression*> items;
  std::vector<Comparison> comparisons;
  std::vector<KeywordArgument> keywords;
  Value value;       ///< constant, or name of an attribute
  std::string text;  ///< bytes of `value`
};

/// The left side of an assignment: a name, an attribute of a namespace, or several targets.
struct Target {
  enum class Kind : uint8_t { name, attribute, tuple } kind = Kind::name;
  NameId name = 0;
  std::string attribute;
  std::vector<Target> parts;
};

struct Statement;
using Body = std::vector<const Statement*>;

struct Branch {
  const Expression* condition = nullptr;  ///< null: else
  Body body;
};

struct Parameter {
  NameId name = 0;
  const Expression* fallback = nullptr;
};

struct Statement {
  enum class Kind : uint8_t {
    text,
    output,
    branches,  ///< if
    loop,
    set,
    set_block,
    macro,
    leave,  ///< break
    next,   ///< continue
    generation,
  } kind = Kind::text;
  Place at;
  std::string text;
  const Expression* value = nullptr;   ///< of output and set; what a loop goes over; filters of a set block
  const Expression* filter = nullptr;  ///< condition of a loop
  Target target;
  Body body, otherwise;
  std::vector<Branch> branches;
  NameId name = 0;
  std::vector<Parameter> parameters;
};

}  // namespace nrl::data::chat

namespace nrl::data {

struct ChatTemplate::Program {
  std::string source, name;
  chat::Body body;
  std::vector<std::string> names;
  std::unordered_map<std::string_view, chat::NameId> ids;  ///< keys lie in `strings`
  bool has_generation = false;
  // Owners of the nodes; nodes refer to each other by address.
  std::deque<chat::Expression> expressions;
  std::deque<chat::Statement> statements;
  std::deque<std::string> strings;
};

}  // namespace nrl::data

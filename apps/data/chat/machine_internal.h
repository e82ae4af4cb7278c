#pragma once
// Parts of the machine that only its own sources use.

#include <stdexcept>
#include <string>
#include <string_view>

#include "apps/data/chat/machine.h"
#include "core/base/error.h"

namespace nrl::data::chat {

/// The error of raise_exception(), whose text is the template's own.
class Raised : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Bounds the recursion of statements, expressions and macros, which uses the stack.
class Machine::Nesting {
 public:
  static constexpr int most = 1000;

  explicit Nesting(Machine& machine) : machine_(machine) {
    if (machine_.depth_ >= most)
      machine_.error(fmt::format("evaluation is nested deeper than {} levels", most));
    ++machine_.depth_;
  }
  ~Nesting() { --machine_.depth_; }
  Nesting(const Nesting&) = delete;
  Nesting& operator=(const Nesting&) = delete;

 private:
  Machine& machine_;
};

/// namespace.NAME = value.
void set_attribute(Machine& machine, Namespace& space, std::string_view name, const Value& value);

}  // namespace nrl::data::chat

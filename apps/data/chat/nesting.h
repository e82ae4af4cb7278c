#pragma once
// Bounds the recursion of an evaluation, which uses the stack.

#include "core/base/error.h"

namespace nrl::data::chat {

/// One level of statements, expressions and macros while it lives. Error (Exit::data) beyond `most` levels.
class Nesting {
 public:
  static constexpr int most = 1000;

  explicit Nesting(int& depth) : depth_(depth) {
    if (depth_ >= most) fail(Exit::data, "evaluation is nested deeper than {} levels", most);
    ++depth_;
  }
  ~Nesting() { --depth_; }
  Nesting(const Nesting&) = delete;
  Nesting& operator=(const Nesting&) = delete;

 private:
  int& depth_;
};

}  // namespace nrl::data::chat

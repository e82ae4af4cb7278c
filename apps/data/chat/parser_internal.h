#pragma once
// The parser of expressions, on which the parser of statements builds.

#include <cstddef>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/data/chat/ast.h"
#include "apps/data/chat/lexer.h"

namespace nrl::data::chat {

class ExpressionParser {
 public:
  /// The tokens of program.source are read from the beginning.
  explicit ExpressionParser(ChatTemplate::Program& program);

 protected:
  // The current token and the next ones.
  const Token& now() const { return tokens_[at_]; }
  const Token& look() const { return tokens_[at_ + 1 < tokens_.size() ? at_ + 1 : at_]; }
  void advance() {
    if (at_ + 1 < tokens_.size()) ++at_;
  }
  bool skip(std::string_view symbol);
  bool skip_name(std::string_view word);
  void expect(std::string_view symbol);
  std::string expect_name(std::string_view what);
  [[noreturn]] void fail_here(std::string_view text) const;
  /// Throws the error that the current token is not what is expected.
  [[noreturn]] void unexpected(std::string_view expected) const;

  NameId name_id(std::string_view name);
  Expression& node(Op op, Place at);

  const Expression* expression(bool with_condition = true);
  /// An expression, or several with commas between them, which are a tuple.
  const Expression* tuple(bool with_condition);
  /// The filters "| name(...)" after `subject`.
  const Expression* filters(const Expression* subject);

  // Counts the levels of brackets, operators and statements.
  class Level {
   public:
    explicit Level(ExpressionParser& parser) : parser_(parser) {
      if (++parser_.level_ > 150) parser_.fail_here("nested too deeply; at most 150 levels are supported");
    }
    ~Level() { --parser_.level_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;

   private:
    ExpressionParser& parser_;
  };

  ChatTemplate::Program& program_;
  int macros_ = 0;  // enclosing macros

 private:
  const Expression* logical_or();
  const Expression* logical_and();
  const Expression* logical_not();
  const Expression* comparison();
  const Expression* sum();
  const Expression* concatenation();
  const Expression* product();
  const Expression* unary(bool with_filters);
  const Expression* primary();
  const Expression* postfix(const Expression* subject);
  const Expression* subscript(const Expression* subject);
  const Expression* call(const Expression* callee);
  const Expression* test(const Expression* subject);
  const Expression* elements(Op op, std::string_view end);
  const Expression* dict();
  const Expression* name();
  const Expression* text_constant(Place at, std::string text);
  void arguments(Expression& e);
  void check_named_builtin(const Expression& e) const;
  const Expression* finish(Expression& e);

  std::vector<Token> tokens_;
  size_t at_ = 0;
  int level_ = 0;
};

}  // namespace nrl::data::chat

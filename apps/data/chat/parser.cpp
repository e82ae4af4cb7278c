#include "apps/data/chat/parser.h"

#include <algorithm>
#include <array>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/data/chat/parser_internal.h"
#include "core/base/error.h"

namespace nrl::data::chat {
namespace {

constexpr std::array<std::string_view, 13> unsupported_statements = {
    "autoescape", "block",   "call",  "do",    "extends", "filter", "from",
    "import",     "include", "print", "trans", "with",    "debug"};

class Parser : public ExpressionParser {
 public:
  using ExpressionParser::ExpressionParser;

  void run() {
    program_.body = body({});
    if (now().kind != Token::Kind::end) fail_here("the statement has no beginning");
  }

 private:
  Statement& statement(Statement::Kind kind, Place at) {
    Statement& s = program_.statements.emplace_back();
    s.kind = kind;
    s.at = at;
    return s;
  }

  void end_tag() {
    if (now().kind != Token::Kind::block_end) unexpected("'%}'");
    advance();
  }

  // Statements up to one of `ends`, which is the current token afterwards; to the end of the template
  // without.
  Body body(std::span<const std::string_view> ends) {
    const Level level(*this);
    Body result;
    for (;;) {
      const Token& token = now();
      if (token.kind == Token::Kind::end) {
        if (ends.empty()) return result;
        fail_here(fmt::format("the template ends; expected {{% {} %}}", ends.back()));
      }
      if (token.kind == Token::Kind::text) {
        Statement& s = statement(Statement::Kind::text, token.at);
        s.text = token.text;
        result.push_back(&s);
        advance();
      } else if (token.kind == Token::Kind::variable_begin) {
        advance();
        Statement& s = statement(Statement::Kind::output, now().at);
        s.value = tuple(true);
        result.push_back(&s);
        if (now().kind != Token::Kind::variable_end) unexpected("'}}'");
        advance();
      } else {
        advance();
        if (now().kind == Token::Kind::name && std::find(ends.begin(), ends.end(), now().text) != ends.end())
          return result;
        result.push_back(next_statement());
        end_tag();
      }
    }
  }

  // The end of a tag before a body, which a colon may precede.
  void opening_end() {
    skip(":");
    end_tag();
  }

  // A body after the rest of its opening tag; skips the name of the closing one.
  Body block(std::string_view end) {
    opening_end();
    Body result = body({&end, 1});
    advance();
    return result;
  }

  const Statement* next_statement() {
    const Place at = now().at;
    const std::string word = expect_name("a statement");
    if (word == "if") return branches(at);
    if (word == "for") return loop(at);
    if (word == "set") return set(at);
    if (word == "macro") return macro(at);
    if (word == "generation") return generation(at);
    if (word == "break" || word == "continue") {
      if (loops_ == 0) fail_at(program_.name, at, fmt::format("'{}' outside of a loop", word));
      return &statement(word == "break" ? Statement::Kind::leave : Statement::Kind::next, at);
    }
    const bool known = std::find(unsupported_statements.begin(), unsupported_statements.end(), word) !=
                       unsupported_statements.end();
    fail_at(program_.name, at, fmt::format("{} statement '{}'", known ? "unsupported" : "unknown", word));
  }

  const Statement* branches(Place at) {
    constexpr std::array<std::string_view, 3> ends = {"elif", "else", "endif"};
    Statement& s = statement(Statement::Kind::branches, at);
    for (bool more = true; more;) {
      Branch& branch = s.branches.emplace_back();
      branch.condition = tuple(false);
      opening_end();
      branch.body = body(ends);
      more = skip_name("elif");
    }
    if (skip_name("else"))
      s.branches.emplace_back().body = block("endif");
    else
      advance();
    return &s;
  }

  const Statement* loop(Place at) {
    constexpr std::array<std::string_view, 2> ends = {"else", "endfor"};
    Statement& s = statement(Statement::Kind::loop, at);
    s.target = target("in", false);
    if (!skip_name("in")) unexpected("'in'");
    s.value = tuple(false);
    if (skip_name("if")) s.filter = expression();
    if (now().is_name("recursive")) fail_here("recursive loops are not supported");
    s.name = name_id("loop");
    opening_end();
    ++loops_;
    s.body = body(ends);
    --loops_;
    if (skip_name("else"))
      s.otherwise = block("endfor");
    else
      advance();
    return &s;
  }

  Target single_target(bool attributes) {
    Target result;
    if (skip("(")) {
      result = target(")", attributes);
      expect(")");
      return result;
    }
    const Place at = now().at;
    const std::string name = expect_name("a variable");
    if (name == "true" || name == "false" || name == "none" || name == "True" || name == "False" ||
        name == "None")
      fail_at(program_.name, at, fmt::format("'{}' cannot be set", name));
    result.name = name_id(name);
    if (attributes && skip(".")) {
      result.kind = Target::Kind::attribute;
      result.attribute = expect_name("the name of an attribute");
    }
    return result;
  }

  // One target, or several with commas between them; `end` may follow a last comma.
  Target target(std::string_view end, bool attributes) {
    const Level level(*this);
    Target first = single_target(attributes);
    if (!now().is(",")) return first;
    Target all;
    all.kind = Target::Kind::tuple;
    all.parts.push_back(std::move(first));
    while (skip(",") && !now().is(end) && !now().is_name(end)) all.parts.push_back(single_target(attributes));
    return all;
  }

  const Statement* set(Place at) {
    Statement& s = statement(Statement::Kind::set, at);
    s.target = target("=", true);
    if (skip("=")) {
      s.value = tuple(true);
      return &s;
    }
    s.kind = Statement::Kind::set_block;
    s.value = filters(&node(Op::block_text, at));
    const int loops = std::exchange(loops_, 0);
    s.body = block("endset");
    loops_ = loops;
    return &s;
  }

  const Statement* macro(Place at) {
    Statement& s = statement(Statement::Kind::macro, at);
    s.text = expect_name("the name of a macro");
    s.name = name_id(s.text);
    const int loops = std::exchange(loops_, 0);
    ++macros_;
    expect("(");
    while (!now().is(")")) {
      if (!s.parameters.empty()) expect(",");
      Parameter parameter;
      parameter.name = name_id(expect_name("the name of a parameter"));
      if (skip("="))
        parameter.fallback = expression();
      else if (!s.parameters.empty() && s.parameters.back().fallback)
        fail_here("a parameter without a default follows one with a default");
      s.parameters.push_back(parameter);
    }
    expect(")");
    s.body = block("endmacro");
    --macros_;
    loops_ = loops;
    return &s;
  }

  const Statement* generation(Place at) {
    Statement& s = statement(Statement::Kind::generation, at);
    program_.has_generation = true;
    const int loops = std::exchange(loops_, 0);
    s.body = block("endgeneration");
    loops_ = loops;
    return &s;
  }

  int loops_ = 0;  // enclosing loops that break and continue may leave
};

}  // namespace

std::shared_ptr<const ChatTemplate::Program> parse_template(std::string source, std::string name) {
  auto program = std::make_shared<ChatTemplate::Program>();
  program->source = std::move(source);
  program->name = std::move(name);
  Parser(*program).run();
  return program;
}

}  // namespace nrl::data::chat

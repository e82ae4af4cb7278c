#include <algorithm>
#include <array>
#include <optional>

#include "apps/data/chat/parser_internal.h"
#include "core/base/error.h"
#include "core/base/text.h"

namespace nrl::data::chat {
namespace {

constexpr int most_height = 400;  // of the tree of an expression, which is evaluated recursively

struct Sign {
  std::string_view text;
  Op op;
};
constexpr std::array sum_signs = {Sign{"+", Op::add}, Sign{"-", Op::subtract}};
constexpr std::array product_signs = {Sign{"*", Op::multiply}, Sign{"//", Op::floor_divide},
                                      Sign{"/", Op::divide}, Sign{"%", Op::modulo}};

struct ComparisonSign {
  std::string_view text;
  Comparison comparison;
};
constexpr std::array comparison_signs = {
    ComparisonSign{"==", Comparison::equal},  ComparisonSign{"!=", Comparison::unequal},
    ComparisonSign{"<", Comparison::less},    ComparisonSign{"<=", Comparison::less_equal},
    ComparisonSign{">", Comparison::greater}, ComparisonSign{">=", Comparison::greater_equal}};

std::string description(const Token& token) {
  switch (token.kind) {
    case Token::Kind::text:
      return "text";
    case Token::Kind::variable_begin:
      return "'{{'";
    case Token::Kind::variable_end:
      return "'}}'";
    case Token::Kind::block_begin:
      return "'{%'";
    case Token::Kind::block_end:
      return "'%}'";
    case Token::Kind::string:
      return "a string";
    case Token::Kind::end:
      return "the end of the template";
    default:
      return "'" + clipped(token.text, 40) + "'";
  }
}

}  // namespace

ExpressionParser::ExpressionParser(ChatTemplate::Program& program)
    : program_(program), tokens_(tokens_of(program.source, program.name)) {}

bool ExpressionParser::skip(std::string_view symbol) {
  if (!now().is(symbol)) return false;
  advance();
  return true;
}

bool ExpressionParser::skip_name(std::string_view word) {
  if (!now().is_name(word)) return false;
  advance();
  return true;
}

void ExpressionParser::expect(std::string_view symbol) {
  if (!skip(symbol)) unexpected(fmt::format("'{}'", symbol));
}

std::string ExpressionParser::expect_name(std::string_view what) {
  if (now().kind != Token::Kind::name) unexpected(what);
  std::string text = now().text;
  advance();
  return text;
}

void ExpressionParser::fail_here(std::string_view text) const {
  fail_at(program_.name, now().at, text);
}

void ExpressionParser::unexpected(std::string_view expected) const {
  fail_here(fmt::format("unexpected {}; expected {}", description(now()), expected));
}

NameId ExpressionParser::name_id(std::string_view name) {
  if (const auto known = program_.ids.find(name); known != program_.ids.end()) return known->second;
  const auto id = static_cast<NameId>(program_.names.size());
  program_.names.emplace_back(name);
  program_.ids.emplace(program_.strings.emplace_back(name), id);
  return id;
}

Expression& ExpressionParser::node(Op op, Place at) {
  Expression& e = program_.expressions.emplace_back();
  e.op = op;
  e.at = at;
  return e;
}

const Expression* ExpressionParser::finish(Expression& e) {
  const auto count = [&](const Expression* child) {
    if (child) e.height = std::max(e.height, child->height + 1);
  };
  count(e.a);
  count(e.b);
  count(e.c);
  for (const Expression* item : e.items) count(item);
  for (const KeywordArgument& keyword : e.keywords) count(keyword.value);
  if (e.height > most_height)
    fail_at(program_.name, e.at, fmt::format("the expression has more than {} levels", most_height));
  return &e;
}

const Expression* ExpressionParser::expression(bool with_condition) {
  const Level level(*this);
  const Expression* value = logical_or();
  while (with_condition && now().is_name("if")) {
    Expression& e = node(Op::conditional, now().at);
    advance();
    e.a = value;
    e.b = logical_or();
    if (skip_name("else")) e.c = expression();
    value = finish(e);
  }
  return value;
}

const Expression* ExpressionParser::tuple(bool with_condition) {
  const Place at = now().at;
  const Expression* const first = expression(with_condition);
  if (!now().is(",")) return first;
  Expression& e = node(Op::tuple, at);
  e.items.push_back(first);
  while (skip(",")) {
    const bool ends =
        now().kind == Token::Kind::variable_end || now().kind == Token::Kind::block_end || now().is(")");
    if (ends) break;
    e.items.push_back(expression(with_condition));
  }
  return finish(e);
}

const Expression* ExpressionParser::logical_or() {
  const Expression* left = logical_and();
  while (now().is_name("or")) {
    Expression& e = node(Op::logical_or, now().at);
    advance();
    e.a = left;
    e.b = logical_and();
    left = finish(e);
  }
  return left;
}

const Expression* ExpressionParser::logical_and() {
  const Expression* left = logical_not();
  while (now().is_name("and")) {
    Expression& e = node(Op::logical_and, now().at);
    advance();
    e.a = left;
    e.b = logical_not();
    left = finish(e);
  }
  return left;
}

const Expression* ExpressionParser::logical_not() {
  if (!now().is_name("not")) return comparison();
  const Level level(*this);
  Expression& e = node(Op::logical_not, now().at);
  advance();
  e.a = logical_not();
  return finish(e);
}

const Expression* ExpressionParser::comparison() {
  const Expression* const first = sum();
  Expression* e = nullptr;
  for (;;) {
    std::optional<Comparison> found;
    const Place at = now().at;
    for (const ComparisonSign& sign : comparison_signs)
      if (now().is(sign.text)) found = sign.comparison;
    if (now().is_name("in")) found = Comparison::in;
    if (now().is_name("not") && look().is_name("in")) {
      found = Comparison::not_in;
      advance();
    }
    if (!found) break;
    advance();
    if (!e) {
      e = &node(Op::compare, at);
      e->a = first;
    }
    e->comparisons.push_back(*found);
    e->items.push_back(sum());
  }
  return e ? finish(*e) : first;
}

const Expression* ExpressionParser::sum() {
  const Expression* left = concatenation();
  for (;;) {
    const auto sign =
        std::find_if(sum_signs.begin(), sum_signs.end(), [&](const Sign& s) { return now().is(s.text); });
    if (sign == sum_signs.end()) return left;
    Expression& e = node(sign->op, now().at);
    advance();
    e.a = left;
    e.b = concatenation();
    left = finish(e);
  }
}

const Expression* ExpressionParser::concatenation() {
  const Expression* const first = product();
  if (!now().is("~")) return first;
  Expression& e = node(Op::concat, now().at);
  e.items.push_back(first);
  while (skip("~")) e.items.push_back(product());
  return finish(e);
}

const Expression* ExpressionParser::product() {
  const Expression* left = unary(true);
  for (;;) {
    if (now().is("**")) fail_here("the operator ** is not supported");
    const auto sign = std::find_if(product_signs.begin(), product_signs.end(),
                                   [&](const Sign& s) { return now().is(s.text); });
    if (sign == product_signs.end()) return left;
    Expression& e = node(sign->op, now().at);
    advance();
    e.a = left;
    e.b = unary(true);
    left = finish(e);
  }
}

const Expression* ExpressionParser::unary(bool with_filters) {
  const Level level(*this);
  const Expression* value = nullptr;
  if (now().is("-") || now().is("+")) {
    Expression& e = node(now().is("-") ? Op::negative : Op::positive, now().at);
    advance();
    e.a = unary(false);
    value = finish(e);
  } else {
    value = primary();
  }
  value = postfix(value);
  while (with_filters) {
    if (now().is("|"))
      value = filters(value);
    else if (now().is_name("is"))
      value = test(value);
    else if (now().is("("))
      value = call(value);
    else
      break;
  }
  return value;
}

const Expression* ExpressionParser::text_constant(Place at, std::string text) {
  Expression& e = node(Op::constant, at);
  e.text = std::move(text);
  e.value = Value::of(e.text);
  return finish(e);
}

const Expression* ExpressionParser::primary() {
  const Token& token = now();
  const Place at = token.at;
  if (token.kind == Token::Kind::name) return name();
  if (token.kind == Token::Kind::string) {
    std::string text;
    for (; now().kind == Token::Kind::string; advance()) text += now().text;
    return text_constant(at, std::move(text));
  }
  if (token.kind == Token::Kind::integer || token.kind == Token::Kind::real) {
    Expression& e = node(Op::constant, at);
    e.value = token.kind == Token::Kind::real ? Value::of(token.real) : Value::of(token.integer);
    advance();
    return finish(e);
  }
  if (skip("[")) return elements(Op::list, "]");
  if (skip("{")) return dict();
  if (skip("(")) {
    if (now().is(")")) return elements(Op::tuple, ")");
    const Expression* const inner = tuple(true);
    expect(")");
    return inner;
  }
  unexpected("an expression");
}

const Expression* ExpressionParser::name() {
  const Place at = now().at;
  const std::string text = expect_name("a name");
  const bool is_true = text == "true" || text == "True";
  if (is_true || text == "false" || text == "False") {
    Expression& e = node(Op::constant, at);
    e.value = Value::of(is_true);
    return finish(e);
  }
  if (text == "none" || text == "None") return finish(node(Op::constant, at));
  const bool special = text == "varargs" || text == "kwargs" || text == "caller";
  if (special && macros_ > 0)
    fail_at(program_.name, at, fmt::format("'{}' in a macro is not supported", text));
  if (text == "cycler" || text == "joiner" || text == "lipsum" || text == "self" || text == "super")
    fail_at(program_.name, at, fmt::format("the global '{}' is not supported", text));
  Expression& e = node(Op::name, at);
  e.name = name_id(text);
  e.function = function_named(text);
  return finish(e);
}

const Expression* ExpressionParser::elements(Op op, std::string_view end) {
  Expression& e = node(op, now().at);
  while (!now().is(end)) {
    if (!e.items.empty()) expect(",");
    if (now().is(end)) break;
    e.items.push_back(expression());
  }
  expect(end);
  return finish(e);
}

const Expression* ExpressionParser::dict() {
  Expression& e = node(Op::dict, now().at);
  while (!now().is("}")) {
    if (!e.items.empty()) expect(",");
    if (now().is("}")) break;
    e.items.push_back(expression());
    expect(":");
    e.items.push_back(expression());
  }
  expect("}");
  return finish(e);
}

const Expression* ExpressionParser::postfix(const Expression* subject) {
  for (;;) {
    if (now().is(".") || now().is("["))
      subject = subscript(subject);
    else if (now().is("("))
      subject = call(subject);
    else
      return subject;
  }
}

const Expression* ExpressionParser::subscript(const Expression* subject) {
  const Place at = now().at;
  if (skip(".")) {
    if (now().kind == Token::Kind::integer) {
      Expression& e = node(Op::item, at);
      e.a = subject;
      e.b = primary();
      return finish(e);
    }
    Expression& e = node(Op::attribute, now().at);
    e.a = subject;
    e.text = expect_name("the name of an attribute");
    e.value = Value::of(e.text);
    e.method = method_named(e.text);
    return finish(e);
  }
  expect("[");
  const Expression* first = nullptr;
  if (!now().is(":")) {
    first = expression();
    if (now().is(",")) fail_here("an index with commas is not supported");
  }
  if (!now().is(":")) {
    expect("]");
    Expression& e = node(Op::item, at);
    e.a = subject;
    e.b = first;
    return finish(e);
  }
  Expression& e = node(Op::slice, at);
  e.a = subject;
  e.items = {first, nullptr, nullptr};
  for (size_t part = 1; part < 3 && skip(":"); ++part)
    if (!now().is(":") && !now().is("]")) e.items[part] = expression();
  expect("]");
  return finish(e);
}

void ExpressionParser::arguments(Expression& e) {
  expect("(");
  for (bool first = true; !now().is(")"); first = false) {
    if (!first) expect(",");
    if (now().is(")")) break;
    if (e.c) fail_here("an argument follows one with **");
    if (now().is("*") || now().is("**")) {
      const Expression*& unpacked = now().is("*") ? e.b : e.c;
      if (unpacked) fail_here("arguments are unpacked twice");
      advance();
      unpacked = expression();
      continue;
    }
    if (now().kind == Token::Kind::name && look().is("=")) {
      KeywordArgument keyword;
      keyword.name = expect_name("a name");
      expect("=");
      for (const KeywordArgument& other : e.keywords)
        if (other.name == keyword.name)
          fail_here(fmt::format("the argument '{}' is given twice", keyword.name));
      keyword.value = expression();
      e.keywords.push_back(std::move(keyword));
    } else {
      if (!e.keywords.empty() || e.b) fail_here("an argument without a name follows one with a name");
      e.items.push_back(expression());
    }
  }
  expect(")");
}

const Expression* ExpressionParser::call(const Expression* callee) {
  Expression& e = node(Op::call, now().at);
  if (callee->op == Op::attribute && callee->method == Method::unknown)
    fail_at(program_.name, callee->at, fmt::format("the method '{}' is not supported", callee->text));
  e.a = callee;
  arguments(e);
  return finish(e);
}

const Expression* ExpressionParser::filters(const Expression* subject) {
  while (now().is("|")) {
    advance();
    Expression& e = node(Op::filter, now().at);
    const std::string name = expect_name("the name of a filter");
    const auto filter = filter_named(name);
    if (!filter) fail_at(program_.name, e.at, fmt::format("the filter '{}' is not supported", name));
    e.filter = *filter;
    e.a = subject;
    if (now().is("(")) arguments(e);
    check_named_builtin(e);
    subject = finish(e);
  }
  return subject;
}

void ExpressionParser::check_named_builtin(const Expression& e) const {
  size_t index = 0;
  bool is_filter = false;
  switch (e.filter) {
    case Filter::map:
      is_filter = true;
      break;
    case Filter::select:
    case Filter::reject:
      break;
    case Filter::selectattr:
    case Filter::rejectattr:
      index = 1;
      break;
    default:
      return;
  }
  if (e.items.size() <= index || e.items[index]->op != Op::constant || e.items[index]->text.empty()) return;
  const std::string& name = e.items[index]->text;
  if (is_filter ? !filter_named(name) : !test_named(name))
    fail_at(program_.name, e.items[index]->at,
            fmt::format("the {} '{}' is not supported", is_filter ? "filter" : "test", name));
}

const Expression* ExpressionParser::test(const Expression* subject) {
  advance();
  const Place at = now().at;
  const bool negated = skip_name("not");
  Expression& e = node(Op::test, now().at);
  const std::string name = expect_name("the name of a test");
  const auto test = test_named(name);
  if (!test) fail_at(program_.name, e.at, fmt::format("the test '{}' is not supported", name));
  e.test = *test;
  e.a = subject;
  const auto begins_argument = [&] {
    if (now().kind == Token::Kind::name)
      return !now().is_name("else") && !now().is_name("or") && !now().is_name("and");
    return now().kind == Token::Kind::string || now().kind == Token::Kind::integer ||
           now().kind == Token::Kind::real || now().is("[") || now().is("{");
  };
  if (now().is("(")) {
    arguments(e);
  } else if (begins_argument()) {
    if (now().is_name("is")) fail_here("tests cannot be chained with 'is'");
    e.items.push_back(postfix(primary()));
  }
  finish(e);
  if (!negated) return &e;
  Expression& inverse = node(Op::logical_not, at);
  inverse.a = &e;
  return finish(inverse);
}

}  // namespace nrl::data::chat

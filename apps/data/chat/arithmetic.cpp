#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "apps/data/chat/machine.h"
#include "apps/data/chat/print.h"
#include "apps/data/chat/text.h"
#include "core/base/error.h"

namespace nrl::data::chat {
namespace {

std::string_view sign_of(Op op) {
  switch (op) {
    case Op::add:
      return "+";
    case Op::subtract:
      return "-";
    case Op::multiply:
      return "*";
    case Op::divide:
      return "/";
    case Op::floor_divide:
      return "//";
    default:
      return "%";
  }
}

[[noreturn]] void fail_operands(Op op, const Value& a, const Value& b) {
  fail(Exit::data, "unsupported operand type(s) for {}: '{}' and '{}'", sign_of(op), type_name(a),
       type_name(b));
}

void require_defined(const Value& a, const Value& b) {
  if (a.is(Kind::undefined)) fail(Exit::data, "{}", missing_text(a));
  if (b.is(Kind::undefined)) fail(Exit::data, "{}", missing_text(b));
}

int64_t whole_result(Op op, int64_t a, int64_t b) {
  int64_t result = 0;
  bool overflow = false;
  switch (op) {
    case Op::add:
      overflow = __builtin_add_overflow(a, b, &result);
      break;
    case Op::subtract:
      overflow = __builtin_sub_overflow(a, b, &result);
      break;
    case Op::multiply:
      overflow = __builtin_mul_overflow(a, b, &result);
      break;
    default:
      if (b == 0) fail(Exit::data, "integer division or modulo by zero");
      if (b == -1) {
        overflow = op == Op::floor_divide && __builtin_sub_overflow(int64_t{0}, a, &result);
        break;
      }
      // Python rounds down, C++ to zero.
      const bool adjust = a % b != 0 && (a < 0) != (b < 0);
      result = op == Op::floor_divide ? a / b - adjust : a % b + (adjust ? b : 0);
  }
  if (overflow) fail(Exit::data, "integers beyond 64 bits are not supported");
  return result;
}

double real_result(Op op, double a, double b) {
  switch (op) {
    case Op::add:
      return a + b;
    case Op::subtract:
      return a - b;
    case Op::multiply:
      return a * b;
    default:
      break;
  }
  if (b == 0)
    fail(Exit::data, "{}", op == Op::divide ? "float division by zero" : "float floor division by zero");
  if (op == Op::divide) return a / b;
  double rest = std::fmod(a, b);
  double quotient = (a - rest) / b;
  if (rest != 0) {
    if ((b < 0) != (rest < 0)) {
      rest += b;
      quotient -= 1;
    }
  } else {
    rest = std::copysign(0.0, b);
  }
  if (op == Op::modulo) return rest;
  if (quotient == 0) return std::copysign(0.0, a / b);
  const double down = std::floor(quotient);
  return quotient - down > 0.5 ? down + 1 : down;
}

Value number_result(Op op, const Value& a, const Value& b) {
  if (!a.is_whole() || !b.is_whole()) return Value::of(real_result(op, a.number(), b.number()));
  if (op != Op::divide) return Value::of(whole_result(op, a.whole(), b.whole()));
  if (b.whole() == 0) fail(Exit::data, "division by zero");
  // Rounded once, also beyond 2^53.
  return Value::of(
      static_cast<double>(static_cast<long double>(a.whole()) / static_cast<long double>(b.whole())));
}

}  // namespace

Value Machine::sum(const Value& a, const Value& b) {
  require_defined(a, b);
  if (a.is_number() && b.is_number()) return number_result(Op::add, a, b);
  if (a.is(Kind::string)) {
    if (!b.is(Kind::string)) error(fmt::format("can only concatenate str (not \"{}\") to str", type_name(b)));
    std::string joined = b.safe && !a.safe ? escape_html(a.text()) : std::string(a.text());
    joined += a.safe && !b.safe ? escape_html(b.text()) : b.text();
    return text(joined, a.safe || b.safe);
  }
  const auto is_plain = [](const Value& v) {
    return v.is(Kind::list) && (v.list->flavor == Flavor::list || v.list->flavor == Flavor::tuple);
  };
  if (!is_plain(a)) fail_operands(Op::add, a, b);
  if (!is_plain(b) || a.list->flavor != b.list->flavor)
    error(fmt::format("can only concatenate {0} (not \"{1}\") to {0}", type_name(a), type_name(b)));
  std::vector<Value> all(a.list->items, a.list->items + a.list->size);
  all.insert(all.end(), b.list->items, b.list->items + b.list->size);
  budget.spend(all.size() / 16);
  return list(all, a.list->flavor);
}

Value Machine::product(const Value& a, const Value& b) {
  const auto repeats = [](const Value& v) {
    return v.is(Kind::string) ||
           (v.is(Kind::list) && (v.list->flavor == Flavor::list || v.list->flavor == Flavor::tuple));
  };
  if (a.is_number() && b.is_number()) return number_result(Op::multiply, a, b);
  const bool swapped = a.is_whole() && repeats(b);
  if (!swapped && !(repeats(a) && b.is_whole())) {
    if (repeats(a) || repeats(b))
      error(fmt::format("can't multiply sequence by non-int of type '{}'", type_name(repeats(a) ? b : a)));
    fail_operands(Op::multiply, a, b);
  }
  const Value& part = swapped ? b : a;
  const int64_t wanted = swapped ? a.whole() : b.whole();
  const size_t size = part.is(Kind::string) ? part.size : part.list->size * sizeof(Value);
  const auto times = static_cast<uint64_t>(wanted > 0 && size > 0 ? wanted : 0);
  if (times > most_text / std::max<size_t>(size, 1)) check_text(most_text + 1);
  if (part.is(Kind::string)) {
    std::string repeated;
    repeated.reserve(size * times);
    for (uint64_t i = 0; i < times; ++i) repeated += part.text();
    return text(repeated, part.safe);
  }
  budget.spend(size * times / 256);
  std::vector<Value> repeated;
  for (uint64_t i = 0; i < times; ++i)
    repeated.insert(repeated.end(), part.list->items, part.list->items + part.list->size);
  return list(repeated, part.list->flavor);
}

Value Machine::arithmetic(const Expression& e) {
  const Value a = evaluate(*e.a);
  if (e.op == Op::negative || e.op == Op::positive) {
    at_ = e.at;
    if (a.is(Kind::undefined)) error(missing_text(a));
    if (!a.is_number())
      error(
          fmt::format("bad operand type for unary {}: '{}'", e.op == Op::negative ? '-' : '+', type_name(a)));
    if (e.op == Op::positive) return a.is(Kind::boolean) ? Value::of(a.whole()) : a;
    return a.is(Kind::real) ? Value::of(-a.real) : Value::of(whole_result(Op::subtract, 0, a.whole()));
  }
  const Value b = evaluate(*e.b);
  at_ = e.at;
  if (e.op == Op::modulo && a.is(Kind::string)) error("the formatting operator % is not supported");
  require_defined(a, b);
  if (e.op == Op::multiply) return product(a, b);
  if (!a.is_number() || !b.is_number()) fail_operands(e.op, a, b);
  return number_result(e.op, a, b);
}

}  // namespace nrl::data::chat

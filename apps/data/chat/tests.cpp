#include <cmath>
#include <cstdint>
#include <string_view>

#include "apps/data/chat/builtins.h"
#include "apps/data/chat/machine.h"
#include "apps/data/chat/print.h"
#include "apps/data/unicode.h"
#include "core/base/error.h"

namespace nrl::data::chat {
namespace {

/// Python's subject % divisor.
double remainder(Machine& machine, const Value& subject, const Value& divisor) {
  for (const Value* value : {&subject, &divisor})
    if (value->is(Kind::undefined)) machine.error(missing_text(*value));
  if (subject.is(Kind::string)) machine.error("not all arguments converted during string formatting");
  if (!subject.is_number() || !divisor.is_number())
    machine.error(fmt::format("unsupported operand type(s) for %: '{}' and '{}'", type_name(subject),
                              type_name(divisor)));
  if (divisor.number() == 0) machine.error("integer modulo by zero");
  if (subject.is_whole() && divisor.is_whole()) {
    const int64_t by = divisor.whole();
    const int64_t rest = by == -1 ? 0 : subject.whole() % by;
    return static_cast<double>(rest != 0 && (rest < 0) != (by < 0) ? rest + by : rest);
  }
  const double rest = std::fmod(subject.number(), divisor.number());
  return rest != 0 && (rest < 0) != (divisor.number() < 0) ? rest + divisor.number() : rest;
}

bool ordered(Machine& machine, Test test, const Value& a, const Value& b) {
  if (a.is(Kind::undefined)) machine.error(missing_text(a));
  if (b.is(Kind::undefined)) machine.error(missing_text(b));
  switch (test) {
    case Test::less:
      return order(a, b, "<", machine.budget) < 0;
    case Test::less_equal:
      return order(a, b, "<=", machine.budget) <= 0;
    case Test::greater:
      return order(a, b, ">", machine.budget) > 0;
    default:
      return order(a, b, ">=", machine.budget) >= 0;
  }
}

bool is_callable(const Value& value) {
  return value.is(Kind::macro) || value.is(Kind::method) || value.is(Kind::function) ||
         value.is(Kind::loop) || value.is(Kind::undefined);
}

bool has_case(Machine& machine, const Value& subject, bool upper) {
  const std::string_view text = machine.string_of(subject);
  bool any = false;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    if (!is_cased(next_character(text, at))) continue;
    any = true;
    const std::string_view letter = text.substr(begin, at - begin);
    if ((upper ? to_upper(letter) : to_lower(letter)) != letter) return false;
  }
  return any;
}

}  // namespace

bool apply_test(Machine& machine, Test test, const Value& subject, const Arguments& arguments) {
  const auto none = [&] { bind("the test", arguments, nullptr, 0, 0, nullptr); };
  const auto other = [&]() -> const Value& { return *bind<1>("the test", arguments, 1, {""})[0]; };
  switch (test) {
    case Test::defined:
      none();
      return !subject.is(Kind::undefined);
    case Test::undefined:
      none();
      return subject.is(Kind::undefined);
    case Test::none:
      none();
      return subject.is(Kind::none);
    case Test::boolean:
      none();
      return subject.is(Kind::boolean);
    case Test::is_true:
      none();
      return subject.is(Kind::boolean) && subject.boolean;
    case Test::is_false:
      none();
      return subject.is(Kind::boolean) && !subject.boolean;
    case Test::integer:
      none();
      return subject.is(Kind::integer);
    case Test::real:
      none();
      return subject.is(Kind::real);
    case Test::number:
      none();
      return subject.is_number();
    case Test::string:
      none();
      return subject.is(Kind::string);
    case Test::mapping:
      none();
      return subject.is(Kind::dict);
    case Test::callable:
      none();
      return is_callable(subject);
    case Test::iterable:
      none();
      return subject.is(Kind::string) || subject.is(Kind::list) || subject.is(Kind::dict) ||
             subject.is(Kind::loop) || subject.is(Kind::undefined);
    case Test::sequence:
      none();
      return subject.is(Kind::string) || subject.is(Kind::dict) || subject.is(Kind::undefined) ||
             (subject.is(Kind::list) && subject.list->is_indexed());
    case Test::equal:
      return equal(subject, other(), machine.budget);
    case Test::unequal:
      return !equal(subject, other(), machine.budget);
    case Test::less:
    case Test::less_equal:
    case Test::greater:
    case Test::greater_equal:
      return ordered(machine, test, subject, other());
    case Test::in:
      return machine.contains(other(), subject);
    case Test::odd:
      none();
      return remainder(machine, subject, Value::of(int64_t{2})) == 1;
    case Test::even:
      none();
      return remainder(machine, subject, Value::of(int64_t{2})) == 0;
    case Test::divisibleby:
      return remainder(machine, subject, other()) == 0;
    case Test::lower:
      none();
      return has_case(machine, subject, false);
    case Test::upper:
      none();
      return has_case(machine, subject, true);
  }
  return false;
}

}  // namespace nrl::data::chat

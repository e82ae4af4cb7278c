// Answers of calculations as texts (verifier.h).

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/reward/verifier.h"

namespace nrl::reward {
namespace {

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
}

/// The end of the group that begins at text[open] == '{' (behind its '}'); npos: it has none.
size_t group_end(std::string_view text, size_t open) {
  int depth = 0;
  for (size_t i = open; i < text.size(); ++i) {
    if (text[i] == '{') ++depth;
    if (text[i] == '}' && --depth == 0) return i + 1;
  }
  return std::string_view::npos;
}

/// Replaces \name{x} by x.
void unwrap(std::string& text, std::string_view name) {
  for (size_t at = 0; (at = text.find(name, at)) != std::string::npos;) {
    const size_t open = at + name.size(),
                 end = open < text.size() && text[open] == '{' ? group_end(text, open) : std::string::npos;
    if (end == std::string::npos) {
      at = open;
      continue;
    }
    text = text.substr(0, at) + text.substr(open + 1, end - open - 2) + text.substr(end);
  }
}

/// The next argument of a TeX command at `at`: a group or one character. Moves `at` behind it.
std::string argument(const std::string& text, size_t& at) {
  if (at >= text.size()) return {};
  if (text[at] != '{') return std::string(1, text[at++]);
  const size_t end = group_end(text, at);
  if (end == std::string::npos) return {};
  std::string out = text.substr(at + 1, end - at - 2);
  at = end;
  return out;
}

/// \frac{a}{b} to (a)/(b).
void plain_fractions(std::string& text) {
  constexpr std::string_view name = "\\frac";
  for (size_t at = 0; (at = text.find(name)) != std::string::npos;) {
    size_t end = at + name.size();
    const std::string above = argument(text, end), below = argument(text, end);
    if (above.empty() || below.empty()) return;
    const auto wrapped = [](const std::string& s) {
      return s.find_first_not_of("0123456789.") == std::string::npos ? s : "(" + s + ")";
    };
    text = text.substr(0, at) + wrapped(above) + "/" + wrapped(below) + text.substr(end);
  }
}

/// Without spaces, units and TeX's decorations.
std::string normalized(std::string text) {
  for (const std::string_view name : {"\\text", "\\mathrm", "\\textbf", "\\mathbf", "\\mbox"})
    unwrap(text, name);
  for (const std::string_view gone :
       {"\\left", "\\right", "\\!", "\\,", "\\;", "\\:", "\\ ", "\\$", "$", "\\(", "\\)", "\\[", "\\]",
        "^\\circ", "^{\\circ}", "\\circ", "\\degree"})
    replace_all(text, gone, "");
  replace_all(text, "\\dfrac", "\\frac");
  replace_all(text, "\\tfrac", "\\frac");
  replace_all(text, "\\{", "{");
  replace_all(text, "\\}", "}");
  replace_all(text, "\\%", "%");
  replace_all(text, "\\cdot", "*");
  replace_all(text, "\\times", "*");
  replace_all(text, "\\infty", "inf");
  replace_all(text, "\xe2\x88\x92", "-");  // the minus sign of Unicode
  plain_fractions(text);
  std::erase_if(text, [](char c) { return c == ' ' || c == '\n' || c == '\t'; });
  while (!text.empty() && (text.back() == '.' || text.back() == ',')) text.pop_back();
  if (const size_t equals = text.rfind('='); equals != std::string::npos && equals + 1 < text.size())
    text = text.substr(equals + 1);
  for (const std::string_view unit : {"degrees", "degree", "dollars", "cents", "meters", "hours", "minutes",
                                      "seconds", "units", "inches", "feet", "miles", "cm", "km", "kg", "mph"})
    if (text.size() > unit.size() && text.ends_with(unit) &&
        text.find_first_of("0123456789") != std::string::npos)
      text.resize(text.size() - unit.size());
  for (char& c : text)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return text;
}

__extension__ using Wide = __int128;

struct Fraction {
  Wide above = 0, below = 1;
};

/// A decimal number without exponent, with at most 18 digits; commas between groups of three digits.
std::optional<Fraction> decimal_fraction(std::string_view text) {
  Fraction f;
  bool negative = false, digits = false, point = false;
  int count = 0;
  if (!text.empty() && (text[0] == '-' || text[0] == '+')) {
    negative = text[0] == '-';
    text.remove_prefix(1);
  }
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == ',' && digits && !point) {
      const size_t end = std::min(text.find_first_not_of("0123456789", i + 1), text.size());
      if (end - i != 4) return std::nullopt;
      continue;
    }
    if (c == '.' && !point) {
      point = true;
      continue;
    }
    if (c < '0' || c > '9' || ++count > 18) return std::nullopt;
    digits = true;
    f.above = f.above * 10 + (c - '0');
    if (point) f.below *= 10;
  }
  if (!digits) return std::nullopt;
  if (negative) f.above = -f.above;
  return f;
}

/// a, a/b, (a)/(b), a%, as a fraction.
std::optional<Fraction> fraction(std::string_view text) {
  const auto inner = [](std::string_view s) {
    while (s.size() >= 2 && s.front() == '(' && s.back() == ')') s = s.substr(1, s.size() - 2);
    return s;
  };
  bool negative = false;
  if (text.starts_with("-") && text.find('/') != std::string_view::npos) {
    negative = true;
    text.remove_prefix(1);
  }
  const bool percent = text.ends_with('%');
  if (percent) text.remove_suffix(1);
  const size_t slash = text.find('/');
  auto above = decimal_fraction(inner(text.substr(0, slash)));
  if (!above) return std::nullopt;
  Fraction out = *above;
  if (slash != std::string_view::npos) {
    const auto below = decimal_fraction(inner(text.substr(slash + 1)));
    if (!below || below->above == 0) return std::nullopt;
    out = {out.above * below->below, out.below * below->above};
  }
  if (percent) out.below *= 100;
  if (negative) out.above = -out.above;
  return out;
}

bool equal(const Fraction& a, const Fraction& b) {
  const auto value = [](const Fraction& f) {
    return static_cast<double>(f.above) / static_cast<double>(f.below);
  };
  const auto reduced = [](Fraction f) {
    Wide x = f.above < 0 ? -f.above : f.above, y = f.below < 0 ? -f.below : f.below;
    while (y != 0) std::swap(x %= y, y);
    if (x == 0) x = 1;
    if (f.below < 0) x = -x;
    return Fraction{f.above / x, f.below / x};
  };
  const Fraction x = reduced(a), y = reduced(b);
  if (x.above == y.above && x.below == y.below) return true;
  return std::abs(value(a) - value(b)) <= 1e-6 * std::max(std::abs(value(a)), std::abs(value(b)));
}

/// The elements between commas on the first level.
std::vector<std::string> elements(std::string_view text) {
  std::vector<std::string> out(1);
  int depth = 0;
  for (const char c : text) {
    if (c == '(' || c == '[' || c == '{') ++depth;
    if (c == ')' || c == ']' || c == '}') --depth;
    if (c == ',' && depth == 0)
      out.emplace_back();
    else
      out.back().push_back(c);
  }
  return out;
}

bool same(const std::string& a, const std::string& b, int depth) {
  if (a == b) return true;
  if (const auto x = fraction(a), y = fraction(b); x && y) {
    if (equal(*x, *y)) return true;
    // A percentage may be stated as its number.
    if (a.ends_with('%') == b.ends_with('%')) return false;
    const auto number = [](const std::string& s) {
      return *fraction(std::string_view(s).substr(0, s.size() - (s.ends_with('%') ? 1 : 0)));
    };
    return equal(number(a), number(b));
  }
  constexpr std::string_view open = "([{", close = ")]}";
  const auto enclosed = [&](const std::string& s) {
    return s.size() >= 2 && open.find(s.front()) != open.npos && close.find(s.back()) != close.npos;
  };
  if (depth > 4 || !enclosed(a) || !enclosed(b) || a.front() != b.front() || a.back() != b.back())
    return false;
  std::vector<std::string> x = elements(std::string_view(a).substr(1, a.size() - 2)),
                           y = elements(std::string_view(b).substr(1, b.size() - 2));
  if (x.size() != y.size()) return false;
  if (a.front() != '{') {
    for (size_t i = 0; i < x.size(); ++i)
      if (!same(x[i], y[i], depth + 1)) return false;
    return true;
  }
  for (const std::string& element : x) {  // a set
    const auto found =
        std::ranges::find_if(y, [&](const std::string& other) { return same(element, other, depth + 1); });
    if (found == y.end()) return false;
    y.erase(found);
  }
  return true;
}

}  // namespace

bool same_answer(const std::string& a, const std::string& b) {
  constexpr size_t longest = 4096;
  if (a.size() > longest || b.size() > longest) return a == b;
  const std::string x = normalized(a), y = normalized(b);
  return !x.empty() && same(x, y, 0);
}

std::optional<std::string> last_boxed(const std::string& text) {
  for (const std::string_view name : {"\\boxed", "\\fbox"})
    for (size_t at = text.rfind(name); at != std::string::npos;
         at = at == 0 ? std::string::npos : text.rfind(name, at - 1)) {
      const size_t open = at + name.size();
      if (open >= text.size() || text[open] != '{') continue;
      if (const size_t end = group_end(text, open); end != std::string::npos)
        return text.substr(open + 1, end - open - 2);
    }
  return std::nullopt;
}

std::optional<std::string> last_number(const std::string& text) {
  const auto digit = [&](size_t i) { return i < text.size() && text[i] >= '0' && text[i] <= '9'; };
  const size_t last = text.find_last_of("0123456789");
  if (last == std::string::npos) return std::nullopt;
  size_t begin = last;
  bool point = false;
  while (begin > 0) {
    const size_t before = begin - 1;
    if (digit(before)) {
      begin = before;
    } else if (text[before] == '.' && !point && before > 0 && digit(before - 1)) {
      point = true;
      begin = before;
    } else if (text[before] == ',' && before > 0 && digit(before - 1) && digit(begin) && digit(begin + 1) &&
               digit(begin + 2)) {
      begin = before;
    } else {
      break;
    }
  }
  if (begin > 0 && text[begin - 1] == '-' && (begin == 1 || !digit(begin - 2))) --begin;
  std::string out = text.substr(begin, last + 1 - begin);
  std::erase(out, ',');
  return out;
}

}  // namespace nrl::reward

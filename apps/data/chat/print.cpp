#include "apps/data/chat/print.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <vector>

#include "apps/data/unicode.h"
#include "core/base/error.h"

namespace nrl::data::chat {
namespace {

constexpr std::string_view python_module = "transformers.utils.chat_template_utils.";

void check_nesting(int depth) {
  if (depth > most_value_depth) fail(Exit::data, "values are nested deeper than {} levels", most_value_depth);
}

void print_integer(std::string& out, int64_t value) {
  char digits[24];
  out.append(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
}

/// Python's float.__repr__: the shortest digits that read back as the same value.
void print_real(std::string& out, double value) {
  if (std::isnan(value)) {
    out += "nan";
    return;
  }
  if (std::signbit(value)) out += '-';
  if (std::isinf(value)) {
    out += "inf";
    return;
  }
  char text[40];
  const auto end =
      std::to_chars(text, text + sizeof text, std::fabs(value), std::chars_format::scientific).ptr;
  const std::string_view all(text, static_cast<size_t>(end - text));
  const size_t e = all.find('e');
  std::string digits(1, all[0]);
  if (e > 2) digits += all.substr(2, e - 2);
  int exponent = 0;
  const size_t sign = e + (all[e + 1] == '+' ? 2 : 1);  // from_chars takes no plus
  std::from_chars(text + sign, end, exponent);
  const int count = static_cast<int>(digits.size());
  if (exponent < -4 || exponent >= 16) {
    out += digits[0];
    if (count > 1) (out += '.').append(digits, 1);
    out += exponent < 0 ? "e-" : "e+";
    if (std::abs(exponent) < 10) out += '0';
    print_integer(out, std::abs(exponent));
  } else if (exponent < 0) {
    ((out += "0.").append(static_cast<size_t>(-exponent - 1), '0')) += digits;
  } else {
    const int whole = exponent + 1;
    out.append(digits, 0, static_cast<size_t>(std::min(whole, count)));
    if (whole >= count)
      out.append(static_cast<size_t>(whole - count), '0') += ".0";
    else
      (out += '.').append(digits, static_cast<size_t>(whole));
  }
}

void print_hex(std::string& out, std::string_view prefix, uint32_t value, int digits) {
  out += prefix;
  for (int shift = 4 * (digits - 1); shift >= 0; shift -= 4) out += "0123456789abcdef"[(value >> shift) & 15];
}

void print_quoted(std::string& out, std::string_view text) {
  const bool single = text.find('\'') == std::string_view::npos || text.find('"') != std::string_view::npos;
  const char quote = single ? '\'' : '"';
  out += quote;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    const char32_t c = next_character(text, at);
    if (c == '\\' || c == static_cast<char32_t>(quote))
      (out += '\\') += static_cast<char>(c);
    else if (c == '\n')
      out += "\\n";
    else if (c == '\r')
      out += "\\r";
    else if (c == '\t')
      out += "\\t";
    else if (c >= ' ' && c < 0x7F)
      out += static_cast<char>(c);
    else if (is_printable(c))
      out += text.substr(begin, at - begin);
    else if (c <= 0xFF)
      print_hex(out, "\\x", c, 2);
    else if (c <= 0xFFFF)
      print_hex(out, "\\u", c, 4);
    else
      print_hex(out, "\\U", c, 8);
  }
  out += quote;
}

void print_items(std::string& out, const Value* items, size_t size, int depth) {
  for (size_t i = 0; i < size; ++i) {
    if (i > 0) out += ", ";
    print_repr(out, items[i], depth + 1);
  }
}

void print_entries(std::string& out, const Entry* entries, size_t size, int depth) {
  out += '{';
  for (size_t i = 0; i < size; ++i) {
    if (i > 0) out += ", ";
    print_repr(out, entries[i].key, depth + 1);
    out += ": ";
    print_repr(out, entries[i].value, depth + 1);
  }
  out += '}';
}

void print_list(std::string& out, const List& list, int depth) {
  switch (list.flavor) {
    case Flavor::list:
      out += '[';
      print_items(out, list.items, list.size, depth);
      out += ']';
      return;
    case Flavor::tuple:
      out += '(';
      print_items(out, list.items, list.size, depth);
      out += list.size == 1 ? ",)" : ")";
      return;
    case Flavor::range:
      out += "range(";
      print_integer(out, list.start);
      out += ", ";
      print_integer(out, list.stop);
      if (list.step != 1) {
        out += ", ";
        print_integer(out, list.step);
      }
      out += ')';
      return;
    case Flavor::iterator:
      // Python prints an address, which no template can mean.
      fail(Exit::data, "a generator is printed; add the filter list");
    default:
      out += type_name(Value::of(const_cast<List*>(&list)));
      out += "([";
      print_items(out, list.items, list.size, depth);
      out += "])";
  }
}

void print_json_text(std::string& out, std::string_view text, bool ascii) {
  out += '"';
  for (size_t at = 0; at < text.size();) {
    const size_t plain = at;
    while (at < text.size() && text[at] != '"' && text[at] != '\\' && static_cast<uint8_t>(text[at]) >= ' ' &&
           !(ascii && static_cast<uint8_t>(text[at]) >= 0x80))
      ++at;
    out += text.substr(plain, at - plain);
    if (at == text.size()) break;
    const char32_t c = next_character(text, at);
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      case '\f':
        out += "\\f";
        break;
      case '\b':
        out += "\\b";
        break;
      default:
        if (c > 0xFFFF) {
          print_hex(out, "\\u", 0xD800 + ((c - 0x10000) >> 10), 4);
          print_hex(out, "\\u", 0xDC00 + ((c - 0x10000) & 0x3FF), 4);
        } else {
          print_hex(out, "\\u", c, 4);
        }
    }
  }
  out += '"';
}

/// The text of a key of a JSON object.
void json_key(std::string& key, const Value& value) {
  switch (value.kind) {
    case Kind::string:
      key = value.text();
      return;
    case Kind::none:
      key = "null";
      return;
    case Kind::boolean:
      key = value.boolean ? "true" : "false";
      return;
    case Kind::integer:
    case Kind::real:
      print_repr(key, value);
      return;
    default:
      fail(Exit::data, "keys must be str, int, float, bool or None, not {}", type_name(value));
  }
}

void new_line(std::string& out, const JsonStyle& style, int depth) {
  if (!style.indent) return;
  out += '\n';
  for (int i = 0; i < depth; ++i) out += *style.indent;
}

std::string object_name(const Value& value) {
  if (value.is(Kind::none)) return "None";
  std::string name(type_name(value));
  if (value.is(Kind::name_space)) name.insert(0, python_module);
  if (value.is(Kind::macro) || value.is(Kind::loop) || value.is(Kind::undefined))
    name.insert(0, "jinja2.runtime.");
  if (value.is(Kind::string) && value.safe) name.insert(0, "markupsafe.");
  return name + " object";
}

}  // namespace

void check_text(size_t bytes) {
  if (bytes > most_text) fail(Exit::data, "the template makes a text of more than {} MiB", most_text >> 20);
}

void print(std::string& out, const Value& value) {
  if (value.is(Kind::string))
    out += value.text();
  else if (!value.is(Kind::undefined))
    print_repr(out, value);
  check_text(out.size());
}

void print_repr(std::string& out, const Value& value, int depth) {
  check_nesting(depth);
  check_text(out.size());
  switch (value.kind) {
    case Kind::undefined:
      out += "Undefined";
      return;
    case Kind::none:
      out += "None";
      return;
    case Kind::boolean:
      out += value.boolean ? "True" : "False";
      return;
    case Kind::integer:
      print_integer(out, value.integer);
      return;
    case Kind::real:
      print_real(out, value.real);
      return;
    case Kind::string:
      if (value.safe) out += "Markup(";
      print_quoted(out, value.text());
      if (value.safe) out += ')';
      return;
    case Kind::list:
      print_list(out, *value.list, depth);
      return;
    case Kind::dict:
      print_entries(out, value.dict->entries, value.dict->size, depth);
      return;
    case Kind::name_space:
      out += "<Namespace ";
      print_entries(out, value.space->entries.data, value.space->entries.size, depth);
      out += '>';
      return;
    default:
      fail(Exit::data, "a {} is printed; call it", type_name(value));
  }
}

void print_json(std::string& out, const Value& value, const JsonStyle& style, Budget& budget, int depth) {
  check_nesting(depth);
  check_text(out.size());
  budget.spend(1);
  const auto separate = [&](size_t i) {
    if (i > 0) out += style.item_separator;
    new_line(out, style, depth + 1);
  };
  switch (value.kind) {
    case Kind::none:
      out += "null";
      return;
    case Kind::boolean:
      out += value.boolean ? "true" : "false";
      return;
    case Kind::integer:
      print_integer(out, value.integer);
      return;
    case Kind::real:
      if (std::isnan(value.real))
        out += "NaN";
      else if (std::isinf(value.real))
        out += value.real < 0 ? "-Infinity" : "Infinity";
      else
        print_real(out, value.real);
      return;
    case Kind::string:
      print_json_text(out, value.text(), style.ensure_ascii);
      return;
    case Kind::list:
      if (value.list->flavor != Flavor::list && value.list->flavor != Flavor::tuple) break;
      out += '[';
      for (size_t i = 0; i < value.list->size; ++i) {
        separate(i);
        print_json(out, value.list->items[i], style, budget, depth + 1);
      }
      if (value.list->size > 0) new_line(out, style, depth);
      out += ']';
      return;
    case Kind::dict: {
      std::vector<const Entry*> entries;
      for (size_t i = 0; i < value.dict->size; ++i) entries.push_back(value.dict->entries + i);
      if (style.sort_keys)
        std::stable_sort(entries.begin(), entries.end(), [&](const Entry* a, const Entry* b) {
          return order(a->key, b->key, "<", budget) < 0;
        });
      out += '{';
      std::string key;
      for (size_t i = 0; i < entries.size(); ++i) {
        separate(i);
        key.clear();
        json_key(key, entries[i]->key);
        print_json_text(out, key, style.ensure_ascii);
        out += style.key_separator;
        print_json(out, entries[i]->value, style, budget, depth + 1);
      }
      if (!entries.empty()) new_line(out, style, depth);
      out += '}';
      return;
    }
    default:
      break;
  }
  fail(Exit::data, "Object of type {} is not JSON serializable", type_name(value));
}

std::string missing_text(const Value& undefined) {
  if (!undefined.missing) return "a value is undefined";
  const Missing& missing = *undefined.missing;
  std::string key;
  switch (missing.what) {
    case Missing::What::name:
      return fmt::format("'{}' is undefined", missing.key.text());
    case Missing::What::attribute:
      print_repr(key, missing.key);
      return fmt::format("'{}' has no attribute {}", object_name(missing.owner), key);
    case Missing::What::element:
      print_repr(key, missing.key);
      return fmt::format("{} has no element {}", object_name(missing.owner), key);
    case Missing::What::text:
      return std::string(missing.key.text());
    case Missing::What::unsafe:
      return fmt::format("access to attribute '{}' of '{}' object is unsafe.", missing.key.text(),
                         type_name(missing.owner));
  }
  return {};
}

}  // namespace nrl::data::chat

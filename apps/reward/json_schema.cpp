#include "apps/reward/json_schema.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "core/base/error.h"
#include "core/base/text.h"

namespace nrl::reward {
namespace {

constexpr std::string_view type_names[] = {"object", "array",   "string", "integer",
                                           "number", "boolean", "null"};

bool is_type(const JsonValue& value, std::string_view type) {
  if (type == "object") return value.is_object();
  if (type == "array") return value.is_array();
  if (type == "string") return value.is_string();
  if (type == "number") return value.is_number();
  if (type == "boolean") return value.is_bool();
  if (type == "null") return value.is_null();
  return value.is_integer() || (value.is_number() && value.as_double() == std::floor(value.as_double()));
}

}  // namespace

void check_schema(const JsonValue& schema, const std::string& where) {
  if (!schema.is_object()) fail(Exit::config, "{}: expected a mapping, found {}", where, schema.kind());
  for (const JsonMember& member : schema.members()) {
    const std::string at = where + "." + member.key;
    const JsonValue& value = member.value;
    const auto texts = [&] {
      return value.is_array() &&
             std::ranges::all_of(value.items(), [](const JsonValue& v) { return v.is_string(); });
    };
    if (member.key == "type") {
      if (!value.is_string() || std::ranges::find(type_names, value.as_string()) == std::end(type_names))
        fail(Exit::config, "{}: expected {}", at, alternatives(type_names));
    } else if (member.key == "required") {
      if (!texts()) fail(Exit::config, "{}: expected a list of texts", at);
    } else if (member.key == "enum") {
      if (!value.is_array()) fail(Exit::config, "{}: expected a list", at);
    } else if (member.key == "items") {
      check_schema(value, at);
    } else if (member.key == "properties") {
      if (!value.is_object()) fail(Exit::config, "{}: expected a mapping", at);
      for (const JsonMember& property : value.members())
        check_schema(property.value, at + "." + property.key);
    } else {
      fail(Exit::config, "{} is not supported. Fix: type, required, properties, items or enum", at);
    }
  }
}

bool fits_schema(const JsonValue& value, const JsonValue& schema) {
  if (const JsonValue* type = schema.find("type"); type && !is_type(value, type->as_string())) return false;
  if (const JsonValue* allowed = schema.find("enum"))
    if (std::ranges::none_of(allowed->items(), [&](const JsonValue& v) { return v.dump() == value.dump(); }))
      return false;
  if (value.is_object()) {
    if (const JsonValue* required = schema.find("required"))
      for (const JsonValue& key : required->items())
        if (!value.contains(key.as_string())) return false;
    if (const JsonValue* properties = schema.find("properties"))
      for (const JsonMember& property : properties->members())
        if (const JsonValue* member = value.find(property.key);
            member && !fits_schema(*member, property.value))
          return false;
  }
  if (value.is_array())
    if (const JsonValue* items = schema.find("items"))
      return std::ranges::all_of(value.items(), [&](const JsonValue& v) { return fits_schema(v, *items); });
  return true;
}

}  // namespace nrl::reward

#include "core/io/json.h"

#include <cmath>
#include <limits>

#include "core/base/error.h"
#include "core/base/text.h"

namespace nrl {
namespace {

constexpr size_t index_from = 12;  // smaller objects are searched linearly

void dump_string(std::string& out, std::string_view s) {
  out += '"';
  while (!s.empty()) {
    const char c = s[0];
    const size_t length = utf8_length(s);
    if (length == 0) {
      out += "\\ufffd";  // only valid UTF-8 is ever written
    } else if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else if (c == '\r') {
      out += "\\r";
    } else if (static_cast<unsigned char>(c) < 0x20) {
      fmt::format_to(std::back_inserter(out), "\\u{:04x}", static_cast<unsigned>(c));
    } else {
      out += s.substr(0, length);
    }
    s.remove_prefix(length == 0 ? 1 : length);
  }
  out += '"';
}

void new_line(std::string& out, int indent, int level) {
  if (indent == 0) return;
  out += '\n';
  out.append(static_cast<size_t>(indent) * static_cast<size_t>(level), ' ');
}

}  // namespace

JsonObject::JsonObject() = default;
JsonObject::JsonObject(const JsonObject&) = default;
JsonObject::JsonObject(JsonObject&&) noexcept = default;
JsonObject& JsonObject::operator=(const JsonObject&) = default;
JsonObject& JsonObject::operator=(JsonObject&&) noexcept = default;
JsonObject::~JsonObject() = default;

size_t JsonObject::position(std::string_view key) const {
  if (members_.size() < index_from) {
    size_t i = 0;
    while (i < members_.size() && members_[i].key != key) ++i;
    return i;
  }
  const auto it = index_.find(key);
  return it == index_.end() ? members_.size() : it->second;
}

const JsonValue* JsonObject::find(std::string_view key) const {
  const size_t i = position(key);
  return i == members_.size() ? nullptr : &members_[i].value;
}

JsonValue* JsonObject::find(std::string_view key) {
  return const_cast<JsonValue*>(static_cast<const JsonObject*>(this)->find(key));
}

JsonValue& JsonObject::set(std::string key, JsonValue value) {
  if (JsonValue* old = find(key); old != nullptr) return *old = std::move(value);
  members_.push_back({std::move(key), std::move(value)});
  if (members_.size() == index_from) {
    for (size_t i = 0; i < members_.size(); ++i) index_.emplace(members_[i].key, i);
  } else if (members_.size() > index_from) {
    index_.emplace(members_.back().key, members_.size() - 1);
  }
  return members_.back().value;
}

size_t JsonObject::size() const {
  return members_.size();
}
std::vector<JsonMember>::const_iterator JsonObject::begin() const {
  return members_.begin();
}
std::vector<JsonMember>::const_iterator JsonObject::end() const {
  return members_.end();
}

JsonValue JsonValue::object(std::initializer_list<std::pair<std::string, JsonValue>> members) {
  JsonObject o;
  for (const auto& [key, value] : members) o.set(key, value);
  return JsonValue(std::move(o));
}

void JsonValue::set_unsigned(uint64_t value) {
  if (value <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    data_ = static_cast<int64_t>(value);
  } else {
    data_ = value;
  }
}

std::string_view JsonValue::kind() const {
  constexpr std::string_view names[] = {"null",     "a boolean", "an integer", "an integer",
                                        "a number", "a string",  "an array",   "an object"};
  return names[data_.index()];
}

std::string JsonValue::where() const {
  return source_ == nullptr ? std::string() : fmt::format("{}:{}:{}: ", *source_, line_, column_);
}

void JsonValue::set_place(std::shared_ptr<const std::string> source, uint32_t line, uint32_t column) {
  source_ = std::move(source);
  line_ = line;
  column_ = column;
}

void JsonValue::wrong_kind(std::string_view wanted, std::string_view key) const {
  if (key.empty()) fail(Exit::data, "{}expected {}, found {}", where(), wanted, kind());
  fail(Exit::data, "{}\"{}\" must be {}, not {}", where(), key, wanted, kind());
}

int64_t JsonValue::to_int(std::string_view key) const {
  if (const auto* i = std::get_if<int64_t>(&data_)) return *i;
  wrong_kind("an integer in the range of int64", key);
}

uint64_t JsonValue::to_uint(std::string_view key) const {
  if (const auto* u = std::get_if<uint64_t>(&data_)) return *u;
  if (const auto* i = std::get_if<int64_t>(&data_); i != nullptr && *i >= 0) return static_cast<uint64_t>(*i);
  wrong_kind("an integer of zero or more", key);
}

bool JsonValue::as_bool() const {
  if (const auto* b = std::get_if<bool>(&data_)) return *b;
  wrong_kind("true or false");
}
int64_t JsonValue::as_int() const {
  return to_int({});
}
uint64_t JsonValue::as_uint() const {
  return to_uint({});
}
double JsonValue::as_double() const {
  if (const auto* d = std::get_if<double>(&data_)) return *d;
  if (const auto* i = std::get_if<int64_t>(&data_)) return static_cast<double>(*i);
  if (const auto* u = std::get_if<uint64_t>(&data_)) return static_cast<double>(*u);
  wrong_kind("a number");
}
const std::string& JsonValue::as_string() const {
  if (const auto* s = std::get_if<std::string>(&data_)) return *s;
  wrong_kind("a string");
}
const JsonValue::Array& JsonValue::items() const {
  if (const auto* a = std::get_if<Array>(&data_)) return *a;
  wrong_kind("an array");
}
JsonValue::Array& JsonValue::items() {
  return const_cast<Array&>(static_cast<const JsonValue*>(this)->items());
}
const JsonObject& JsonValue::members() const {
  if (const auto* o = std::get_if<JsonObject>(&data_)) return *o;
  wrong_kind("an object");
}
JsonObject& JsonValue::members() {
  return const_cast<JsonObject&>(static_cast<const JsonValue*>(this)->members());
}

const JsonValue* JsonValue::find(std::string_view key) const {
  return members().find(key);
}

const JsonValue& JsonValue::at(std::string_view key) const {
  const JsonValue* value = find(key);
  if (value == nullptr) fail(Exit::data, "{}the key \"{}\" is missing in this object", where(), key);
  return *value;
}

bool JsonValue::get_bool(std::string_view key) const {
  const JsonValue& v = at(key);
  if (!v.is_bool()) v.wrong_kind("true or false", key);
  return v.as_bool();
}
int64_t JsonValue::get_int(std::string_view key) const {
  return at(key).to_int(key);
}
uint64_t JsonValue::get_uint(std::string_view key) const {
  return at(key).to_uint(key);
}
double JsonValue::get_double(std::string_view key) const {
  const JsonValue& v = at(key);
  if (!v.is_number()) v.wrong_kind("a number", key);
  return v.as_double();
}
const std::string& JsonValue::get_string(std::string_view key) const {
  const JsonValue& v = at(key);
  if (!v.is_string()) v.wrong_kind("a string", key);
  return v.as_string();
}

namespace {
bool absent(const JsonValue& object, std::string_view key) {
  const JsonValue* v = object.find(key);
  return v == nullptr || v->is_null();
}
}  // namespace

bool JsonValue::get_bool(std::string_view key, bool fallback) const {
  return absent(*this, key) ? fallback : get_bool(key);
}
int64_t JsonValue::get_int(std::string_view key, int64_t fallback) const {
  return absent(*this, key) ? fallback : get_int(key);
}
double JsonValue::get_double(std::string_view key, double fallback) const {
  return absent(*this, key) ? fallback : get_double(key);
}
std::string JsonValue::get_string(std::string_view key, std::string_view fallback) const {
  return absent(*this, key) ? std::string(fallback) : get_string(key);
}

JsonValue& JsonValue::set(std::string key, JsonValue value) {
  if (is_null()) data_ = JsonObject();
  return members().set(std::move(key), std::move(value));
}

void JsonValue::push_back(JsonValue value) {
  if (is_null()) data_ = Array();
  items().push_back(std::move(value));
}

void JsonValue::dump_to(std::string& out, int indent, int level, NonFinite non_finite) const {
  if (is_null()) {
    out += "null";
  } else if (is_bool()) {
    out += as_bool() ? "true" : "false";
  } else if (const auto* i = std::get_if<int64_t>(&data_)) {
    fmt::format_to(std::back_inserter(out), "{}", *i);
  } else if (const auto* u = std::get_if<uint64_t>(&data_)) {
    fmt::format_to(std::back_inserter(out), "{}", *u);
  } else if (const auto* d = std::get_if<double>(&data_)) {
    if (!std::isfinite(*d)) {
      if (non_finite == NonFinite::refuse) fail(Exit::internal, "JSON cannot hold the number {}", *d);
      out += "null";
    } else {
      const std::string text = fmt::format("{}", *d);
      out += text;
      // "1" would parse as an integer.
      if (text.find_first_of(".e") == std::string::npos) out += ".0";
    }
  } else if (is_string()) {
    dump_string(out, as_string());
  } else if (is_array()) {
    out += '[';
    bool first = true;
    for (const JsonValue& v : items()) {
      if (!first) out += ',';
      first = false;
      new_line(out, indent, level + 1);
      v.dump_to(out, indent, level + 1, non_finite);
    }
    if (!first) new_line(out, indent, level);
    out += ']';
  } else {
    out += '{';
    bool first = true;
    for (const JsonMember& m : members()) {
      if (!first) out += ',';
      first = false;
      new_line(out, indent, level + 1);
      dump_string(out, m.key);
      out += indent == 0 ? ":" : ": ";
      m.value.dump_to(out, indent, level + 1, non_finite);
    }
    if (!first) new_line(out, indent, level);
    out += '}';
  }
}

std::string JsonValue::dump(int indent, NonFinite non_finite) const {
  std::string out;
  dump_to(out, indent, 0, non_finite);
  return out;
}

}  // namespace nrl

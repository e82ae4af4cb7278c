#pragma once
// JSON (RFC 8259) values: strict parsing of untrusted text with exact error positions, ordered writing.

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace nrl {

class JsonValue;
struct JsonMember;

/// The members of a JSON object in insertion order; look-up by key is O(1).
class JsonObject {
 public:
  JsonObject();
  JsonObject(const JsonObject&);
  JsonObject(JsonObject&&) noexcept;
  JsonObject& operator=(const JsonObject&);
  JsonObject& operator=(JsonObject&&) noexcept;
  ~JsonObject();

  const JsonValue* find(std::string_view key) const;
  JsonValue* find(std::string_view key);
  /// Appends, or replaces the value of an existing key.
  JsonValue& set(std::string key, JsonValue value);
  size_t size() const;
  std::vector<JsonMember>::const_iterator begin() const;
  std::vector<JsonMember>::const_iterator end() const;

 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view s) const { return std::hash<std::string_view>()(s); }
  };
  size_t position(std::string_view key) const;  // size() when absent

  std::vector<JsonMember> members_;
  std::unordered_map<std::string, size_t, Hash, std::equal_to<>> index_;  // only used by large objects
};

/// One JSON value. A value from parse_json remembers its position, and every getter error is Exit::data
/// prefixed with "file:line:column: ". Integers are exact over the whole range of int64 and uint64; a number
/// with a fraction or an exponent is a double.
class JsonValue {
 public:
  using Array = std::vector<JsonValue>;

  JsonValue() = default;
  JsonValue(std::nullptr_t) {}
  template <std::same_as<bool> T>
  JsonValue(T value) : data_(value) {}
  template <std::integral T>
  requires(!std::same_as<T, bool>) JsonValue(T value) {
    if constexpr (std::is_unsigned_v<T>) {
      set_unsigned(value);
    } else {
      data_ = static_cast<int64_t>(value);
    }
  }
  JsonValue(double value) : data_(value) {}
  JsonValue(const char* value) : data_(std::string(value)) {}
  JsonValue(std::string value) : data_(std::move(value)) {}
  JsonValue(std::string_view value) : data_(std::string(value)) {}
  JsonValue(Array value) : data_(std::move(value)) {}
  JsonValue(JsonObject value) : data_(std::move(value)) {}
  template <class T>
  JsonValue(const std::vector<T>& values) : data_(Array(values.begin(), values.end())) {}

  /// {"a": 1, "b": [..]} in code: JsonValue::object({{"a", 1}, {"b", JsonValue::array({1, 2})}}).
  static JsonValue object(std::initializer_list<std::pair<std::string, JsonValue>> members = {});
  static JsonValue array(std::initializer_list<JsonValue> items = {}) { return JsonValue(Array(items)); }

  bool is_null() const { return std::holds_alternative<std::monostate>(data_); }
  bool is_bool() const { return std::holds_alternative<bool>(data_); }
  bool is_integer() const {
    return std::holds_alternative<int64_t>(data_) || std::holds_alternative<uint64_t>(data_);
  }
  bool is_number() const { return is_integer() || std::holds_alternative<double>(data_); }
  bool is_string() const { return std::holds_alternative<std::string>(data_); }
  bool is_array() const { return std::holds_alternative<Array>(data_); }
  bool is_object() const { return std::holds_alternative<JsonObject>(data_); }
  /// "null", "a boolean", "an integer", "a number", "a string", "an array", "an object".
  std::string_view kind() const;

  // Typed access; another kind or an integer out of range is an error that names the position.
  bool as_bool() const;
  int64_t as_int() const;
  uint64_t as_uint() const;
  double as_double() const;  ///< integers too
  const std::string& as_string() const;
  const Array& items() const;
  Array& items();
  const JsonObject& members() const;
  JsonObject& members();

  // Members of an object, by key; the error names the key. The two-argument forms give `fallback` when the
  // key is absent or null.
  const JsonValue& at(std::string_view key) const;
  const JsonValue* find(std::string_view key) const;  ///< nullptr when absent
  bool contains(std::string_view key) const { return find(key) != nullptr; }
  bool get_bool(std::string_view key) const;
  int64_t get_int(std::string_view key) const;
  uint64_t get_uint(std::string_view key) const;
  double get_double(std::string_view key) const;
  const std::string& get_string(std::string_view key) const;
  bool get_bool(std::string_view key, bool fallback) const;
  int64_t get_int(std::string_view key, int64_t fallback) const;
  double get_double(std::string_view key, double fallback) const;
  std::string get_string(std::string_view key, std::string_view fallback) const;
  /// Adds or replaces a member; turns null into an object first.
  JsonValue& set(std::string key, JsonValue value);
  /// Appends to an array; turns null into an array first.
  void push_back(JsonValue value);

  enum class NonFinite { write_null, refuse };
  /// Compact text, or indented by `indent` spaces per level. Doubles are written in the shortest
  /// form that round-trips. NaN and infinity are not valid JSON: written as null (for metrics), or
  /// refused with Exit::internal.
  std::string dump(int indent = 0, NonFinite non_finite = NonFinite::write_null) const;

  /// "file:line:column: " of a parsed value, "" of one made in memory. For errors about the value's meaning.
  std::string where() const;

  /// Set by the parser.
  void set_place(std::shared_ptr<const std::string> source, uint32_t line, uint32_t column);

 private:
  void set_unsigned(uint64_t value);
  void dump_to(std::string& out, int indent, int level, NonFinite non_finite) const;
  [[noreturn]] void wrong_kind(std::string_view wanted, std::string_view key = {}) const;
  int64_t to_int(std::string_view key) const;
  uint64_t to_uint(std::string_view key) const;

  std::variant<std::monostate, bool, int64_t, uint64_t, double, std::string, Array, JsonObject> data_;
  std::shared_ptr<const std::string> source_;
  uint32_t line_ = 0, column_ = 0;
};

/// One member of an object.
struct JsonMember {
  std::string key;
  JsonValue value;
};

/// Memory limits of a reader; a text beyond them is refused.
struct JsonLimits {
  int depth = 64;
  size_t string_bytes = size_t{1} << 20;
  size_t text_bytes = size_t{256} << 20;
  size_t values = size_t{4} << 20;
};

/// Parses one JSON text. Exit::data "source:line:column: ..." for anything but strict JSON, invalid
/// UTF-8, a byte order mark, NUL bytes, a duplicate key, or a limit exceeded. `source` names the
/// text in messages (a file's path).
JsonValue parse_json(std::string_view text, std::string_view source, const JsonLimits& limits = {});

/// Reads a file as JSON (Exit::no_input when it cannot be opened).
JsonValue read_json(const std::string& path, const JsonLimits& limits = {});

}  // namespace nrl

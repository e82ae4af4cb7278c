#pragma once
// Values of configuration keys: their grammar, and their canonical spelling. Internal to core/config.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace nrl::config_detail {

struct Null {
  bool operator==(const Null&) const = default;
};
struct Auto {
  bool operator==(const Auto&) const = default;
};
struct Value;
using List = std::vector<Value>;

/// One value; an enumerator is its spelling.
struct Value {
  std::variant<Null, Auto, bool, int64_t, double, std::string, List> v;
  bool operator==(const Value&) const = default;
};

/// Decimal integer without leading zeros, underscores or exponent; nullopt otherwise or when it does not fit.
std::optional<int64_t> parse_integer(std::string_view text);

/// The same with a size suffix: k, M, B (powers of 1000) or KiB, MiB, GiB (powers of 1024).
std::optional<int64_t> parse_size(std::string_view text);

/// Decimal number ("3", "0.1", "1e-5"); no NaN, no infinity, nothing out of range.
std::optional<double> parse_number(std::string_view text);

/// "true"/"false" in the spellings of YAML's core schema (True and TRUE too); not yes, no, on, off.
std::optional<bool> parse_boolean(std::string_view text);

/// Plain spellings of null: "", "~", "null", "Null", "NULL".
bool is_null_text(std::string_view text);

/// The shortest text that round-trips.
std::string number_text(double number);

/// Canonical YAML (flow style, one line).
std::string yaml_text(const Value& value);
/// The same for one text: quoted only if YAML or this grammar would read it as something else.
std::string yaml_string(std::string_view text);

/// JSON. `Auto` does not occur.
std::string json_text(const Value& value);
std::string json_string(std::string_view text);

}  // namespace nrl::config_detail

#pragma once
// A part of JSON Schema (2020-12): type, required, properties, items, enum.

#include <string>

#include "core/io/json.h"

namespace nrl::reward {

/// Throws Error (`config`), beginning with `where`, if the schema has other keywords or wrong values.
void check_schema(const JsonValue& schema, const std::string& where);
/// True if the value satisfies a schema that was checked.
bool fits_schema(const JsonValue& value, const JsonValue& schema);

}  // namespace nrl::reward

#pragma once
// The entries of the key `reward`: which functions judge completions, and how.

#include <string>
#include <vector>

#include "core/io/json.h"

namespace nrl::reward {

/// {"type": ..., "name": ..., "weight": ..., and options of the type}.
struct Spec {
  std::string where;  ///< "reward[0]"
  std::string type;
  std::string name;  ///< in metrics; the type unless given
  double weight = 1;
  JsonValue options;  ///< an object with the other members, whose names and types were checked
};

/// The texts of Config::reward, JSON objects or names of types. Throws Error (`config`) that names the entry
/// and the member, with a suggestion for a name that is misspelled.
std::vector<Spec> parse_specs(const std::vector<std::string>& texts);

}  // namespace nrl::reward

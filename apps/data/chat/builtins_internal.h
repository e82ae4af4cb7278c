#pragma once
// Functions that both filters and methods use.

#include <cstdint>
#include <string_view>

#include "apps/data/chat/builtins.h"
#include "apps/data/chat/value.h"

namespace nrl::data::chat {

/// str.replace() on a string, within the limits of the machine.
Value replace_bounded(Machine& machine, const Value& subject, std::string_view old, std::string_view by,
                      int64_t most);

/// dict.keys(), values() or items().
Value dict_view(Machine& machine, const Dict& dict, Flavor flavor);

/// The tuple (key, value).
Value pair_of(Machine& machine, const Entry& entry);

}  // namespace nrl::data::chat

#pragma once
// Checks between keys. Internal to core/config.

#include "core/config/load.h"

namespace nrl::config_detail {

/// Appends what is wrong between the keys, as far as it does not depend on the number of ranks.
/// Precondition: every key by itself is good.
void validate(ConfigResult& result);

}  // namespace nrl::config_detail

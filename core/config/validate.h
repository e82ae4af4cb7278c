#pragma once
// Checks between keys. Internal to core/config.

#include "core/config/result.h"

namespace nrl::config_detail {

/// What is wrong between the keys that are sound, as far as it does not depend on the number of ranks.
Diagnostics validate(const ConfigResult& result);

}  // namespace nrl::config_detail

#pragma once
// Checks between keys. Internal to core/config.

#include "core/config/result.h"

namespace nrl::config_detail {

/// Problems between sound keys that do not depend on the number of ranks.
Diagnostics validate(const ConfigResult& result);

}  // namespace nrl::config_detail

#pragma once
// Loads a configuration with a given option table. Internal to core/config.

#include "core/config/load.h"
#include "core/config/schema.h"

namespace nrl::config_detail {

/// load_config_text() with the keys of `schema`, and without the checks between keys.
ConfigResult load_text(const Schema& schema, std::string_view text, const std::string& name,
                       std::span<const std::string> overrides = {});

/// Problems between sound keys that do not depend on the number of ranks: core/config/rules.
Diagnostics validate(const ConfigResult& result);

}  // namespace nrl::config_detail

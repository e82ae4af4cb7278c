#pragma once
// Keys that have no effect without another key, by the needs in the option table. Internal to core/config.

#include <vector>

#include "core/config/result.h"
#include "core/config/schema.h"

namespace nrl::config_detail {

/// Keys whose value asks for something, although what they need (Key::needs) is missing.
struct IdleKeys {
  Diagnostics problems;            ///< without_effect()
  std::vector<const Key*> parked;  ///< keys of warnings: their values do not count
};
IdleKeys idle_keys(const ConfigResult& result);

}  // namespace nrl::config_detail

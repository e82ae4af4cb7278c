#pragma once
// The sinks that a configuration turns on.

#include <memory>
#include <vector>

#include "apps/monitor/sinks.h"
#include "core/config/config.h"

namespace nrl::monitor {

/// Opens them. One that cannot be opened is reported to `warn` and left out.
std::vector<std::unique_ptr<Sink>> open_sinks(const LoggerConfig& config, const RunInfo& run,
                                              const Sinks::Warn& warn);

}  // namespace nrl::monitor

#pragma once
// Checks between keys. Internal to core/config.

#include <span>

#include "core/base/cluster_node.h"
#include "core/config/result.h"

namespace nrl::config_detail {

/// Problems between sound keys that do not depend on the number of ranks.
Diagnostics validate(const ConfigResult& result);
/// The part of validate() for the pipeline's keys.
void check_pipeline(const ConfigResult& result, Diagnostics& out);

/// The section `cluster` against `world` ranks on `nodes`, in the launcher's order; empty: unknown.
Diagnostics validate_cluster(const ConfigResult& result, int64_t world, std::span<const ClusterNode> nodes);

/// Context parallelism: the length of samples, and the exchanges that are given.
Diagnostics validate_context_parallel(const ConfigResult& result);

}  // namespace nrl::config_detail

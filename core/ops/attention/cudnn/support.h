#pragma once
// Support checks of cuDNN graphs without a GPU, for tests.

#include <cstddef>
#include <string>

#include "core/ops/attention_engine.h"

namespace nrl::ops::attention {

struct CudnnSupport {
  std::string reason;    ///< empty: there is a plan
  int64_t plans = 0;     ///< candidates, those with too much workspace included
  size_t own_bytes = 0;  ///< workspace of our side and of the graph's own nodes, without the plan's
};

/// Builds the graph that the engine would build for `p` on the device that `device` describes (JSON, see
/// cuDNN's CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION) and compute capability 10 * major + minor, and asks
/// whether a plan fits into `workspace` bytes. Needs cuDNN 9.8 and a libcuda.so.1 that can be opened, be it
/// the toolkit's stub. Exit::unavailable when cuDNN cannot be loaded.
CudnnSupport cudnn_support(const Problem& p, const CudnnOptions& options, size_t workspace,
                           const std::string& device, int compute_capability);

}  // namespace nrl::ops::attention

#pragma once
// A table of rules says what versions of cuDNN are known to do wrong. No library is needed to ask it.

#include <string>

#include "core/ops/attention_engine.h"

namespace nrl::ops::attention {

/// The library and the device for which a problem is judged.
struct CudnnVersion {
  int version = 0;  ///< as of cudnnGetVersion(): 91900
  int major = 0;    ///< of the device's compute capability
};

/// Why this version must not run the problem; empty when it may.
std::string defect_reason(const Problem& p, const CudnnVersion& v);
/// Why its calls for the problem cannot be captured in a CUDA graph; empty when they can.
std::string uncapturable_reason(const Problem& p, const CudnnVersion& v);

/// "9.19.0"
std::string cudnn_version_text(int version);

}  // namespace nrl::ops::attention

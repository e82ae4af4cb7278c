#pragma once
// NVTX ranges of the domain "nrl-train". Implemented by nvtx.cpp, or by no_nvtx.cpp without the
// toolkit's headers.

#include "core/trace/recording.h"

namespace nrl::trace::detail {

/// True when a tool that reads NVTX is injected into this process.
bool nvtx_wanted();
/// `payload`: FLOPs or bytes; 0: none. The category is the kind.
void nvtx_push(const char* name, Kind kind, double payload);
void nvtx_pop();

}  // namespace nrl::trace::detail

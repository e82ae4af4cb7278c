#pragma once
// NVTX ranges of the domain "nrl-train". Implemented by nvtx.cpp, or by no_nvtx.cpp without the
// toolkit's headers.

namespace nrl::trace::detail {

/// True when a tool that reads NVTX is injected into this process.
bool nvtx_wanted();
void nvtx_push(const char* name);
void nvtx_pop();

}  // namespace nrl::trace::detail

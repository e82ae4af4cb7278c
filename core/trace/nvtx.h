#pragma once
// NVTX ranges of the domain "nrl-train". Two files implement it: nvtx.cpp with the toolkit's headers,
// no_nvtx.cpp without.

namespace nrl::trace::detail {

/// A tool that reads NVTX was put into this process.
bool nvtx_wanted();
void nvtx_push(const char* name);
void nvtx_pop();

}  // namespace nrl::trace::detail

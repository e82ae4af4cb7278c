#pragma once
// Traces in the JSON of Chrome, with the conventions of Kineto (PyTorch's profiler), so that Holistic Trace
// Analysis and TensorBoard's profiler plugin read them: steps are ProfilerStep#N, operations of the compute
// row are kernels on a stream with the call that launched them, communication is nccl:all_reduce on streams
// of its own. In a run on a CPU the operations are kernels, too, or these tools would find an idle device.

#include <string>

#include "apps/profile/recorded.h"

namespace nrl::profile {

/// Writes the trace of a rank of `world`, atomically. TensorBoard's plugin expects a name that ends with
/// .pt.trace.json; Holistic Trace Analysis takes every JSON file of the directory for a trace. Fails with
/// Exit::cannot_create or Exit::io.
void write_chrome_trace(const std::string& path, const Recorded& recorded, int world);

}  // namespace nrl::profile

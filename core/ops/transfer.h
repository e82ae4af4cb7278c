#pragma once
// Copies between host memory and the memory of an Exec's device, whichever that is.

#include "core/ops/exec.h"

namespace nrl::ops {

/// to = the bytes at `from` (host). Blocks until `from` may be reused; later ops see the new values.
void upload(Exec& exec, const Tensor& to, const void* from);
/// The bytes at `to` (host) = `from`, after all ops enqueued before. Blocks.
void download(Exec& exec, const Tensor& from, void* to);
/// to = from, both (N, W) of one dtype in the memory of the exec; rows may be strided.
void copy(Exec& exec, const Tensor& from, const Tensor& to);
/// Blocks until all ops enqueued before are done. Nothing on the CPU.
void synchronize(Exec& exec);

}  // namespace nrl::ops

#pragma once
// A GPU that this machine does not have, for dry runs: what a step would do on it is known without it.

#include <memory>

#include "core/device/runtime.h"

namespace nrl::device {

/// Claims the given properties. "Device memory" is reserved address space of which no page exists: reading or
/// writing it is a segmentation fault. Copies, fills, events and streams do nothing; pinned memory is
/// ordinary memory. Captures fail with Exit::internal. Thread-safe.
std::unique_ptr<Runtime> open_dry_run(const Properties& properties);

}  // namespace nrl::device

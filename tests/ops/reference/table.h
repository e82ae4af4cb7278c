#pragma once

#include "core/ops/kernel_table.h"

namespace nrl::ops {

/// Scalar kernels in double precision, the expected values of all ops. They read and write host memory.
const KernelTable& reference_kernels();

}  // namespace nrl::ops

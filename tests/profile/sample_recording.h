#pragma once
// A recording as a run makes it, of a rank of two that train in data parallel, for writers of traces.

#include "apps/profile/recorded.h"

namespace nrl::profile {

/// Steps 3 and 4, each 10 ms: in each microbatch (2) and layer (4) a GEMM and a norm, forward and backward;
/// two gradient reductions, of which the second begins before the first has ended; rank 1 arrives 1 ms late
/// in each. A message from rank 0 to rank 1 in every microbatch. `on_device`: the operations are on a stream,
/// 50 us after the main thread enqueued them.
Recorded sample_recording(int rank, bool on_device = false);

}  // namespace nrl::profile

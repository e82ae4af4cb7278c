#pragma once
// Shorter schedules for dry runs.

#include "parallel/pipeline/schedule.h"

namespace nrl::pipeline {

/// Whether memory that is planned with a dry run of `shorter` also serves `longer`, a schedule of the same
/// stage: both have the same stashes, and whenever an action of the longer one runs while a microbatch has
/// its activations in a stash, so it is in the shorter one, with both microbatches at the same points of
/// their ways through the stage, and between the same two passes. Buffers that live at the same time in the
/// longer one then do so in the shorter one, those included that one pass leaves to the next one or prepares
/// for it: gathered weights and gradients that are being reduced.
bool covers(const Schedule& shorter, const Schedule& longer);

/// The schedule of the fewest microbatches, at least two if `options` has so many, that covers the one of
/// `options`. It hardly grows with the number of microbatches.
Schedule shortest_equivalent(ScheduleOptions options, int stage);

}  // namespace nrl::pipeline

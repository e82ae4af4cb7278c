#pragma once
// The cost of monitoring: steps of a run with everything of docs/monitoring.md off and on, in turns.

#include "apps/bench/bench.h"

namespace nrl::bench {

/// Trains Args::config on its data in Args::pairs pairs of blocks of Args::steps steps, one without and one
/// with all sinks, telemetry, alerts and live views, in the order ABBA, in one process with one engine.
/// Prints the ratio of a block's time with its 95 % interval over the pairs, the time that the report of a
/// step takes, and the time of opening everything. The processor time of writing the rows that wait at the
/// end of a block is part of it. Files go to a temporary directory. Collective.
int overhead(comm::World& world, const Args& args);

}  // namespace nrl::bench

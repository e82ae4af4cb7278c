#pragma once
// Variants of a configuration, compared as a suite says (core/config/suite.h).

#include "apps/bench/bench.h"

namespace nrl::bench {

/// Trains the variants of every comparison of Args::suite on random tokens, in an engine each, and prints the
/// time, planned memory and bytes sent of each relative to the first, then the promises beside the
/// measurements, judged where the suite has limits. Every variant is timed in three rounds that take turns;
/// its ratio is the median over the rounds. All ranks of the world take part; a comparison that needs more is
/// skipped. Returns Exit::internal if a promise is missed.
int compare(nrl::comm::World& world, const Args& args);

}  // namespace nrl::bench

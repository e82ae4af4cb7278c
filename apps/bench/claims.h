#pragma once
// Benchmarks of features that save memory or time, beside what guides for other trainers promise of them.

#include <string>
#include <vector>

#include "apps/bench/bench.h"

namespace nrl::bench {

/// Names for Args::benchmark: recompute, precision, fp8, offload, zero.
std::vector<std::string> claim_benchmarks();
bool is_claim_benchmark(const std::string& name);

/// Trains a configuration on random tokens with and without the features that Args::benchmark names, in an
/// engine each, and prints time, planned memory and bytes sent of each relative to the first, then what is
/// promised beside what was measured. Every variant is timed in three rounds that take turns; its ratio is
/// the median over the rounds. All ranks of the world take part.
int claims(nrl::comm::World& world, const Args& args);

}  // namespace nrl::bench

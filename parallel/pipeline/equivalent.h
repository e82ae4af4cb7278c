#pragma once
// Schedules of many microbatches as short lists with a period.

#include "parallel/pipeline/schedule.h"

namespace nrl::pipeline {

/// Whether memory that is planned with a dry run of `shorter` also serves `longer`, a schedule of the same
/// stage: both have the same stashes, and whenever an action of the longer one runs while a microbatch has
/// its activations in a stash, so it is in the shorter one, with both microbatches at the same points of
/// their ways through the stage, and between the same two passes; with Period::exchanges_stashes of
/// `shorter`, in any stashes. Buffers that live at the same time in the longer one then do so in the shorter
/// one, those included that one pass leaves to the next one or prepares for it: gathered weights and
/// gradients that are being reduced.
bool covers(const Schedule& shorter, const Schedule& longer);

/// The schedule of `options` as a short list with a period that gives all its actions (unrolled()): a
/// schedule of fewer microbatches, at least two if `options` has so many, which covers the whole one. The
/// list hardly grows with the number of microbatches. It goes through the period once before it and once
/// after it as well, so that what depends on neighboring passes repeats too. Where no shorter list does, the
/// whole schedule without a period.
Schedule shortest_equivalent(ScheduleOptions options, int stage);

/// The shortest_equivalent() of 1 to options.microbatches - 1 microbatches; empty for numbers that the kind
/// does not support.
std::vector<Schedule> equivalents_of_fewer(ScheduleOptions options, int stage);

/// True if the schedules differ at most in how often they repeat their period. The one with more microbatches
/// has the stashes of both.
bool same_but_times(const Schedule& a, const Schedule& b);

/// The schedule with every action of its period in full.
Schedule unrolled(const Schedule& schedule);

/// The number of microbatches of a schedule with its period in full.
int microbatches(const Schedule& schedule);

}  // namespace nrl::pipeline

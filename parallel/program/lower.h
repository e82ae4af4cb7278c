#pragma once
// From a schedule and the tables of layers to a program, and the policies that extend it.

#include <vector>

#include "parallel/program/program.h"

namespace nrl::program {

/// The program of a schedule without any policy. `alone`: all chunks of the model are on this rank, so that
/// receiving is copying. `reports`: the last chunk has the log-probabilities of the microbatches.
Program lower(const pipeline::Schedule& schedule, const Layers& layers, memory::Mode mode, bool alone,
              bool reports);

/// Backward passes run those forward steps again that write slots which the policies of the layers do not
/// keep. Most run right before the step that reads their output, within the visit of their layer. A layer
/// whose input is recomputed needs the output of the layer below, which may in turn need its own input
/// recomputed: these layers run forward steps again in visits of their own before the backward visit, upwards
/// from the first layer of the segment, whose input was kept.
Program add_recompute(Program program, const Layers& layers);

/// The slots of every layer that are moved to the host after the forward pass: the layer's policy says so,
/// and a backward pass uses them.
std::vector<memory::SlotSet> offloaded_slots(const Program& program, const Layers& layers);

/// Moves slots to the host after the forward visit of their layer, during the next one, and back during the
/// visit before the first one that uses them, except in microbatches whose backward pass follows at once and
/// uses them in its first visits. Comes after add_recompute(): steps that run again read their inputs from
/// the host like any other.
Program add_offload(Program program, const Layers& layers);

/// Sharded weights are gathered before the visits that read them and released when the next visit does not.
/// `prefetch`: the gathers for a visit start before the visit that precedes it.
Program gather_on_use(const Program& program, const Layers& layers, bool prefetch);

/// Training: buckets of gradients are opened before the first visit that adds to them, for as many
/// microbatches as follow until none of them has a part of its passes still to come, and are then reduced.
/// `overlap`: the sums are waited for after the next visit, else at once. Sums of the last visit are left to
/// the wait at the end of the step. Comes after gather_on_use(): buckets are opened when the gathers are in
/// flight.
Program reduce_when_complete(const Program& program, const Layers& layers, bool overlap);

}  // namespace nrl::program

#pragma once
// The time of one rank's step by microbatch, chunk and pass: the calls and operations of its dry run on its
// resources (replay.h).

#include <cstdint>
#include <vector>

#include "apps/engine/engine.h"
#include "apps/machine/call_time.h"
#include "apps/machine/collective_time.h"
#include "apps/predict/replay.h"
#include "core/ops/router.h"
#include "parallel/pipeline/simulate.h"

namespace nrl::predict {

/// The rates that the times of a rank's calls and operations follow from.
struct Rates {
  const machine::CallTimes& calls;
  const machine::Fabric& fabric;
  double expert_load = 1;  ///< factor on the bytes that experts exchange
  ops::RouterRule router = {};
  machine::Overlap overlap = machine::Overlap();  ///< replay()
};

/// A pass of a chunk or a layer over a microbatch, as times are kept apart.
enum class Pass : uint8_t { forward, backward_data, backward_weight };
inline constexpr size_t pass_count = 3;
/// The pass that a step of a training program belongs to.
Pass pass_of(const model::Decoder& decoder, const program::Step& step);

/// The items of a step in order. Slots: one for each Pass of each chunk of each microbatch, by microbatch,
/// then chunk, then pass; the last slot is what belongs to no microbatch.
struct StageItems {
  std::vector<Item> items;
  size_t slots = 1;
  double message = 0;  ///< seconds of the longest message between stages
  double sent = 0;     ///< seconds that messages occupy their link
  machine::Link message_link = machine::Link::none;
  machine::Source kernels = machine::Source::measured, links = machine::Source::measured;
};
/// `step`: of a dry run with calls, by the decoder's training program.
StageItems stage_items(const engine::DryStep& step, const model::Decoder& decoder,
                       const parallel::ProcessGrid& grid, const Rates& rates);

/// A step of one rank without other stages.
struct StageTime {
  /// The first microbatch, the mean of those between, and the last; by chunk of the stage.
  pipeline::Costs first, middle, last;
  /// Waits of the first and the last microbatch for weights and gradients, beyond those between: not in
  /// `first` and `last`, because no other stage waits for them.
  double outside = 0;
  SlotTime passes;  ///< of all microbatches
  SlotTime end;     ///< reductions that no pass hides, norm, update, gathers that no pass hides
  Busy busy;        ///< with the messages that the stage sends

  double total() const { return passes.total() + end.total(); }
};
/// Sets the costs of the chunks of stages [first, end) of `stages`, which take `time`.
void set_costs(const StageTime& time, int first, int end, int stages, pipeline::MicrobatchCosts& costs);
/// `microbatches`: of the step; the items may be of fewer.
StageTime stage_time(const StageItems& items, int chunks, int64_t microbatches,
                     const machine::Overlap& overlap);

}  // namespace nrl::predict

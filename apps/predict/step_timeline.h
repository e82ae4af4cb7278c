#pragma once
// A predicted step in time: the passes of all pipeline stages as their schedules have them, and the calls and
// operations within them on the resources of each rank (replay.h).

#include <compare>
#include <cstddef>
#include <utility>
#include <vector>

#include "apps/predict/step_time.h"

namespace nrl::predict {

/// A pass of a chunk of the stage over a microbatch.
struct PassSpan {
  pipeline::ActionKind kind = pipeline::ActionKind::forward;
  int chunk = 0, microbatch = 0;
  double begin = 0, end = 0;  ///< seconds from the begin of the step

  bool backward() const { return kind != pipeline::ActionKind::forward; }
};

/// A call on the processors, an operation on a link, or a wait for an operation.
struct WorkSpan {
  Span span = {};    ///< `source`: not used
  double alone = 0;  ///< seconds of the call or operation without others beside it; 0: a wait
  int pass = -1;     ///< index into StageTimeline::passes; -1: before or after them
  /// One of them is set; of a wait, the start of the operation.
  const ops::Call* call = nullptr;
  const plan::TrafficEvent* event = nullptr;
  machine::Source source = machine::Source::assumed;
};

struct StageTimeline {
  int stage = 0;
  size_t dry = 0;                ///< index into DryStages::stages(): the rank whose dry run this follows
  std::vector<PassSpan> passes;  ///< all of the step, by time
  /// Passes [first, second) have no `work`: those between the microbatches that are wanted in full.
  std::pair<size_t, size_t> hidden = {};
  double hidden_compute = 0;   ///< seconds of their calls
  std::vector<WorkSpan> work;  ///< by time on each resource; empty if it is not wanted
  double end = 0;              ///< of the passes, the update and what follows
};

/// The output of a forward pass or the gradient of an input on its way to another stage.
struct MessageSpan {
  int from = 0, to = 0;             ///< stages
  size_t sender = 0, receiver = 0;  ///< passes of these stages
  double begin = 0, end = 0;
};

struct StepTimeline {
  StepEstimate estimate;  ///< the same as DryStages::estimate()
  double end = 0;         ///< of the last stage that ends; the spread of ranks is not contained
  std::vector<StageTimeline> stages = {};
  std::vector<MessageSpan> messages = {};  ///< between passes that are not hidden
};

/// A pass of a stage, by its index there.
struct PassIndex {
  int stage = 0;
  size_t pass = 0;

  auto operator<=>(const PassIndex&) const = default;
};
/// The longest path through a step, by time: it ends with the pass that ends last, and before each of its
/// passes comes the one that held it up, the pass before it on its stage or the one whose message it waited
/// for.
std::vector<PassIndex> longest_path(const StepTimeline& timeline);

/// The stages whose calls and operations are wanted.
enum class Detail : uint8_t {
  all,
  dry_run,  ///< DryStages::stages() alone
  none,
};

/// The `shown` first and last microbatches of a step are in full, all passes between these are hidden. Other
/// microbatches take the place of those that were not dry-run. `stages` must outlive the result.
StepTimeline step_timeline(const DryStages& stages, int64_t shown, Detail detail);

}  // namespace nrl::predict

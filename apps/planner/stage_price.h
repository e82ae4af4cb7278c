#pragma once
// The price of a pipeline stage (price.h): the time of its step and its memory, composed of pieces of its
// layers and of the traffic of its real parameter groups.

#include <vector>

#include "apps/machine/fabric.h"
#include "apps/plan/param_groups.h"
#include "apps/planner/pieces.h"
#include "apps/predict/stage_time.h"
#include "parallel/pipeline/schedule.h"

namespace nrl::planner {

/// An operation of data-parallel ranks on a bucket, or on the buckets of a layer at once. Units are the
/// layers of a rank in model order: 0 the embedding, then the blocks, then the head.
struct DataOperation {
  int first = 0, last = 0;  ///< units whose parameters it has
  double seconds = 0;
  double across = 0;             ///< seconds of the sum over replicas that follows
  double before = 0, after = 0;  ///< seconds of kernels that convert or add what travels
  double kept = 0;               ///< seconds to add whole gradients of a microbatch to those that are kept
  double copies = 0;             ///< as Item::host
  double bytes = 0;              ///< that travel
  double buffer = 0;             ///< bytes of its buffer
};

/// A parameter group and its traffic in a step.
struct DataGroup {
  bool gathers_on_use = false;    ///< of weights, before every visit that reads them; else after the update
  bool in_buckets = false;        ///< layers write a microbatch's gradients apart from those that are kept
  bool every_microbatch = false;  ///< gradients are summed in every microbatch, else in the last one
  bool rounded = false;           ///< gradients are kept in another type than layers write
  bool alone = false;             ///< one rank has all of it
  bool late = false;              ///< its sums start after the passes
  machine::Link link = machine::Link::none, across = machine::Link::none;
  std::vector<DataOperation> reductions = {}, gathers = {};  ///< the last layers' first
};

/// A stage without the sizes of its microbatches.
struct StageShape {
  std::vector<std::vector<LayerKind>> chunks = {};  ///< the blocks
  bool embedding = false, head = false;
  double state = 0;     ///< bytes of weights, gradients and optimizer state that are always there
  double elements = 0;  ///< of the optimizer state
  std::vector<DataGroup> groups = {};
  /// By unit, bytes of the buffers from which its weights are read and to which its gradients are written.
  std::vector<double> gathered = {}, reduced = {};
  double norm = 0;  ///< seconds of the sum of the gradient norm
};
/// The parameters of a stage, which do not depend on microbatches and sharding. `config`: of the layout
/// (Layout::applied()).
model::ParameterList stage_parameters(const Config& config, const model::ModelSpec& spec,
                                      const plan::GridPosition& position, DeviceType device);
/// `parameters`: stage_parameters() of the same.
StageShape stage_shape(const Config& config, const model::ModelSpec& spec, const plan::GridPosition& position,
                       const model::ParameterList& parameters, const predict::ModeledDevice& device,
                       const machine::Fabric& fabric);

struct StageOptions {
  int64_t microbatches = 1;
  bool prefetch = false;       ///< distributed.overlap_param_gather
  bool overlap_reduce = true;  ///< distributed.overlap_grad_reduce
  bool weights_later = false;  ///< weight gradients follow in passes of their own
  bool sums_later = false;     ///< some microbatch is always between its passes, so that sums come at the end
};

/// The pieces of a stage: of its blocks by chunk, and of the ends.
struct StagePieces {
  const Pieces* ends = nullptr;
  std::vector<std::vector<const LayerPiece*>> blocks = {};
  double without_head = 0;  ///< the most of the blocks'
};

/// The items of a step of at most three microbatches, for predict::stage_time().
predict::StageItems stage_items(const StageShape& shape, const StagePieces& pieces,
                                const StageOptions& options);

/// Bytes of the stage with this schedule.
double stage_memory(const StageShape& shape, const StagePieces& pieces, const pipeline::Schedule& schedule,
                    const StageOptions& options);

}  // namespace nrl::planner

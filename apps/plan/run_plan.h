#pragma once
// Everything a training run will allocate, decided before anything is: the flat layout, the decoder's slots,
// the batch tensors. `nrl-train plan` prints it; the trainer allocates exactly it.

#include <memory>
#include <string>
#include <vector>

#include "apps/model/decoder.h"
#include "apps/plan/batch.h"
#include "apps/plan/grid_place.h"
#include "core/config/load.h"
#include "memory/plan.h"
#include "parallel/data/flat_buckets.h"

namespace nrl::plan {

/// A run of elements whose optimizer state this rank holds.
struct OwnedRange {
  int parameter = 0;
  int64_t offset = 0, count = 0;  ///< in the parameter
  int64_t flat = 0;               ///< first element in the flat buffers
  int64_t state = 0;              ///< first element in this rank's exp_avg and exp_avg_sq
};

struct RunPlan {
  model::ModelSpec spec;
  model::ParameterList parameters;
  BatchPlan batch;
  int64_t sequence_length = 0;
  DeviceType device = DeviceType::cpu;
  int threads = 1;  ///< Exec::threads
  precision::Recipe recipe;
  std::vector<std::string> recompute_modules;
  ShardingStrategy sharding;
  FlatBuckets layout;
  std::vector<OwnedRange> owned;

  memory::MemoryPlan memory;
  memory::BufferId weights = -1, master = -1, gradients = -1, exp_avg = -1, exp_avg_sq = -1;
  memory::BufferId scalars = -1, evaluation = -1, chunks = -1;
  std::vector<int64_t> chunk_table;  ///< of the optimizer's update: ops::AdamW::chunks
  std::unique_ptr<BatchTensors> tensors;
  std::unique_ptr<model::Decoder> decoder;

  /// Parameter `i`'s part of a flat buffer, in the parameter's shape.
  Tensor parameter(const Tensor& flat, size_t i) const;
  /// Elements of this rank's optimizer state.
  int64_t state_elements() const { return sharding.optimizer_state ? layout.shard_total() : layout.total(); }
};

/// The solved plan of the rank at `place` with `threads` CPU threads. The plan lives on the heap because the
/// decoder refers into it. `config` must have passed validate_for_world(). No device is needed for the plan
/// of one.
std::unique_ptr<RunPlan> make_run_plan(const Config& config, model::ModelSpec spec, const BatchPlan& batch,
                                       const GridPlace& place, DeviceType device, int threads);

/// policy.precision for this device: auto is bf16 on a GPU and f32 on a CPU, where bf16 saves memory only.
precision::Recipe recipe_for(const Config& config, DeviceType device);

/// Memory by category, for people: "weights 475 MiB  gradients ...  = 2.31 GiB".
std::string memory_line(const memory::MemoryPlan& plan);

}  // namespace nrl::plan

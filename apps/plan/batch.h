#pragma once
// The tensors of one microbatch of fixed-length samples, filled from the loader.

#include "apps/data/loader.h"
#include "apps/model/block.h"
#include "memory/plan.h"

namespace nrl::plan {

class BatchTensors {
 public:
  /// Declares the buffers for `sequences` samples of `length` tokens.
  BatchTensors(memory::MemoryPlan& plan, int64_t sequences, int64_t length);
  /// Positions and sequence bounds are the same for every batch and are set here.
  void bind(const memory::MemoryPlan& plan, const memory::Arenas& arenas);

  /// Copies tokens and targets in; every target gets `weight` (dLoss/dlog_prob). `first_sample` is the number
  /// of the first sample inside the global batch.
  const model::MicroBatch& fill(const data::MicroBatch& batch, float weight, int64_t first_sample,
                                int64_t step);

 private:
  int64_t sequences_, length_;
  memory::BufferId ids_, target_, positions_, cu_, weight_;
  model::MicroBatch tensors_;
};

}  // namespace nrl::plan

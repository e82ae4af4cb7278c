#pragma once
// The inputs of one optimizer step: the fixed-length samples of all its microbatches, filled by the host from
// the loader and brought to the device in one copy.

#include "apps/data/loader.h"
#include "apps/model/micro_batch.h"
#include "core/device/runtime.h"
#include "memory/plan.h"

namespace nrl::plan {

class BatchTensors {
 public:
  /// Declares the buffers of `microbatches` times `sequences` samples of `length` tokens. `weight` is the
  /// dLoss/dlog_prob of every token.
  BatchTensors(memory::MemoryPlan& plan, int64_t microbatches, int64_t sequences, int64_t length,
               float weight);
  /// Positions, sequence bounds and weights are the same for every batch and are set here. `exec` is the
  /// device's; it must outlive this.
  void bind(const memory::MemoryPlan& plan, const memory::Arenas& arenas, ops::Exec& exec);

  /// Tokens and targets of one microbatch. `first_sample` is the number of its first sample inside the global
  /// batch. On a device the values arrive with commit().
  void fill(int64_t microbatch, const data::MicroBatch& batch, int64_t first_sample);
  /// All microbatches are filled, for step number `step`: enqueues their way to the device. Host memory is
  /// used again two commits later, not before the copy is done.
  void commit(int64_t step);
  /// What the decoder runs on. The addresses do not change from step to step.
  const std::vector<model::MicroBatch>& microbatches() const { return tensors_; }

 private:
  int64_t tokens() const { return sequences_ * length_; }
  std::byte* staging() const;  // the host's side of the input block

  int64_t microbatches_, sequences_, length_;
  float weight_;
  memory::BufferId input_, positions_, cu_, weights_;
  int64_t input_bytes_ = 0;
  std::vector<model::MicroBatch> tensors_;
  std::byte* block_ = nullptr;  // of the inputs, in the device's memory
  ops::Exec* exec_ = nullptr;
  // Two pinned blocks in turns; `copied_` says when a block may be written again.
  device::Memory pinned_;
  device::Event copied_[2];
  int turn_ = 0;
};

}  // namespace nrl::plan

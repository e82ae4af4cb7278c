#pragma once
// The inputs of one optimizer step: the fixed-length samples of all its microbatches, filled by the host from
// the loader and brought to the device in one copy.

#include "apps/data/loader.h"
#include "apps/model/micro_batch.h"
#include "core/device/runtime.h"
#include "memory/plan.h"

namespace nrl::plan {

/// What the batches of a run have in common.
struct BatchShape {
  int64_t microbatches = 1;
  int64_t sequences = 1;   ///< samples of a microbatch
  int64_t length;          ///< tokens of a sample
  bool positions = false;  ///< every batch has positions of its own, else 0 .. length - 1
  bool bounds = false;     ///< every batch has sequence bounds of its own, else one sequence a sample
  bool weights = false;    ///< every microbatch has token weights of its own, else all share one tensor
  bool staged = false;     ///< filled in pinned memory and copied from there: on a GPU
  int64_t tokens() const { return sequences * length; }
};

/// Sums over the microbatches of a step on this rank.
struct BatchCounts {
  int64_t tokens = 0;
  int64_t loss_tokens = 0;  ///< tokens with a target
  double pairs = 0;         ///< (query, key) pairs of attention
};

/// The counts of one microbatch. `window` is the model's (ops::attention_pairs).
BatchCounts count(const data::MicroBatch& batch, int64_t window);
BatchCounts operator+(const BatchCounts& a, const BatchCounts& b);

class BatchTensors {
 public:
  /// Declares the buffers of the batches.
  BatchTensors(memory::MemoryPlan& plan, const BatchShape& shape);
  /// What is the same for every batch is set here. `exec` is the device's; it must outlive this.
  void bind(const memory::MemoryPlan& plan, const memory::Arenas& arenas, ops::Exec& exec);

  /// Tokens and targets of one microbatch, and what else the shape says. `first_sample` is the number of its
  /// first sample inside the global batch. On a device the values arrive with commit().
  void fill(int64_t microbatch, const data::MicroBatch& batch, int64_t first_sample);
  /// The microbatches 0, 1, ... that were filled since the last commit are complete, for step number `step`:
  /// enqueues their way to the device. `loss_tokens` is the number of tokens with a target in the global
  /// batch: every token's weight becomes -1 / loss_tokens; 0: nothing is differentiated, weights stay. Host
  /// memory is used again two commits later, not before the copy is done.
  void commit(int64_t step, int64_t loss_tokens);
  /// Weights were written from outside: the next commit() writes them all.
  void weights_overwritten() {
    NRL_CHECK(shape_.weights, "the microbatches share their weights");
    weighted_for_ = 0;
  }
  /// What the decoder runs on. The addresses do not change from step to step; where the shape has `bounds`,
  /// the number of sequences does. It is rounded up to a power of two, the last ones empty, so that libraries
  /// need few plans.
  const std::vector<model::MicroBatch>& microbatches() const { return tensors_; }

 private:
  int64_t input_bytes() const;  // of one microbatch in the block
  std::byte* staging() const;   // the host's side of the block
  int64_t room(int64_t sequences) const;

  BatchShape shape_;
  memory::BufferId block_id_ = -1, positions_id_ = -1, bounds_id_ = -1, staging_id_ = -1;
  int64_t block_bytes_ = 0, header_ = 0;  // size of the block; where the step's number lies in it
  std::vector<model::MicroBatch> tensors_;
  std::byte* block_ = nullptr;  // in the device's memory: weights, step, inputs of each microbatch
  ops::Exec* exec_ = nullptr;
  // Where the shape is staged: two pinned blocks in turns; `copied_` says when a block may be written again.
  std::byte* pinned_ = nullptr;
  device::Event copied_[2];
  int turn_ = 0;
  int64_t filled_ = 0;        // microbatches since the last commit
  int64_t weighted_for_ = 0;  // loss tokens that the weights are made for
};

}  // namespace nrl::plan

#pragma once
// The input tensors of one optimizer step: samples of fixed length or packed sequences of all microbatches,
// filled by the host from the loader and copied to the device in one transfer.

#include <optional>
#include <span>
#include <vector>

#include "apps/data/loader.h"
#include "apps/model/spec/layout.h"
#include "apps/model/spec/loss_rule.h"
#include "apps/model/spec/micro_batch.h"
#include "apps/model/spec/spec.h"
#include "core/device/runtime.h"
#include "memory/plan.h"
#include "parallel/context/bounds.h"

namespace nrl::plan {

/// The shape of all batches of a run. With `packed` sequences a step may have fewer microbatches, and a
/// microbatch fewer tokens, unless context-parallel ranks divide them.
struct BatchShape {
  int64_t microbatches = 1;
  int64_t sequences = 1;      ///< samples per microbatch; packed: 1
  int64_t length;             ///< tokens per sample; packed: the most of a microbatch
  int64_t packed = 0;         ///< tokens of the longest packed sequence; 0: samples of equal length
  bool positions = false;     ///< positions come with every batch, else 0 .. length - 1
  bool bounds = false;        ///< sequence bounds come with every batch, else one sequence per sample
  bool loss_weights = false;  ///< one tensor of loss weights per microbatch, else all share one
  std::vector<model::ColumnSpec> columns = {};  ///< MicroBatch::columns
  int64_t sequence_values = 0;                  ///< model::LossNeeds::sequence_values; > 0: packed only
  bool staged = false;                          ///< filled in pinned memory and copied to the device (GPU)
  /// Context parallelism: ranks that split every sample, and the kinds of layers (model::context_kinds()),
  /// which need boundaries.
  int context = 1, context_rank = 0;
  std::vector<model::ContextKind> context_kinds = {};
  bool dropout = false;  ///< context parallelism: masks need the rows that this rank has
  float share = 1;       ///< MicroBatch::share of samples of equal length
  /// Of a microbatch on this rank.
  int64_t tokens() const { return sequences * length / context; }
  int64_t longest() const { return packed > 0 ? packed : length; }
};

/// Counts of one microbatch, or their sums over the microbatches of a step; of whole samples, also where this
/// rank has only a part of their tokens.
struct BatchCounts {
  int64_t tokens = 0;
  int64_t loss_tokens = 0;  ///< tokens with a target
  double pairs = 0;         ///< model::attention_pairs()
};

/// The counts of one microbatch.
BatchCounts count(const data::HostMicroBatch& batch, const model::ModelSpec& spec);
BatchCounts operator+(const BatchCounts& a, const BatchCounts& b);

class BatchTensors {
 public:
  /// Declares the buffers in `plan`.
  BatchTensors(memory::MemoryPlan& plan, const BatchShape& shape);
  /// Assigns the planned memory and writes the tensors that are the same for all batches.
  /// `exec` must outlive this object.
  void bind(const memory::MemoryPlan& plan, const memory::Arenas& arenas, ops::Exec& exec);

  /// Sets one microbatch; must be called in order 0, 1, ... `first_sample`: index of its first sample in the
  /// global batch. `share`: MicroBatch::share of packed sequences. On a GPU the values arrive with commit().
  void fill(int64_t microbatch, const data::HostMicroBatch& batch, int64_t first_sample, float share = 1);
  /// Completes the microbatches filled since the last commit for step number `step`, and enqueues their copy
  /// to the device. `loss_tokens`: tokens with a target in the global batch; all loss weights become -1 /
  /// loss_tokens. 0: no training, loss weights are not written. The two pinned staging buffers alternate;
  /// fill() waits until the copy from its buffer is done. Returns the microbatches.
  std::span<const model::MicroBatch> commit(int64_t step, int64_t loss_tokens);
  /// Must be called after writing loss weights from outside: the next commit() rewrites all of them.
  void loss_weights_overwritten() {
    NRL_CHECK(shape_.loss_weights, "the microbatches share their loss weights");
    weights_loss_tokens_ = 0;
  }
  const BatchShape& shape() const { return shape_; }
  /// The decoder's inputs. Addresses are the same in all steps. With BatchShape::bounds the number
  /// of sequences changes; it is padded with empty sequences to a power of two, so that libraries
  /// need few plans.
  const std::vector<model::MicroBatch>& microbatches() const { return tensors_; }
  /// The same with the most tokens that packed microbatches may have.
  const std::vector<model::MicroBatch>& largest() const { return shape_.packed > 0 ? largest_ : tensors_; }

 private:
  int64_t input_bytes() const;   // of one microbatch in the block, a multiple of 8
  int64_t values_bytes() const;  // of its sequences' values, with which it begins
  std::byte* staging() const;    // host copy of the block
  int64_t padded_sequences(int64_t sequences) const;
  int64_t bounds_elements() const;  // room for the boundaries of a microbatch
  std::vector<int32_t> whole_samples() const;
  void write_context_bounds(std::span<const int32_t> documents, int32_t* host, int32_t* device,
                            model::MicroBatch& m) const;

  BatchShape shape_;
  std::optional<parallel::ZigZag> share_;                // with context parallelism
  std::vector<parallel::ContextBounds> context_bounds_;  // of BatchShape::context_kinds
  memory::BufferId block_id_ = -1, positions_id_ = -1, bounds_id_ = -1, rows_id_ = -1, staging_id_ = -1;
  int64_t block_bytes_ = 0, step_offset_ = 0;  // size of the block; offset of the step number in it
  std::vector<model::MicroBatch> tensors_, largest_;
  std::byte* block_ = nullptr;  // in device memory: loss weights, step number, inputs of each microbatch
  ops::Exec* exec_ = nullptr;
  // If staged: two pinned staging buffers; `copied_` is recorded after the copy from a buffer.
  std::byte* pinned_ = nullptr;
  device::Event copied_[2];
  int staging_index_ = 0;
  int64_t filled_ = 0;               // microbatches since the last commit
  int64_t weights_loss_tokens_ = 0;  // loss_tokens of the current loss weights
};

}  // namespace nrl::plan

#pragma once
// Sums gradients over the data-parallel ranks bucket by bucket while the backward pass goes on, and gathers
// updated parameters.

#include "parallel/comm/communicator.h"
#include "parallel/data/flat_buckets.h"

#include <span>
#include <vector>

namespace nrl {

/// Plain sums, no averaging: the loss is normalised by the global number of tokens.
///
/// A step: [backward of all microbatches but the last], start(), backward of the last one with a ready() for
/// each parameter, finish(). Buckets go out in their order in the layout, each as soon as it and those before
/// it are complete, so that all ranks issue the same sequence. One thread at a time. Objects refer to, and
/// must not outlive, the layout and the communicator.
class GradReducer {
 public:
  /// `grads`: flat fp32 gradients, layout.total() elements, owned by the caller. `dp`: as many ranks as the
  /// layout has shards. `overlap` false: everything is sent in finish(). Strategies: ddp sums whole buckets
  /// (all_reduce), optim leaves each rank the sum of its shards (reduce_scatter; the rest of `grads` is then
  /// stale). Strategies that keep gradients in shards between microbatches are Exit::config.
  ///
  /// With a communicator of device memory `grads` and what is gathered lie on the device and are never
  /// touched here; `stream` is where gradients are computed and used. ready() then stands for work already in
  /// it, and finish() and the gathers' waits order what is put there afterwards, without waiting for the
  /// stream (what the communicator itself blocks for: make_device.h).
  GradReducer(const FlatBuckets& layout, std::span<float> grads, comm::Communicator& dp,
              const ShardingStrategy& strategy, bool overlap, comm::StreamRef stream = {});
  ~GradReducer();
  GradReducer(const GradReducer&) = delete;
  GradReducer& operator=(const GradReducer&) = delete;

  /// From here on ready() counts.
  void start();
  /// The gradient of a parameter is complete. Twice in a step, or outside of one, is an internal error.
  void ready(int param);
  /// Waits until all sums are there, and fails if the communicator has lost a rank. A parameter that was
  /// never ready is an internal error.
  void finish();

  /// Fills the whole flat buffer (any element type, layout.total() elements) from every rank's shards. For
  /// ddp there is nothing to gather.
  void gather_params(comm::View flat);

 private:
  void launch_complete();

  const FlatBuckets& layout_;
  std::span<float> grads_;
  comm::Communicator& dp_;
  ShardingStrategy strategy_;
  bool overlap_;
  comm::StreamRef stream_;
  bool started_ = false;
  size_t next_ = 0;                 // first bucket not sent yet
  std::vector<int> missing_;        // by bucket: parameters not ready
  std::vector<bool> seen_;          // by parameter
  std::vector<comm::Handle> sums_;  // by bucket
};

}  // namespace nrl

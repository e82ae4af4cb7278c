#pragma once
// Sums gradients over the data-parallel ranks bucket by bucket, overlapped with the backward pass, and
// gathers updated parameters.

#include <span>
#include <vector>

#include "parallel/comm/communicator.h"
#include "parallel/data/flat_buckets.h"

namespace nrl::parallel {

/// Plain sums, no averaging: the loss is normalized by the global number of tokens.
///
/// A step: [backward of all microbatches but the last], start(), backward of the last one with a ready() for
/// each parameter, finish(). Buckets are issued in layout order, each as soon as it and those before it are
/// complete, so that all ranks issue the same sequence. One thread at a time. The layout and the communicator
/// must outlive the reducer.
class GradReducer {
 public:
  /// `grads`: flat fp32 gradients, layout.total() elements, owned by the caller. `dp`: as many ranks as the
  /// layout has shards. `overlap` false: everything is sent in finish(). Strategies: ddp sums whole buckets
  /// (all_reduce), optim leaves each rank the sum of its shards (reduce_scatter; the rest of `grads` is then
  /// stale). Strategies that keep gradients in shards between microbatches are Exit::config.
  ///
  /// With a device communicator `grads` and the gathered buffer are device memory; `stream` is where
  /// gradients are computed and used. ready() then refers to work already in it, and finish() and
  /// wait_gather() order the work enqueued later, without blocking the host on the stream
  /// (world/make_device.h: when a communicator blocks).
  GradReducer(const FlatBuckets& layout, std::span<float> grads, comm::Communicator& dp,
              const ShardingStrategy& strategy, bool overlap, comm::StreamRef stream = {});
  ~GradReducer();
  GradReducer(const GradReducer&) = delete;
  GradReducer& operator=(const GradReducer&) = delete;

  /// Begins the reduction of a step. Must precede ready().
  void start();
  /// The gradient of a parameter is complete. Must be called exactly once per parameter and step.
  void ready(int param);
  /// Waits for all sums; fails if the communicator has lost a rank.
  void finish();

  /// Starts to fill the whole flat buffer (any element type, layout.total() elements) from every rank's
  /// shards, in the order of the forward pass. A no-op for ddp. A parameter must not be accessed before
  /// wait_gather(), the shards of this rank not be written before wait_gathers().
  void start_gather(comm::View flat);
  /// Waits for the bucket of a parameter. A no-op if it was waited for.
  void wait_gather(int param) { gathers_[static_cast<size_t>(layout_.place(param).bucket)].wait(); }
  void wait_gathers();

 private:
  void launch_complete();

  const FlatBuckets& layout_;
  std::span<float> grads_;
  comm::Communicator& dp_;
  ShardingStrategy strategy_;
  bool overlap_;
  comm::StreamRef stream_;
  bool started_ = false;
  size_t next_ = 0;                           // first bucket not sent yet
  std::vector<int> missing_;                  // by bucket: parameters not ready
  std::vector<bool> seen_;                    // by parameter
  std::vector<comm::Handle> sums_, gathers_;  // by bucket
};

}  // namespace nrl::parallel

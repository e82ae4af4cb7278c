#pragma once
// Weights that are kept in shards and gathered bucket by bucket for as long as layers read them (ZeRO-3).

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "parallel/comm/communicator.h"
#include "parallel/data/flat_buckets.h"

namespace nrl::parallel {

/// Every bucket has a buffer that holds its weights between start() and release(); outside of that the buffer
/// may share memory with others. Versions count the updates of the weights: reading a weight that is not
/// gathered, or that was gathered before the last update, is an internal error. All ranks of the group must
/// start the same buckets in the same order. One thread at a time.
class WeightGather {
 public:
  /// `shards`: (layout.shard_total()), this rank's weights. `buckets`: by bucket, (its size), of the same
  /// type. `group`: one rank per shard of the layout; should be a lane of its own, so that gathers and sums
  /// of gradients overlap. The arguments must outlive this object. With a device `stream` orders the memory.
  WeightGather(const FlatBuckets& layout, comm::ConstView shards, std::vector<comm::View> buckets,
               comm::Communicator& group, comm::StreamRef stream = {});

  /// Starts to gather buckets, in one operation, without those that are gathered or in flight.
  void start(std::span<const int> buckets);
  /// Waits until the bucket, which must be started, can be read, and those that were started with it.
  void wait(int bucket);
  /// The bucket is not read any more. A no-op if it is not gathered.
  void release(int bucket);
  bool gathered(int bucket) const { return of_bucket(bucket).version >= 0; }
  /// Internal error unless the weights of `param` can be read now.
  void require(int param) const;
  /// Must be called when this rank's shards have changed. Buckets that are still gathered become stale.
  void updated() { ++version_; }

 private:
  struct State {
    std::shared_ptr<comm::Handle> gather;  // of all buckets that were started together; null: none
    int64_t version = -1;                  // of the weights in the buffer; -1: released
  };
  /// Waits for the bucket's gather, if it is in flight.
  static void finish(State& s);
  State& of_bucket(int b) { return states_.at(static_cast<size_t>(b)); }
  const State& of_bucket(int b) const { return states_.at(static_cast<size_t>(b)); }

  const FlatBuckets& layout_;
  comm::ConstView shards_;
  std::vector<comm::View> buckets_;
  comm::Communicator& group_;
  comm::StreamRef stream_;
  int64_t version_ = 0;
  std::vector<State> states_;
};

}  // namespace nrl::parallel

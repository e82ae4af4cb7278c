#pragma once
// Sums gradients over the data-parallel ranks bucket by bucket, overlapped with the backward pass, and
// gathers updated parameters.

#include <memory>
#include <vector>

#include "core/ops/exec.h"
#include "parallel/comm/communicator.h"
#include "parallel/data/flat_buckets.h"

namespace nrl::parallel {

/// The ranks that sum the gradients of a layout: `shard` has one rank per shard; `replicas`, if not null, the
/// ranks that hold the same shard in other copies of the whole (hierarchical reduction: first within `shard`,
/// then shards across `replicas`). Must outlive the users.
struct ReduceGroup {
  comm::Communicator* shard = nullptr;
  comm::Communicator* replicas = nullptr;
};

struct ReduceOptions {
  ShardingStrategy strategy;
  bool overlap = true;
  /// Element type in which gradients travel within `shard`: f32, bf16, or e4m3 or e5m2 with a scale per block
  /// (core/ops/fp8.h), which the receiver decodes and adds in fp32. Across replicas it is always f32.
  DType wire = DType::f32;
  /// bf16: each rank receives the other ranks' values (all_to_all) and adds them in fp32 itself. Without it
  /// the communicator adds: mpi and staged in fp32 with one rounding, nccl with a rounding per addition.
  bool fp32_sums = false;
  /// fp8: what a rank's gradients lose by rounding is added to those of the next step, and with ddp what the
  /// sum of a shard loses when it is sent to all ranks. Without it roundings that repeat add up over the
  /// steps.
  bool error_feedback = false;

  bool fp8() const { return wire == DType::e4m3 || wire == DType::e5m2; }
  /// Whether ranks exchange their parts of a shard and each adds them up itself.
  bool sums_parts() const { return fp8() || (wire != DType::f32 && fp32_sums); }
  /// Elements of a bucket as they travel: with fp8 bytes, scales and padding included.
  int64_t wire_elements(const FlatBuckets& layout, int bucket) const;
  /// Elements of the staging buffer (GradMemory::staging); 0: none.
  int64_t staging_elements(const FlatBuckets& layout) const;
  /// Elements of GradMemory::errors and sum_errors; 0: none.
  int64_t error_elements(const FlatBuckets& layout) const;
  int64_t sum_error_elements(const FlatBuckets& layout) const;
};

/// The memory of the gradients of a layout, in the memory of the exec's device; f32.
struct GradMemory {
  /// (layout.total()), or with strategy.gradients this rank's shards (layout.shard_total()). With `buckets`
  /// they may be bf16: then each microbatch is added in fp32 and rounded.
  Tensor gradients;
  /// By bucket, (its size): where layers write the gradients of the microbatches for which it was opened. A
  /// buffer is in use from open() to settle() and may share memory with others outside of that. Needed with
  /// strategy.gradients, possible with strategy.optimizer_state; empty: layers write `gradients`.
  std::vector<Tensor> buckets = {};
  Tensor staging = {};  ///< (staging_elements()) bf16, or u8 with fp8
  /// Kept between steps, f32, zero before the first one: (error_elements()) what this rank's gradients lost,
  /// laid out like the whole gradients; (sum_error_elements()) what the sums of its shards lost.
  Tensor errors = {}, sum_errors = {};
};

/// Plain sums, no averaging: the loss is normalized by the global number of tokens. One thread at a time. The
/// layout, the exec and the group must outlive the reducer. With a device the exec's stream is where
/// gradients are computed and used: ready() refers to work already in it, and finish(), settle() and
/// wait_gather() order the work enqueued later without blocking the host on the stream (world/make_device.h:
/// when a communicator blocks).
///
/// Whole gradients (ddp, optim). A step: [backward of all microbatches but the last], start(), backward of
/// the last one with a ready() for each parameter, finish(). Buckets are issued in layout order, each as soon
/// as it and those before it are complete, so that all ranks issue the same sequence. ddp leaves the sum of
/// all gradients on every rank (all_reduce), optim the sum of its shards (reduce_scatter; the rest is then
/// stale).
///
/// Gradients in buckets (GradMemory::buckets). A step: start(), then for every bucket and one or several
/// microbatches at a time open(), a ready() for each of its parameters and microbatches, issue() and
/// settle(); then finish(). They are added up in GradMemory::gradients: in shards (strategy.gradients) the
/// sums over the ranks; whole ones this rank's own, and only the sums of the last microbatches travel. All
/// ranks must complete and issue buckets in the same order.
class GradReducer {
 public:
  GradReducer(const FlatBuckets& layout, const GradMemory& memory, const ReduceGroup& group,
              const ReduceOptions& options, ops::Exec& exec);
  ~GradReducer();
  GradReducer(const GradReducer&) = delete;
  GradReducer& operator=(const GradReducer&) = delete;

  /// Begins the reduction of a step. Must precede ready() and open().
  void start();
  /// The gradient of a parameter is complete, or in buckets a microbatch's part of it. Must be called exactly
  /// once per parameter and step, or per microbatch.
  void ready(int param);
  /// Waits for all sums; fails if the communicator has lost a rank.
  void finish();

  // Gradients in buckets only.
  /// The first of this many microbatches begins to write the bucket's gradients, which are those of all of
  /// them together. `last`: they are the last ones of the step.
  void open(int bucket, bool last, int microbatches = 1);
  /// Starts the sums of the buckets completed since the last call, in one operation; settle() and finish() do
  /// so for those that remain. Buckets that travel through the staging buffer are started one by one, as they
  /// are completed.
  void issue();
  /// Waits for the bucket's sum and adds it to the gradients that this rank keeps; the buffer may then be
  /// reused. A no-op if it was settled.
  void settle(int bucket);
  /// True between open() and the last ready() of the bucket.
  bool is_open(int bucket) const { return of_bucket(bucket).open; }

  /// Starts to fill the whole flat buffer (any element type, layout.total() elements) from every rank's
  /// shard, in the order of the forward pass. Does nothing for ddp. A few buckets are in flight at a time,
  /// and the wait for one issues the next, so that the gathers leave the network to the forward pass that
  /// they overlap: ranks must wait in the same order. Gathers may overlap with the next step: the parameters
  /// of a bucket must not be read before wait_gather(), the shards of this rank not be written before
  /// wait_gathers().
  void start_gather(comm::View flat);
  /// Waits for the bucket of a parameter. A no-op if it was waited for.
  void wait_gather(int param) { wait_gather_of(layout_.place(param).bucket); }
  void wait_gathers();

 private:
  struct State {
    int missing = 0;          // parameters not ready
    bool open = false;        // in buckets
    int microbatches = 1;     // that it was opened for
    bool last = true;         // of the step's microbatches
    bool accumulate = false;  // an earlier microbatch has filled what is kept
    bool in_flight = false;   // summed within the shard group, and not settled
    int slot = -1;            // of the staging buffer
    comm::Handle sum, replicas, whole, gather;
    std::shared_ptr<comm::Handle> joint_sum;  // of buckets that are summed in one operation
  };
  State& of_bucket(int b) { return states_.at(static_cast<size_t>(b)); }
  const State& of_bucket(int b) const { return states_.at(static_cast<size_t>(b)); }

  bool alone() const { return group_.shard->size() == 1 && group_.replicas == nullptr; }
  bool in_buckets() const { return !memory_.buckets.empty(); }
  /// True if gradients of these microbatches are added to the kept ones as they are: no other rank has a
  /// part of them, or they travel with later microbatches.
  bool stays(int bucket) const;
  void launch_complete();
  void launch(int bucket);
  /// Whether the sum is left in the shard, with nothing to add or round in settle().
  bool sums_in_place(int bucket) const;
  /// The bucket's whole gradients that layers have written, and this rank's part of them.
  Tensor whole(int bucket) const;
  Tensor own_part(int bucket) const;
  /// Where the sum of this rank's shard goes.
  Tensor shard(int bucket) const;
  /// The bucket's whole gradients that this rank keeps: not if they are in several shards.
  Tensor kept(int bucket) const;
  /// A bucket's elements in a half of the staging buffer; `received`: of its second part. With fp8 a matrix
  /// of one encoded row per shard.
  Tensor staged(int bucket, bool received) const;
  /// fp8: starts the exchange of a bucket's gradients, and of its sum (ddp); both await settle() or
  /// release().
  void send_encoded(int bucket);
  void settle_encoded(int bucket);
  void sum_replicas(int bucket, const comm::After& after);
  /// Settles the bucket and waits until nothing of it is in the staging buffer. Its sum over replicas, which
  /// is not there, goes on.
  void release(int bucket);
  void free_slot(State& s);
  /// Issues the gather of the next bucket, if one is left.
  void gather_next();
  void wait_gather_of(int bucket);

  const FlatBuckets& layout_;
  GradMemory memory_;
  ReduceGroup group_;
  ReduceOptions options_;
  ops::Exec& exec_;
  int64_t slot_elements_ = 0;
  bool started_ = false;
  int next_ = 0;  // whole gradients: first bucket not issued yet
  int slots_used_ = 0;
  int slots_[2] = {-1, -1};    // the bucket in each half of the staging buffer
  comm::View gathered_;        // of start_gather()
  int to_gather_ = 0;          // buckets below are not issued yet
  std::vector<int> complete_;  // gradients in buckets: those for issue()
  std::vector<int> seen_;      // reports by parameter, since start() or open()
  std::vector<State> states_;
};

}  // namespace nrl::parallel

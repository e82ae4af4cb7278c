#pragma once
// Records the calls of a rank on its communicators and compares them across ranks. Tests run on it today; a
// communication check of configurations will.
//
// With the waits between the calls, what all ranks recorded can also be asked whether NCCL's kernels would
// come to their end (launch_model.h): on host memory the same program runs in the same order, but waits
// differently.

#include <memory>
#include <string>
#include <vector>

#include "parallel/comm/communicator.h"
#include "parallel/comm/launch_model.h"

namespace nrl::comm {

/// The calls of one rank in issue order, over all communicators that record into it.
class Recorder {
 public:
  struct Entry {
    std::string group;  ///< Communicator::label()
    std::string call;   ///< "all_gather(4096 bf16)"
    bool collective;    ///< false for messages, which legitimately differ among ranks
  };
  /// An operation that moves data, or the wait for one.
  struct Launch {
    int waited = -1;  ///< the number of the operation; -1: this is an operation
    std::string stream = {}, label = {};
    int after = -1;
    std::vector<MeetingPoint> points = {};
  };
  const std::vector<Entry>& entries() const { return entries_; }
  const std::vector<Launch>& launches() const { return launches_; }
  /// All operations must have been waited for.
  void clear();

 private:
  friend class RecordingCommunicator;
  std::vector<Entry> entries_;
  std::vector<Launch> launches_;
  int operations_ = 0;
};

enum class RecordingMode {
  log,    ///< record only; compare later with order_mismatch()
  check,  ///< compare each collective with the other ranks before it runs; a difference fails with
          ///< Exit::internal on all ranks instead of hanging or corrupting data. Costs a small gather each.
};

/// Wraps `inner`. Groups made from it by split and subgroup record as well. Thread rule as for Communicator.
std::unique_ptr<Communicator> make_recording(std::unique_ptr<Communicator> inner,
                                             std::shared_ptr<Recorder> recorder, RecordingMode mode);

/// Collective over `all`: compares, for every pair of ranks, their collectives on the groups that both used,
/// interleaving included. Returns the first difference on every rank, "order mismatch at #3 between rank 0
/// and rank 1: ..."; empty when there is none.
std::string order_mismatch(Communicator& all, const Recorder& recorder);

/// The recorded operations of all ranks as NCCL would launch them: a stream for every group and channel
/// (messages with tags, channel.h). A collective meets all ranks of its group. A wait on the host counts like
/// one of the stream of computation. Collective over `all`, which must contain the groups.
LaunchModel recorded_launches(Communicator& all, const Recorder& recorder);

}  // namespace nrl::comm

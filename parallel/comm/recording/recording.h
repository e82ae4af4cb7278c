#pragma once
// Writes down what a rank asks of its communicators, to compare the ranks: for tests and for the
// configuration's communication check.

#include "parallel/comm/communicator.h"

#include <memory>
#include <string>
#include <vector>

namespace nrl::comm {

/// The calls of one rank in the order it issued them, over all communicators that record into it.
class Recorder {
 public:
  struct Entry {
    std::string group;  ///< Communicator::label()
    std::string call;   ///< "all_gather(4096 bf16)"
    bool collective;    ///< false for messages, which legitimately differ among ranks
  };
  const std::vector<Entry>& entries() const { return entries_; }
  void clear() { entries_.clear(); }

 private:
  friend class RecordingCommunicator;
  std::vector<Entry> entries_;
};

enum class RecordingMode {
  log,    ///< write down only; compare later with order_mismatch()
  check,  ///< before each collective compare it with the other ranks' and fail (Exit::internal, on all of
          ///< them) if it differs, instead of hanging or mixing data up. Costs a small gather each.
};

/// Wraps `inner`. Groups made from it by split and subgroup record as well. Thread rule as for Communicator.
std::unique_ptr<Communicator> make_recording(std::unique_ptr<Communicator> inner,
                                             std::shared_ptr<Recorder> recorder, RecordingMode mode);

/// Collective over `all`: compares, for every two ranks, their collectives on the groups that both used;
/// groups that share ranks must be used in the same interleaving. Empty when all is well; otherwise, on every
/// rank, the first difference: "order mismatch at #3 between rank 0 and rank 1: ...".
std::string order_mismatch(Communicator& all, const Recorder& recorder);

}  // namespace nrl::comm

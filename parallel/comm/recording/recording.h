#pragma once
// Records the calls of a rank on its communicators and compares them across ranks. Tests run on it today; a
// communication check of configurations will.

#include <memory>
#include <string>
#include <vector>

#include "parallel/comm/communicator.h"

namespace nrl::comm {

/// The calls of one rank in issue order, over all communicators that record into it.
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

}  // namespace nrl::comm

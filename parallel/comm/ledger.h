#pragma once
// Operations that are counted instead of executed: the communication of a dry run.

#include <cstdint>
#include <vector>

#include "parallel/comm/collective_log.h"

namespace nrl::comm {

/// The use of a communication. `experts`: within layers, of rows whose number the router chooses.
enum class Purpose : uint8_t { layers, experts, messages, gradients, weights, scalars };

/// While it lives, operations that this thread starts are for `purpose`; without one for Purpose::layers.
class [[nodiscard]] PurposeScope {
 public:
  explicit PurposeScope(Purpose purpose);
  ~PurposeScope();
  PurposeScope(const PurposeScope&) = delete;
  PurposeScope& operator=(const PurposeScope&) = delete;
  static Purpose current();

 private:
  Purpose before_;
};

/// Sums of the operations of communicators that are dry (Communicator::set_dry()).
class Ledger {
 public:
  struct Sum {
    int group;  ///< number that the communicator was given
    Op op;
    Purpose purpose;
    int64_t count = 0, bytes = 0;  ///< bytes as in CollectiveLog
  };
  void add(int group, Op op, int64_t bytes);
  /// In the order of their first operations.
  const std::vector<Sum>& sums() const { return sums_; }
  void clear() { sums_.clear(); }

 private:
  std::vector<Sum> sums_;
};

}  // namespace nrl::comm

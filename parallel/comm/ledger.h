#pragma once
// Operations that are counted instead of executed: the communication of a dry run.

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "parallel/comm/collective_log.h"

namespace nrl::comm {

/// The use of a communication. `experts`: within layers, of rows whose number the router chooses. `offload`:
/// between a device and its host, without a communicator.
enum class Purpose : uint8_t { layers, experts, messages, gradients, weights, scalars, offload };
inline constexpr size_t purpose_count = static_cast<size_t>(Purpose::offload) + 1;

constexpr std::string_view name_of(Purpose purpose) {
  constexpr std::array<std::string_view, purpose_count> names{"layers",  "experts", "messages", "gradients",
                                                              "weights", "scalars", "offload"};
  return names[static_cast<size_t>(purpose)];
}

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

class Work;

/// Sums of the operations of communicators that are dry (Communicator::set_dry()).
class Ledger {
 public:
  /// The start of an operation, or the wait for it.
  struct Event {
    bool wait = false;
    int operation = 0;  ///< counts all starts that were observed, from 0
    int after = -1;     ///< start: operation that must complete first (After::previous); -1: none
    int group = 0;      ///< start: number that the communicator was given
    Op op = Op::barrier;
    Purpose purpose = Purpose::layers;
    int64_t bytes = 0;  ///< as in CollectiveLog
  };
  using Observer = std::function<void(const Event&)>;

  struct Sum {
    int group;  ///< number that the communicator was given
    Op op;
    Purpose purpose;
    int64_t count = 0, bytes = 0;  ///< bytes as in CollectiveLog
  };
  /// Counts an operation. Returns it as complete; the wait for it is an event if its start was observed.
  /// `previous`: After::previous. The ledger must outlive waits for operations that it returns.
  std::shared_ptr<Work> add(int group, Op op, int64_t bytes, const Work* previous = nullptr);
  /// Calls `observer` with every event from now on; an empty function ends that.
  void observe(Observer observer) { observer_ = std::move(observer); }
  /// Returns the next number of an operation, for something else that is observed.
  int next_number() { return operations_++; }
  /// In the order of their first operations.
  const std::vector<Sum>& sums() const { return sums_; }
  void clear() { sums_.clear(); }

 private:
  class Observed;
  std::vector<Sum> sums_;
  Observer observer_;
  int operations_ = 0;  // observed
};

}  // namespace nrl::comm

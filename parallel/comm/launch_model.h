#pragma once
// A model of NCCL's communication kernels: can what all ranks issue come to its end? Tests ask it about
// pipeline schedules (pipeline/simulate.h) and about recorded steps of whole layouts (recording.h).
//
// Every communicator of a rank has a stream, whose operations run one after another. The kernel of an
// operation starts when those before it in its stream have completed and the device may start it
// (LaunchRules). From then on it occupies the device until every rank that it exchanges data with has started
// its part: data larger than NCCL's buffers passes only while both ends run.

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace nrl::comm {

/// Which kernels of different streams a device may run side by side.
struct LaunchRules {
  enum class Order : uint8_t {
    free,    ///< any: what the groups of a run rely on (device_options.h has the limits that ensure it)
    issued,  ///< a kernel starts after all issued before it have started: NCCL_LAUNCH_ORDER_IMPLICIT=1, or
             ///< one hardware queue for all streams (CUDA_DEVICE_MAX_CONNECTIONS=1)
    serial,  ///< a kernel starts after all issued before it have completed: NCCL_LAUNCH_ORDER_IMPLICIT=1 with
             ///< a driver before 12.3, or before 12.9 in a graph
  };
  Order order = Order::free;
  int kernels = 0;  ///< that fit on a device at once, taken in the order of issue; 0: no limit
};

/// Where operations of several ranks meet. The k-th operation of a rank at a point meets the k-th of each
/// other one.
struct MeetingPoint {
  std::string name;
  int ranks = 2;  ///< that come to it
};

class LaunchModel {
 public:
  explicit LaunchModel(int ranks) : ranks_(static_cast<size_t>(ranks)) {}

  /// The next operation of `rank`, issued into `stream`; completes when all at its points have started.
  /// `label`: for messages. `after`: another operation of the rank that must have completed; -1: none.
  /// Returns its number on this rank.
  int issue(int rank, std::string_view stream, const std::vector<MeetingPoint>& points, std::string label,
            int after = -1);
  /// Everything that `rank` issues later comes after this operation: its host, or the stream of its
  /// computation, waits for it.
  void wait(int rank, int operation);

  /// The most streams of a rank: kernels that may have to run at once.
  int streams() const;
  int64_t operations() const;
  /// Empty, or what each rank that cannot go on waits for.
  std::string hang(const LaunchRules& rules) const;

 private:
  struct Operation {
    std::vector<int> meetings;  // indices into meetings_
    std::string label;
    int stream, after;
    size_t issued_at;  // number of the rank's waits before it
  };
  struct Meeting {
    int ranks = 0;     // that must come
    int arrivals = 0;  // operations that come
  };
  struct Rank {
    std::vector<Operation> operations;
    std::vector<int> waits;  // operations, in order
    std::map<std::string, int, std::less<>> streams;
    std::map<std::string, int, std::less<>> visits;  // of a point
  };
  class Run;

  std::vector<Rank> ranks_;
  std::vector<Meeting> meetings_;
  std::map<std::pair<std::string, int>, int> meeting_of_;  // by point and number
};

}  // namespace nrl::comm

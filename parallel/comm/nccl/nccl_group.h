#pragma once
// Private to the NCCL backend: the only header that includes nccl.h. One NCCL communicator with its stream
// and the thread that watches over it.

#include "core/base/error.h"
#include "core/device/runtime.h"
#include "parallel/comm/device_options.h"
#include "parallel/comm/event_pool.h"

#include <nccl.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

namespace nrl::comm {

/// One operation in the group's stream, as the watching thread sees it.
struct NcclFlight {
  std::string what;  ///< "all_reduce #12 (4096 f32)"
  LedgerTicket ticket;
  EventPool::Loan begin, end;  ///< timed
  EventPool::Loan waited;      ///< timed; in the caller's stream, where it started to wait
  std::atomic<int> recorded_wait{
      0};                     ///< 0: not yet waited for, 1: `waited` is recorded, 2: nothing to measure
  int64_t seen_start_ns = 0;  ///< 0: not started yet
  bool finished = false;
};

/// NCCL's text for a result, with its advice where there is any.
std::string nccl_text(ncclResult_t result);

/// Runs what makes a communicator in another thread, bound to the device, which must own what it uses. Fails
/// with Exit::unavailable when it fails or does not return in time (NCCL itself would wait for ever).
ncclComm_t nccl_connect(device::Runtime& runtime, const DeviceCommOptions& options, const std::string& label,
                        int world_rank, std::function<ncclResult_t(ncclComm_t*)> make);

/// Communicators are in blocking mode: what hangs in issuing or on the device is aborted from the watching
/// thread, which makes the blocked call return.
class NcclGroup {
 public:
  /// Takes `comm` over.
  NcclGroup(device::Runtime& runtime, const DeviceCommOptions& options, Ledger* ledger, std::string label,
            int world_rank, ncclComm_t comm);
  /// finish() or abandon() has been called before.
  ~NcclGroup();
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  /// Throws the error that made the group fail.
  void check() const;
  bool failed() const { return failed_.load(std::memory_order_acquire); }

  /// Puts operations into the group's stream behind `stream`'s work (null: at once). `issue` runs under the
  /// group's lock. Null when the operation was recorded into a graph.
  std::shared_ptr<NcclFlight> fly(std::string what, const LedgerTicket& ticket, device::StreamHandle stream,
                                  const device::Event& end_of_capture,
                                  const std::function<ncclResult_t(ncclComm_t, device::StreamHandle)>& issue);
  /// Blocks until the operation is over or the group has failed.
  void await(const NcclFlight& flight);

  /// Destroys the communicator, together with the other ranks.
  void finish();
  /// Drops it alone.
  void abandon();

  device::Runtime& runtime() { return runtime_; }
  const DeviceCommOptions& options() const { return options_; }
  const std::string& label() const { return label_; }
  EventPool& order_events() { return *order_; }
  EventPool& timed_events() { return *timed_; }
  /// For ncclCommSplit, under the group's lock in `use`.
  ncclComm_t raw() const { return comm_; }

 private:
  void watch();
  bool look(NcclFlight& flight);  // true when nothing is left to see
  void fail_with(const std::string& text);
  void stop_watching();

  device::Runtime& runtime_;
  DeviceCommOptions options_;
  Ledger* ledger_;
  std::string label_;
  int world_rank_;
  std::shared_ptr<EventPool> order_, timed_;
  device::Stream stream_;
  ncclComm_t comm_ = nullptr;

  std::mutex issue_mutex_;                 // held around calls on comm_
  std::atomic<bool> aborted_{false};       // comm_ is gone
  std::atomic<int64_t> issuing_since_{0};  // a caller is inside of NCCL since then; 0: none is
  mutable std::mutex state_mutex_;         // flights_, error_, issuing_, stop_
  std::condition_variable wake_;
  std::deque<std::shared_ptr<NcclFlight>> flights_;
  std::optional<Error> error_;
  std::string issuing_;  // what that caller issues
  bool stop_ = false;
  std::atomic<bool> failed_{false};
  std::thread thread_;
};

}  // namespace nrl::comm

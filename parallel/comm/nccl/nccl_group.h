#pragma once
// Private to the NCCL backend: the only header that includes nccl.h. One NCCL communicator with its stream
// and the watchdog thread.

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include <nccl.h>

#include "core/base/error.h"
#include "core/device/runtime.h"
#include "parallel/comm/device_options.h"
#include "parallel/comm/event_pool.h"
#include "parallel/comm/executor.h"

namespace nrl::comm {

/// Names an operation in messages: "all_reduce #12 (16384 bytes of f32)".
struct NcclLabel {
  Op op = Op::barrier;
  DType dtype = DType::u8;
  uint64_t number = 0;
  int64_t bytes = 0;
  std::string text() const;
};

/// One operation in the group's stream, as the watchdog thread sees it.
struct NcclOperation {
  NcclLabel label;
  LogTicket ticket;
  EventPool::Pooled begin, end;  ///< timed
  EventPool::Pooled waited;      ///< timed; where the caller's stream started to wait
  enum class Wait : uint8_t { not_yet, recorded, unmeasured };
  std::atomic<Wait> wait{Wait::not_yet};  ///< recorded: `waited` is valid
  int64_t seen_start_ns = 0;              ///< 0: not started yet
  bool finished = false;
};

/// NCCL's error text for a result, with ncclGetLastError's details.
std::string nccl_text(ncclResult_t result);

/// Creates a communicator by `make`, which runs in another thread bound to the device and must own what it
/// uses. Fails with Exit::unavailable when `make` fails or does not return in time (NCCL itself would wait
/// forever), or when the library does not support one more group.
ncclComm_t nccl_connect(device::Runtime& runtime, const DeviceCommOptions& options, const std::string& label,
                        int world_rank, std::function<ncclResult_t(ncclComm_t*)> make);

/// Communicators are in blocking mode: the watchdog aborts an operation that hangs in issuing or on the
/// device, which makes the blocked call return.
class NcclGroup {
 public:
  /// Takes ownership of `comm`.
  NcclGroup(device::Runtime& runtime, const DeviceCommOptions& options, CollectiveLog* log, std::string label,
            int world_rank, ncclComm_t comm);
  /// finish() or abandon() must have been called.
  ~NcclGroup();
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  /// Throws the error that made the group fail.
  void check() const;
  bool failed() const { return failed_.load(std::memory_order_acquire); }

  /// Enqueues an operation in the group's stream, after the work in `stream` (null: none) and after
  /// `previous` (null: none), whose host_done() must be true. `issue` runs under the group's lock. Returns
  /// null when the operation was captured into a graph; `end_of_capture` is then recorded after it.
  using Issue = std::function<ncclResult_t(ncclComm_t, device::StreamHandle)>;
  std::shared_ptr<NcclOperation> enqueue(const NcclLabel& label, const LogTicket& ticket,
                                         device::StreamHandle stream, const Work* previous,
                                         const device::Event& end_of_capture, const Issue& issue);
  /// Blocks until the operation has completed or the group has failed.
  void wait_for(const NcclOperation& operation);

  /// ncclCommRegister; returns its handle, which may be null, and the call that undoes it.
  void* register_memory(void* data, size_t bytes);
  void unregister_memory(void* handle) noexcept;

  /// ncclCommDestroy; collective.
  void finish();
  /// ncclCommAbort; not collective.
  void abandon();

  device::Runtime& runtime() { return runtime_; }
  const DeviceCommOptions& options() const { return options_; }
  const std::string& label() const { return label_; }
  EventPool& order_events() { return *order_; }
  EventPool& timed_events() { return *timed_; }
  /// For ncclCommSplit.
  ncclComm_t raw() const { return comm_; }

 private:
  void watch();
  bool poll(NcclOperation& operation);  // true when it needs no further poll
  void fail_with(const std::string& text);
  void stop_watchdog();

  device::Runtime& runtime_;
  DeviceCommOptions options_;
  CollectiveLog* log_;
  std::string label_;
  int world_rank_;
  std::shared_ptr<EventPool> order_, timed_;
  device::Stream stream_;
  ncclComm_t comm_ = nullptr;

  std::mutex issue_mutex_;                 // held around calls on comm_
  std::atomic<bool> aborted_{false};       // comm_ is destroyed
  std::atomic<int64_t> issuing_since_{0};  // when a caller entered NCCL; 0: none is inside
  mutable std::mutex state_mutex_;         // in_flight_, error_, issuing_, stop_
  std::condition_variable wake_;
  std::deque<std::shared_ptr<NcclOperation>> in_flight_;
  std::optional<Error> error_;
  NcclLabel issuing_;  // the operation it issues
  bool stop_ = false;
  std::atomic<bool> failed_{false};
  std::thread thread_;
};

}  // namespace nrl::comm

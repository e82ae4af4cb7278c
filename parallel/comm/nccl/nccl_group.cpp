#include "parallel/comm/nccl/nccl_group.h"

#include <algorithm>
#include <chrono>

#include "core/base/log.h"
#include "core/base/threads.h"
#include "parallel/comm/executor.h"

namespace nrl::comm {

namespace {

using std::chrono::duration;
using std::chrono::milliseconds;

constexpr milliseconds poll_interval{20};  // between polls of the operations in flight
constexpr int polls_per_error_poll = 5;    // ncclCommGetAsyncError is expensive

/// Runs `body` in its own thread. nullopt when it has not returned in time; the thread is then left running.
std::optional<ncclResult_t> run_with_timeout(double seconds, std::function<ncclResult_t()> body) {
  struct State {
    std::mutex mutex;
    std::condition_variable ready;
    std::optional<ncclResult_t> result;
  };
  auto state = std::make_shared<State>();
  start_thread([state, body = std::move(body)] {
    const ncclResult_t result = body();
    const std::lock_guard lock(state->mutex);
    state->result = result;
    state->ready.notify_all();
  }).detach();
  std::unique_lock lock(state->mutex);
  state->ready.wait_for(lock, duration<double>(seconds), [&] { return state->result.has_value(); });
  return state->result;
}

int64_t to_ns(double ms) {
  return static_cast<int64_t>(std::max(ms, 0.0) * 1e6);
}

}  // namespace

std::string NcclLabel::text() const {
  return fmt::format("{} #{} ({} bytes of {})", name_of(op), number, bytes, name_of(dtype));
}

std::string nccl_text(ncclResult_t result) {
  std::string out = ncclGetErrorString(result);
  if (const char* more = ncclGetLastError(nullptr); more && *more) out += fmt::format(" ({})", more);
  return out;
}

ncclComm_t nccl_connect(device::Runtime& runtime, const DeviceCommOptions& options, const std::string& label,
                        int world_rank, std::function<ncclResult_t(ncclComm_t*)> make) {
  auto made = std::make_shared<ncclComm_t>(nullptr);
  const auto result =
      run_with_timeout(options.nccl_init_timeout_seconds, [made, &runtime, make = std::move(make)] {
        runtime.bind_thread();
        return make(made.get());
      });
  if (!result)
    fail(Exit::unavailable,
         "NCCL did not connect {} within {:.0f} s (rank {}): a rank is missing or cannot be reached. Fix: "
         "choose the network with NCCL_SOCKET_IFNAME (NCCL_DEBUG=INFO prints details), or set "
         "distributed.backend: staged",
         label, options.nccl_init_timeout_seconds, world_rank);
  if (*result != ncclSuccess)
    fail(Exit::unavailable,
         "NCCL cannot connect {} (rank {}): {}. Fix: see its text, or set distributed.backend: staged", label,
         world_rank, nccl_text(*result));
  return *made;
}

NcclGroup::NcclGroup(device::Runtime& runtime, const DeviceCommOptions& options, CollectiveLog* log,
                     std::string label, int world_rank, ncclComm_t comm)
    : runtime_(runtime),
      options_(options),
      log_(log),
      label_(std::move(label)),
      world_rank_(world_rank),
      order_(std::make_shared<EventPool>(runtime, device::EventKind::order)),
      timed_(std::make_shared<EventPool>(runtime, device::EventKind::timed)),
      stream_(runtime, device::Priority::high),
      comm_(comm),
      thread_(start_thread([this] { watch(); })) {}

NcclGroup::~NcclGroup() {
  stop_watchdog();
}

void NcclGroup::stop_watchdog() {
  {
    const std::lock_guard lock(state_mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void NcclGroup::check() const {
  if (!failed()) return;
  const std::lock_guard lock(state_mutex_);
  throw Error(*error_);
}

void NcclGroup::fail_with(const std::string& text) {
  {
    const std::lock_guard lock(state_mutex_);
    if (error_) return;
    error_.emplace(Exit::peer_lost, text);
    for (const auto& f : in_flight_) {
      if (f->finished || !log_) continue;
      if (f->seen_start_ns == 0) log_->start(f->ticket);
      log_->finish(f->ticket, true);
    }
    in_flight_.clear();
  }
  failed_.store(true, std::memory_order_release);
  // A caller blocked inside of NCCL holds the lock, and only the abort releases it.
  std::unique_lock lock(issue_mutex_, std::defer_lock);
  for (int i = 0; i < 50 && !lock.try_lock(); ++i) std::this_thread::sleep_for(poll_interval);
  if (!aborted_.exchange(true)) ncclCommAbort(comm_);
}

std::shared_ptr<NcclOperation> NcclGroup::enqueue(const NcclLabel& label, const LogTicket& ticket,
                                                  device::StreamHandle stream, const Work* previous,
                                                  const device::Event& end_of_capture, const Issue& issue) {
  const std::lock_guard lock(issue_mutex_);
  check();
  const bool captured = stream && runtime_.capturing(stream);
  if (stream) {
    // wait_in() refers to the state recorded here: the event may be reused immediately.
    const EventPool::Pooled ready = order_->take();
    ready->record(stream);
    ready->wait_in(stream_.get());
  }
  if (previous) previous->order_stream(stream_.get());
  auto operation = std::make_shared<NcclOperation>();
  operation->label = label;
  operation->ticket = ticket;
  if (!captured) {
    operation->begin = timed_->take();
    operation->end = timed_->take();
    operation->begin->record(stream_.get());
  }
  {
    const std::lock_guard state(state_mutex_);
    issuing_ = label;
  }
  // The first messages between two ranks connect them, which may hang.
  issuing_since_.store(now_ns(), std::memory_order_release);
  const ncclResult_t result = issue(comm_, stream_.get());
  issuing_since_.store(0, std::memory_order_release);
  if (result != ncclSuccess) {
    check();  // aborted by the watchdog: its error has the cause
    const std::string words = nccl_text(result);
    fail(result == ncclRemoteError || result == ncclSystemError ? Exit::peer_lost : Exit::internal,
         "{} on {} failed on rank {}: {}", label.text(), label_, world_rank_, words);
  }
  if (captured) {
    end_of_capture.record(stream_.get());
    if (log_) {
      log_->start(operation->ticket);
      log_->finish(operation->ticket, false, 0);
    }
    return nullptr;
  }
  operation->end->record(stream_.get());
  {
    const std::lock_guard state(state_mutex_);
    in_flight_.push_back(operation);
  }
  return operation;
}

void NcclGroup::wait_for(const NcclOperation& operation) {
  Backoff backoff(nullptr, 60);
  while (!failed() && !operation.end->done()) backoff.pause();
  check();
}

bool NcclGroup::poll(NcclOperation& o) {
  if (o.seen_start_ns == 0) {
    if (!o.begin->done()) return false;
    o.seen_start_ns = now_ns();
    if (log_) log_->start(o.ticket);
  }
  if (!o.finished) {
    if (!o.end->done()) {
      if (static_cast<double>(now_ns() - o.seen_start_ns) > options_.nccl_timeout_seconds * 1e9)
        fail_with(fmt::format(
            "{} on {} has run for more than {:.0f} s on rank {}: a rank of the group is lost, hangs "
            "or issues other operations",
            o.label.text(), label_, options_.nccl_timeout_seconds, world_rank_));
      return false;
    }
    o.finished = true;
    if (log_) log_->finish(o.ticket, false, to_ns(runtime_.elapsed_ms(o.begin->get(), o.end->get())));
  }
  using Wait = NcclOperation::Wait;
  const Wait wait = o.wait.load(std::memory_order_acquire);
  if (wait == Wait::not_yet || (wait == Wait::recorded && !o.waited->done())) return false;
  if (wait == Wait::recorded && log_)
    log_->expose(o.ticket, to_ns(runtime_.elapsed_ms(o.waited->get(), o.end->get())));
  return true;
}

void NcclGroup::watch() {
  try {
    runtime_.bind_thread();
    for (int round = 0;; ++round) {
      std::deque<std::shared_ptr<NcclOperation>> in_flight;
      {
        std::unique_lock lock(state_mutex_);
        if (wake_.wait_for(lock, poll_interval, [this] { return stop_; })) return;
        in_flight = in_flight_;
      }
      const int64_t since = issuing_since_.load(std::memory_order_acquire);
      if (since > 0 && static_cast<double>(now_ns() - since) > options_.nccl_init_timeout_seconds * 1e9) {
        std::string what;
        {
          const std::lock_guard lock(state_mutex_);
          what = issuing_.text();
        }
        fail_with(fmt::format(
            "{} on {} could not be issued within {:.0f} s on rank {}: a rank of the group is lost "
            "or does not take part",
            what, label_, options_.nccl_init_timeout_seconds, world_rank_));
        return;
      }
      // Errors first: operations of an aborted group appear finished.
      if (round % polls_per_error_poll == 0) {
        ncclResult_t state = ncclSuccess;
        const ncclResult_t asked = ncclCommGetAsyncError(comm_, &state);
        if (asked != ncclSuccess) state = asked;
        if (state != ncclSuccess && state != ncclInProgress) {
          const std::string words = nccl_text(state);
          std::string what = "no operation";
          for (const auto& f : in_flight)
            if (!f->finished) {
              what = f->label.text();
              break;
            }
          fail_with(
              fmt::format("{} lost a rank: {} in flight on rank {}: {}", label_, what, world_rank_, words));
          return;
        }
      }
      // In stream order: operations after an unfinished one need not be polled.
      std::deque<std::shared_ptr<NcclOperation>> seen;
      for (const auto& f : in_flight) {
        if (poll(*f)) seen.push_back(f);
        if (failed()) return;
        if (!f->finished) break;
      }
      if (seen.empty()) continue;
      const std::lock_guard lock(state_mutex_);
      std::erase_if(in_flight_,
                    [&](const auto& f) { return std::find(seen.begin(), seen.end(), f) != seen.end(); });
    }
  } catch (const std::exception& e) {  // of the device
    fail_with(fmt::format("the watchdog of {} on rank {} failed: {}", label_, world_rank_, e.what()));
  }
}

void* NcclGroup::register_memory(void* data, size_t bytes) {
  const std::lock_guard lock(issue_mutex_);
  check();
  void* handle = nullptr;
  if (const ncclResult_t result = ncclCommRegister(comm_, data, bytes, &handle); result != ncclSuccess)
    fail(Exit::unavailable,
         "NCCL cannot register {} bytes of {} on rank {}: {}. Fix: distributed.nccl_ub: false", bytes, label_,
         world_rank_, nccl_text(result));
  return handle;
}

void NcclGroup::unregister_memory(void* handle) noexcept {
  const std::lock_guard lock(issue_mutex_);
  if (handle && !aborted_.load()) (void)ncclCommDeregister(comm_, handle);
}

void NcclGroup::finish() {
  // Wait for the operations in the stream while the watchdog still runs.
  try {
    if (!failed()) {
      const EventPool::Pooled end = order_->take();
      end->record(stream_.get());
      while (!failed() && !end->done()) std::this_thread::sleep_for(milliseconds(1));
    }
  } catch (const std::exception& e) {
    log::warn("{}: {}", label_, e.what());
    abandon();
    return;
  }
  stop_watchdog();
  if (aborted_.exchange(true)) return;
  const auto result =
      run_with_timeout(std::min(options_.nccl_timeout_seconds, 60.0), [comm = comm_, &runtime = runtime_] {
        runtime.bind_thread();
        return ncclCommDestroy(comm);
      });
  if (!result)
    log::warn("{}: ncclCommDestroy did not return on rank {}; it is left running", label_, world_rank_);
  else if (*result != ncclSuccess)
    log::warn("{}: ncclCommDestroy failed on rank {}: {}", label_, world_rank_, nccl_text(*result));
}

void NcclGroup::abandon() {
  stop_watchdog();
  if (!aborted_.exchange(true)) ncclCommAbort(comm_);
}

}  // namespace nrl::comm

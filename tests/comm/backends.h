#pragma once
// Backends under test: a communicator with its memory.
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/device/runtime.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/world/world.h"

/// One backend. Operations go through it so that each is tried with a stream, after pending
/// work, and without.
class Backend {
 public:
  /// On host memory.
  Backend(std::string name, nrl::comm::Communicator& comm) : name_(std::move(name)), comm_(&comm) {}
  /// The same with a communicator of its own.
  Backend(std::string name, std::unique_ptr<nrl::comm::Communicator> comm)
      : name_(std::move(name)), own_(std::move(comm)), comm_(own_.get()) {}
  /// On memory of `runtime`, which the backend keeps after the communicator is gone.
  Backend(std::string name, std::unique_ptr<nrl::comm::Communicator> comm,
          std::shared_ptr<nrl::device::Runtime> runtime)
      : name_(std::move(name)),
        runtime_(std::move(runtime)),
        stream_(*runtime_),
        own_(std::move(comm)),
        comm_(own_.get()) {}

  const std::string& name() const { return name_; }
  nrl::comm::Communicator& comm() { return *comm_; }
  nrl::device::Runtime* runtime() { return runtime_.get(); }
  bool on_device() const { return runtime_ != nullptr; }
  nrl::comm::StreamRef stream() const { return {stream_.get()}; }
  /// False for nccl: sums in its own order, messages in the order of issue, NaN lost by max.
  bool strict = true;
  /// Collectives wait for the other ranks when they are issued (recording that checks).
  bool blocks = false;

  /// Waits until the stream is empty.
  void idle() const {
    if (runtime_) stream_.synchronize();
  }
  /// Runs an operation in one of its forms; the same one on all ranks.
  template <class Async, class Blocking>
  void run(Async async, Blocking blocking) {
    if (count_++ % 3 == 2) {
      idle();
      blocking();
    } else {
      async(stream()).wait();
    }
  }

  void all_reduce(nrl::comm::View v, nrl::comm::Reduce op = nrl::comm::Reduce::sum) {
    run([&](auto s) { return comm_->all_reduce_async(v, op, s); }, [&] { comm_->all_reduce(v, op); });
  }
  void reduce_scatter(nrl::comm::ConstView in, nrl::comm::View out, nrl::comm::Reduce op) {
    run([&](auto s) { return comm_->reduce_scatter_async(in, out, op, s); },
        [&] { comm_->reduce_scatter(in, out, op); });
  }
  void all_gather(nrl::comm::ConstView in, nrl::comm::View out) {
    run([&](auto s) { return comm_->all_gather_async(in, out, s); }, [&] { comm_->all_gather(in, out); });
  }
  void broadcast(nrl::comm::View v, int root) {
    run([&](auto s) { return comm_->broadcast_async(v, root, s); }, [&] { comm_->broadcast(v, root); });
  }
  void all_to_all(nrl::comm::ConstView in, nrl::comm::View out) {
    run([&](auto s) { return comm_->all_to_all_async(in, out, s); }, [&] { comm_->all_to_all(in, out); });
  }
  void all_to_all_v(nrl::comm::ConstView in, std::span<const int64_t> to, nrl::comm::View out,
                    std::span<const int64_t> from) {
    run([&](auto s) { return comm_->all_to_all_v_async(in, to, out, from, s); },
        [&] { comm_->all_to_all_v(in, to, out, from); });
  }
  void exchange(const std::vector<nrl::comm::Message>& m) {
    run([&](auto s) { return comm_->exchange_async(m, s); }, [&] { comm_->exchange(m); });
  }

 private:
  std::string name_;
  std::shared_ptr<nrl::device::Runtime> runtime_;
  nrl::device::Stream stream_;
  std::unique_ptr<nrl::comm::Communicator> own_;
  nrl::comm::Communicator* comm_;
  uint64_t count_ = 0;
};

/// Elements in the memory of a backend. On a device they are put there by work in its stream, which has not
/// run when the constructor returns, and read by work enqueued later.
template <class T>
class Data {
 public:
  Data(Backend& backend, std::vector<T> values) : backend_(backend), values_(std::move(values)) {
    if (!backend.on_device()) return;
    const size_t bytes = values_.size() * sizeof(T);
    device_ = nrl::device::Memory(*backend.runtime(), nrl::device::Memory::Kind::device, bytes);
    pinned_ = nrl::device::Memory(*backend.runtime(), nrl::device::Memory::Kind::pinned, bytes);
    if (bytes == 0) return;
    std::memcpy(pinned_.data(), values_.data(), bytes);
    backend.runtime()->copy(device_.data(), pinned_.data(), bytes, nrl::device::CopyKind::host_to_device,
                            backend.stream().native);
  }
  Data(Backend& backend, size_t n, T value = {}) : Data(backend, std::vector<T>(n, value)) {}
  Data(const Data&) = delete;
  Data& operator=(const Data&) = delete;
  ~Data() {
    if (backend_.on_device() && !values_.empty()) backend_.runtime()->synchronize(backend_.stream().native);
  }

  nrl::comm::View view() { return part(0, static_cast<int64_t>(values_.size())); }
  nrl::comm::View part(int64_t begin, int64_t n) {
    T* base = backend_.on_device() ? reinterpret_cast<T*>(device_.data()) : values_.data();
    return {base ? base + begin : nullptr, n, nrl::dtype_of<T>::value};
  }
  operator nrl::comm::View() { return view(); }
  operator nrl::comm::ConstView() { return view(); }

  /// The values after the work enqueued so far.
  const std::vector<T>& read() {
    if (!backend_.on_device() || values_.empty()) return values_;
    const size_t bytes = values_.size() * sizeof(T);
    backend_.runtime()->copy(pinned_.data(), device_.data(), bytes, nrl::device::CopyKind::device_to_host,
                             backend_.stream().native);
    backend_.idle();
    std::memcpy(values_.data(), pinned_.data(), bytes);
    return values_;
  }

 private:
  Backend& backend_;
  std::vector<T> values_;
  nrl::device::Memory device_, pinned_;
};

/// The backends of this test program, made by open_backends().
std::vector<std::unique_ptr<Backend>>& backends();
/// Collective. False with the reason where there is nothing to test on.
bool open_backends(nrl::comm::World& world, std::string& why_not);

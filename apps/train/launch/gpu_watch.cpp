#include "apps/train/launch/gpu_watch.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "apps/train/launch/faults.h"
#include "apps/train/launch/run_control.h"
#include "core/base/log.h"
#include "core/base/threads.h"
#include "core/device/cuda/nvml.h"
#include "core/device/cuda/xid.h"

namespace nrl::train {

struct GpuWatch::State {
  void run(const std::string& uuid, const std::string& library) {
    constexpr int poll_ms = 500;
    std::unique_ptr<cuda::Nvml> nvml = cuda::open_nvml(library.c_str());
    if (nvml && !nvml->watch(uuid)) nvml.reset();
    std::unique_lock lock(mutex);
    while (!stop) {
      std::optional<int> xid = std::exchange(raised, std::nullopt);
      lock.unlock();
      if (!xid && nvml) xid = nvml->wait_for_error(poll_ms);
      if (xid)
        found(fmt::format("GPU {}: {}", uuid, cuda::describe_xid(*xid)),
              cuda::recovery_of(*xid) >= cuda::Recovery::reset_gpu);
      lock.lock();
      if (!xid && !nvml) changed.wait(lock, [&] { return stop || raised; });
    }
    lock.unlock();
    nvml.reset();
    lock.lock();
    ended = true;
    changed.notify_all();
  }

  Found found;
  std::thread thread;
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<int> raised;
  bool stop = false, ended = false;
};

GpuWatch::GpuWatch(const std::string& uuid, Found found, const char* library)
    : state_(std::make_shared<State>()) {
  state_->found = std::move(found);
  const BlockedSignals blocked;
  state_->thread =
      start_thread([state = state_, uuid, name = std::string(library)] { state->run(uuid, name); });
}

GpuWatch::~GpuWatch() {
  fault::set_gpu_hook(nullptr);
  std::unique_lock lock(state_->mutex);
  state_->stop = true;
  state_->changed.notify_all();
  const bool ended = state_->changed.wait_for(lock, std::chrono::seconds(2), [&] { return state_->ended; });
  lock.unlock();
  if (ended)
    state_->thread.join();
  else
    state_->thread.detach();
}

void GpuWatch::raise(int xid) {
  const std::lock_guard lock(state_->mutex);
  state_->raised = xid;
  state_->changed.notify_all();
}

std::unique_ptr<GpuWatch> watch_gpu(const std::string& uuid) {
  auto watch = std::make_unique<GpuWatch>(uuid, [](const std::string& text, bool fatal) {
    RunControl* const control = RunControl::current();
    if (fatal && control && control->connected()) control->gpu_failed(text);
    log::warn_text(text);
  });
  fault::set_gpu_hook([of = watch.get()](int xid) { of->raise(xid); });
  return watch;
}

}  // namespace nrl::train

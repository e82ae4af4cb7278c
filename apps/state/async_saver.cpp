#include "apps/state/async_saver.h"

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <utility>

#include "apps/state/rank_group.h"
#include "core/base/threads.h"
#include "core/trace/trace.h"
#include "parallel/comm/background.h"

namespace nrl::train {
namespace {

// Long enough for a save that is about to end.
constexpr auto unwinding_wait = std::chrono::seconds(2);

}  // namespace

struct AsyncSaver::State {
  State(comm::World& world, std::unique_ptr<Snapshot> copy, device::Runtime* of)
      : ranks(world.comm().split(0, world.rank(), "save")), device(of), snapshot(std::move(copy)) {}

  void run(const Save& save) {
    const auto begin = std::chrono::steady_clock::now();
    try {
      if (device) device->bind_thread();
      snapshot->wait();
      outcome.path = save(*snapshot, rank_group(*ranks));
    } catch (const std::exception& e) {
      outcome.error = error_from(e);
    }
    outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    {
      const std::lock_guard lock(mutex);
      done = true;
    }
    changed.notify_all();
  }

  std::unique_ptr<comm::Communicator> ranks;
  device::Runtime* device;
  std::unique_ptr<Snapshot> snapshot;
  SaveOutcome outcome;  // of the thread until it is done
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
};

AsyncSaver::AsyncSaver(comm::World& world, std::unique_ptr<Snapshot> snapshot, device::Runtime* device)
    : state_(std::make_shared<State>(world, std::move(snapshot), device)) {}

AsyncSaver::~AsyncSaver() {
  if (!thread_.joinable()) return;
  if (std::uncaught_exceptions() > 0) {
    std::unique_lock lock(state_->mutex);
    if (!state_->changed.wait_for(lock, unwinding_wait, [this] { return state_->done; })) {
      thread_.detach();  // the process ends, or another rank ends it
      return;
    }
  }
  thread_.join();
}

void AsyncSaver::start(int64_t step, Save save) {
  NRL_CHECK(!in_flight(), "a save is in flight");
  state_->outcome = {.step = step};
  state_->done = false;
  state_->snapshot->take();
  released_ = {};
  thread_ = start_thread_without_signals(
      [state = state_, save = std::move(save), released = released_.get_future().share()] {
        trace::name_thread("checkpoint");
        comm::wait_in_background();
        if (released.get()) state->run(save);
      });
}

void AsyncSaver::release(bool saves) {
  if (!thread_.joinable()) return;
  released_.set_value(saves);
  if (!saves) thread_.join();
}

bool AsyncSaver::done() const {
  const std::lock_guard lock(state_->mutex);
  return state_->done;
}

SaveOutcome AsyncSaver::join() {
  thread_.join();
  return std::move(state_->outcome);
}

}  // namespace nrl::train

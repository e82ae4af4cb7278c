#pragma once
// Saves checkpoints in a thread of its own, from a snapshot, while training goes on.

#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "apps/state/snapshot.h"
#include "core/base/error.h"
#include "core/io/rank_group.h"
#include "parallel/comm/world/world.h"

namespace nrl::train {

/// How a save ended, alike on all ranks but for the time.
struct SaveOutcome {
  int64_t step = 0;
  std::string path = {};            ///< of the checkpoint; empty: it failed
  std::optional<Error> error = {};  ///< why
  double seconds = 0;
};

class AsyncSaver {
 public:
  /// Collective: the ranks get a communicator of their own. `device`: of the snapshot; null: a CPU. Both must
  /// outlive the object.
  AsyncSaver(comm::World& world, std::unique_ptr<Snapshot> snapshot, device::Runtime* device);
  /// Waits for a save. While an exception ends the run it waits only shortly: another rank may be gone.
  ~AsyncSaver();
  AsyncSaver(const AsyncSaver&) = delete;
  AsyncSaver& operator=(const AsyncSaver&) = delete;

  /// Takes the snapshot and starts a thread, which calls `save` once release() allows it, when all ranks have
  /// got so far: `save` is a collective operation of the ranks that it gets, and returns the path. No save
  /// may be in flight.
  using Save = std::function<std::string(Snapshot& snapshot, const RankGroup& ranks)>;
  void start(int64_t step, Save save);
  void release(bool saves);
  /// True from release(true) to join().
  bool in_flight() const { return thread_.joinable(); }
  /// True when join() does not wait.
  bool done() const;
  SaveOutcome join();

 private:
  struct State;
  std::shared_ptr<State> state_;  // also the thread's
  std::thread thread_;
  std::promise<bool> released_;
};

}  // namespace nrl::train

#pragma once
// The simulated device: host memory, kernels on fibers (fiber.h), streams whose work is deferred. Tests only.
//
// Work enqueued on a stream does not run at once. It runs when a call must wait for it (synchronize, done, a
// copy of pageable memory, a long queue), one piece at a time, in a random order that the streams and events
// allow, chosen from a seed: a missing event wait becomes a wrong result. Under the thread sanitizer a stream
// is a thread and events order it: there a missing wait is a data race in every order.
//
// What CUDA forbids is an error: calls from inside stream work or from a thread that was not bound, stale
// handles, copies outside of an allocation, everything that breaks a capture. Work that throws makes all
// later calls throw the same. Device memory starts as NaN and lies between guard pages; blocks of up to 32
// MiB are accessible only while stream work runs, so that host code that reads device memory gets SIGSEGV.
// Objects that are alive when the device closes are reported and end the program.

#include <functional>
#include <memory>
#include <string>

#include "core/device/runtime.h"
#include "tests/sim/engine/enqueue.h"

namespace nrl::device {

struct SimOptions {
  uint64_t seed = 1;                ///< of the order in which streams advance, and of when they do
  bool deferred = true;             ///< false: everything runs when it is enqueued
  size_t memory = size_t{4} << 30;  ///< bytes the device claims to have
  int multiprocessors = 4;          ///< what grid sizes are derived from
  /// Gets leaks and unreported errors when the device closes; empty: standard error and abort().
  std::function<void(const std::string&)> on_problem = {};
};

/// Binds the calling thread. The seed also picks when work runs: seeds 1 and 2 (and every fourth after
/// them) defer all work until something waits for it, 3 sometimes and 4 often runs it when it is enqueued.
std::unique_ptr<Runtime> open_sim(const SimOptions& options = {});

/// The work enqueued on `stream` from now on never runs, as behind a kernel that never ends. `device` must be
/// a simulated one.
void sim_stall(Runtime& device, StreamHandle stream);

}  // namespace nrl::device

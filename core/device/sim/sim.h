#pragma once
// The simulated device: host memory, kernels on fibers (fiber.h), streams whose work is put off. Tests only.
//
// Work enqueued on a stream does not run at once. It runs when something must wait for it (synchronize, done,
// a full queue), and then in any order that the streams and events allow, chosen at random from a seed: a
// missing event wait becomes a wrong result. Device memory starts as NaN and is poisoned after its release.

#include <functional>
#include <memory>

#include "core/device/runtime.h"

namespace nrl::device {

struct SimOptions {
  uint64_t seed = 1;                ///< of the order in which streams advance
  bool deferred = true;             ///< false: everything runs when it is enqueued
  size_t memory = size_t{4} << 30;  ///< bytes the device claims to have
  int multiprocessors = 4;          ///< what grid sizes are derived from
};

std::unique_ptr<Runtime> open_sim(const SimOptions& options = {});

/// What kernels and the simulated matrix product enqueue: `work` runs in stream order. `stream` null runs it
/// at once.
void sim_enqueue(StreamHandle stream, std::function<void()> work);

}  // namespace nrl::device

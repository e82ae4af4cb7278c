#include "core/device/sim/sim.h"

namespace nrl::device {

void sim_enqueue(StreamHandle, std::function<void()> work) {
  work();
}

}  // namespace nrl::device

#pragma once
// Power and energy of a training step: each kind of work draws its own power while the device is busy with
// it. Models of this kind are off by about 11 % (arXiv:2506.14551).

#include "apps/machine/device_models.h"
#include "core/ops/cost.h"

namespace nrl::predict {

/// Seconds of a step in which a rank's device does work of a kind. Links may be busy beside the others.
struct BusySeconds {
  double gemm = 0, attention = 0, memory = 0, links = 0;

  double& of(ops::Work work) {
    return work == ops::Work::gemm ? gemm : work == ops::Work::attention ? attention : memory;
  }
};

/// Watts of a device.
struct PowerModel {
  double limit = 0, idle = 0;
  double gemm = 0, attention = 0, memory = 0, links = 0;  ///< while busy with it
};
/// The power of a GPU: what was measured in steps, whatever its calls do, else assumed, with GEMMs at the
/// power limit. All 0 for a CPU.
PowerModel power_of(const machine::DeviceModel& device);

/// Joules of a step by cause. They add up to total().
struct StepEnergy {
  double idle = 0;                                        ///< of the devices, throughout the step
  double gemm = 0, attention = 0, memory = 0, links = 0;  ///< above idle
  double nodes = 0;                                       ///< CPUs, host memory, adapters and fans
  double building = 0;                                    ///< cooling and conversion

  double total() const { return idle + gemm + attention + memory + links + nodes + building; }
};

/// The energy of `ranks` devices in `nodes` nodes that draw `node_watts` each beside their GPUs, in a step of
/// `step` seconds. `pue`: see cluster.cost.pue. No device exceeds its power limit in the average of a step.
StepEnergy step_energy(const PowerModel& power, const BusySeconds& busy, double step, int ranks, int nodes,
                       double node_watts, double pue);

}  // namespace nrl::predict

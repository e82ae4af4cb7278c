#include "apps/predict/energy.h"

#include <algorithm>

namespace nrl::predict {

PowerModel power_of(const machine::DeviceModel& device) {
  // Assumed fractions of the power limit, until a profile measures them.
  constexpr double attention = 0.9, memory = 0.7, links = 0.4;
  const double limit = device.power_limit;
  return {.limit = limit,
          .idle = device.idle_power,
          .gemm = limit,
          .attention = attention * limit,
          .memory = memory * limit,
          .links = links * limit};
}

StepEnergy step_energy(const PowerModel& p, const BusySeconds& b, double step, int ranks, int nodes,
                       double node_watts, double pue) {
  StepEnergy e{.idle = p.idle * step,
               .gemm = (p.gemm - p.idle) * b.gemm,
               .attention = (p.attention - p.idle) * b.attention,
               .memory = (p.memory - p.idle) * b.memory,
               .links = (p.links - p.idle) * b.links};
  // Links that are busy beside a GEMM slow its clock instead.
  const double above = e.gemm + e.attention + e.memory + e.links, most = (p.limit - p.idle) * step;
  const double scale = above > most ? most / above : 1;
  for (double* of : {&e.gemm, &e.attention, &e.memory, &e.links}) *of *= scale * ranks;
  e.idle *= ranks;
  e.nodes = node_watts * nodes * step;
  e.building = (pue - 1) * e.total();
  return e;
}

}  // namespace nrl::predict

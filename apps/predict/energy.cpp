#include "apps/predict/energy.h"

#include <algorithm>

namespace nrl::predict {

PowerModel power_of(const machine::DeviceModel& device) {
  // Assumed fractions of the power limit.
  constexpr double attention = 0.9, memory = 0.7, links = 0.4;
  const double limit = device.power_limit;
  PowerModel out{.limit = limit,
                 .idle = device.idle_power,
                 .gemm = limit,
                 .attention = attention * limit,
                 .memory = memory * limit,
                 .links = links * limit};
  // A measurement is of all kinds of calls together.
  if (limit > 0 && device.busy_power > 0)
    out.gemm = out.attention = out.memory = std::clamp(device.busy_power, out.idle, limit);
  return out;
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

#include "apps/bench/rates.h"

#include "apps/machine/device_models.h"
#include "core/ops/peak.h"

namespace nrl::bench {

double peak_of(Machine& machine) {
  return machine.gpu() ? machine::peak_flops(machine.exec().device->properties())
                       : ops::measure_fma_peak(machine.exec().threads, 0.2) * 1e9;
}

std::string peak_text(const Machine& machine, double peak) {
  if (peak <= 0) return "peak unknown";
  return machine.gpu() ? fmt::format("peak {:.0f} TFLOP/s (data sheet, dense bf16)", peak * 1e-12)
                       : fmt::format("fp32 peak {:.0f} GFLOP/s (register FMAs)", peak * 1e-9);
}

bool compares_with_f32(const Machine& machine, DType dtype) {
  return !machine.gpu() && dtype != DType::f32;
}

std::string rate_text(const Machine& machine, double rate, double peak) {
  const double scaled = rate * (machine.gpu() ? 1e-12 : 1e-9);
  if (peak <= 0) return fmt::format("{:>8.1f}        ", scaled);
  return fmt::format("{:>8.1f} ({:>3.0f} %)", scaled, rate / peak * 100);
}

JsonValue rate_json(double seconds, double flops, double peak) {
  return JsonValue::object(
      {{"seconds", seconds},
       {"flops_per_s", flops / seconds},
       {"fraction_of_peak", peak > 0 ? JsonValue(flops / seconds / peak) : JsonValue()}});
}

}  // namespace nrl::bench

#pragma once
// Shared by the benchmarks of compute-bound kernels: rates relative to peak FLOP/s, and their tables of
// cases.

#include <span>
#include <string>

#include "apps/bench/machine.h"

namespace nrl::bench {

/// Peak FLOP/s: the data sheet of a GPU (bf16), or the measured FMA rate of a CPU (fp32).
double peak_of(Machine& machine);
/// "peak 989 TFLOP/s (data sheet, dense bf16)".
std::string peak_text(const Machine& machine, double peak);

/// On a CPU 16-bit kernels are compared with those of f32, in turn: the processor's clock and load drift.
bool compares_with_f32(const Machine& machine, DType dtype);

/// "  612 (62 %)", in TFLOP/s on a GPU and GFLOP/s on a CPU.
std::string rate_text(const Machine& machine, double rate, double peak);
JsonValue rate_json(double seconds, double flops, double peak);

template <class Case>
std::span<const Case> choose(const Args& args, const Machine& machine, std::span<const Case> quick,
                             std::span<const Case> gpu, std::span<const Case> cpu) {
  return args.quick ? quick : machine.gpu() ? gpu : cpu;
}

/// Measures the cases that --only selects; one that fails is reported and does not end the others. The exit
/// code.
template <class Case, class Measure>
int measure_all(const Args& args, std::span<const Case> cases, Report& report, const Measure& measure) {
  for (const Case& c : cases) {
    if (!selected(args, c.name)) continue;
    try {
      measure(c);
    } catch (const Error& error) {
      report.add_failure(c.name, error.what());
    }
  }
  return report.finish();
}

}  // namespace nrl::bench

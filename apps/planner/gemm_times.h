#pragma once
// Times of GEMMs in shapes that a window has none of, measured on the CPU that predicts.

#include <map>
#include <span>

#include "apps/machine/profile.h"
#include "core/config/config.h"
#include "core/ops/exec.h"

namespace nrl::planner {

/// GEMMs of linear layers with f32 or bf16 operands, alone, with operands that no earlier call has left in
/// the nearest cache. Small shapes are timed only, for which a model is worst: a call of at most some
/// milliseconds.
class GemmTimes {
 public:
  GemmTimes(const KernelsConfig& kernels, int threads);

  /// Seconds of a call; 0 where it is none of these, or when one second has been spent.
  double of(const machine::CallKey& key);

 private:
  ops::Exec exec_;
  double spent_ = 0;
  std::map<machine::CallKey, double> times_;
};

/// Adds the GEMMs of `calls` that `profile` has no times of: the measured time of their shape, times the
/// ratio of the profile's times to those measured here for the same op and type. False if none was added.
bool add_gemms(std::span<const ops::Call> calls, GemmTimes& times, machine::Profile& profile);

}  // namespace nrl::planner

#pragma once
// Times of single kernel calls with what they cost, for the roofline of a step.

#include <vector>

#include "core/ops/cost.h"
#include "core/ops/exec.h"
#include "core/ops/kernel_table.h"

namespace nrl::ops {

/// A call that was executed. A kernel that another one calls (an activation within a GEMM) is a call of its
/// own, whose time the outer one does not count; the GEMMs of experts, on threads of their own, are one call.
struct TimedCall {
  Call call;
  double seconds = 0;
};

/// While it lives, an execution context on the CPU runs its kernels through a table that times them. Only one
/// may live at a time. Turns trace::innermost() on, which names the ranges of the calls.
class KernelTimer {
 public:
  explicit KernelTimer(Exec& exec);
  ~KernelTimer();
  KernelTimer(const KernelTimer&) = delete;
  KernelTimer& operator=(const KernelTimer&) = delete;

  /// The calls since the last time, in the order in which they began.
  std::vector<TimedCall> take();

 private:
  Exec& exec_;
  const KernelTable& kernels_;
  KernelTable timed_;
};

}  // namespace nrl::ops

#pragma once
// Where the time of a step on a CPU goes: its kernels beside what this machine could reach at best, the
// largest loss first. Williams et al., Roofline (2009): a kernel is limited by arithmetic or by memory.

#include <span>
#include <string>
#include <vector>

#include "apps/plan/parts.h"
#include "core/io/json.h"
#include "core/ops/kernel_timer.h"

namespace nrl::bench {

/// Equal calls of a step together.
struct RooflineRow {
  std::string part;    ///< as in `bench step --predict`
  std::string kernel;  ///< with the shape of a GEMM: rows x columns x inner
  int64_t calls = 0;
  double flops = 0, bytes = 0;  ///< of all calls; bytes as in ops::Cost, each operand once
  double seconds = 0;
  double attainable = 0;  ///< seconds at the rates of the machine
  double surplus = 0;     ///< seconds that arithmetic would take more than memory

  /// Limited by arithmetic, not by memory.
  bool arithmetic() const { return surplus > 0; }

  /// Above 0 where the machine could be faster. A kernel of operands in a cache may outrun the copy.
  double lost() const { return seconds - attainable; }
};

class Roofline {
 public:
  /// `calls`: of one step, which took `seconds`.
  Roofline(const plan::Peaks& rates, std::span<const ops::TimedCall> calls, double seconds);

  /// By the time lost; what lies between kernels (data, communication, the host) is the last one. Their times
  /// add up to the step.
  const std::vector<RooflineRow>& rows() const { return rows_; }
  std::string text() const;
  JsonValue json() const;

 private:
  plan::Peaks rates_;
  std::vector<RooflineRow> rows_;
  double seconds_ = 0;
};

}  // namespace nrl::bench

#include "core/ops/cost.h"

#include "core/ops/exec.h"
#include "core/trace/trace.h"

namespace nrl::ops {

void note_call(Exec& exec, const char* op, const Cost& cost) {
  if (exec.calls) exec.calls->push_back({.op = op, .range = trace::innermost(), .cost = cost});
}

}  // namespace nrl::ops

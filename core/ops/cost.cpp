#include "core/ops/cost.h"

#include <algorithm>

#include "core/ops/exec.h"
#include "core/trace/trace.h"

namespace nrl::ops {

void note_call(Exec& exec, const char* op, const Cost& cost) {
  if (exec.calls)
    exec.calls->push_back({.op = op,
                           .range = trace::innermost(),
                           .cost = cost,
                           .step = exec.step,
                           .microbatch = exec.microbatch,
                           .pieces = exec.pieces});
}

void note_scratch(Exec& exec, size_t bytes) {
  if (exec.scratch) *exec.scratch = std::max(*exec.scratch, bytes);
}

}  // namespace nrl::ops

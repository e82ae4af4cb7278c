#include "core/ops/kernel_timer.h"

#include <utility>

#include "core/base/clock.h"
#include "core/base/error.h"
#include "core/ops/ops_list.h"
#include "core/trace/trace.h"

namespace nrl::ops {
namespace {

// They belong to the timer that lives: entries of a table are plain functions.
const KernelTable* real = nullptr;
std::vector<TimedCall> calls;
double nested = 0;  // seconds of the calls within the one that runs

// Kernels that call others from several threads at once.
constexpr bool fans_out(Kernel kernel) {
  return kernel == Kernel::grouped_linear_forward || kernel == Kernel::grouped_linear_backward_data ||
         kernel == Kernel::grouped_linear_backward_weight;
}

template <Kernel kernel, auto entry, class Arguments>
void timed(Exec& exec, const Arguments& a) {
  const size_t at = calls.size();
  const char* const op = name_of(kernel);
  calls.push_back(
      {.call = {.op = op, .range = trace::innermost(op), .cost = cost(exec, a), .step = exec.step}});
  const double around = std::exchange(nested, 0), begin = steady_seconds();
  if constexpr (fans_out(kernel)) {
    Exec untimed = exec;
    untimed.kernels = real;
    (real->*entry)(untimed, a);
  } else {
    (real->*entry)(exec, a);
  }
  const double seconds = steady_seconds() - begin;
  calls[at].seconds = seconds - nested;
  nested = around + seconds;
}

}  // namespace

KernelTimer::KernelTimer(Exec& exec) : exec_(exec), kernels_(*exec.kernels), timed_(kernels_) {
  NRL_CHECK(!real && !exec.on_gpu(), "one timer at a time, of kernels on the CPU");
  real = &kernels_;
#define NRL_TIMED(entry, Args) \
  if (timed_.entry) timed_.entry = timed<Kernel::entry, &KernelTable::entry, Args>;
  NRL_KERNELS(NRL_TIMED)
#undef NRL_TIMED
  exec.kernels = &timed_;
  trace::track_nesting(true);
}

KernelTimer::~KernelTimer() {
  trace::track_nesting(false);
  exec_.kernels = &kernels_;
  real = nullptr;
  calls.clear();
}

std::vector<TimedCall> KernelTimer::take() {
  return std::exchange(calls, {});
}

}  // namespace nrl::ops

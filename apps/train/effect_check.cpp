#include "apps/train/effect_check.h"

#include "core/base/text.h"
#include "core/base/threads.h"
#include "core/device/cpu/features.h"

namespace nrl::train {

void check_threads_variable(const ConfigResult& result, Diagnostics& out) {
  constexpr std::string_view key = "kernels.num_threads";
  if (!result.config.kernels.num_threads.is_auto() || !result.sound(key)) return;
  const auto invalid = cpu::omp_num_threads().invalid;
  if (!invalid) return;
  out.push_back(diagnose(
      result, key,
      fmt::format("OMP_NUM_THREADS is \"{}\", which is ignored: expected a number from 1 to {}, or a list of "
                  "them (\"4,2\"), of which the first counts",
                  printable(clipped(*invalid, 80)), max_threads),
      "", {"Fix: correct or unset it, or set kernels.num_threads"}, Severity::warning));
}

}  // namespace nrl::train

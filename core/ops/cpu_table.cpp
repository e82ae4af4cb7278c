#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"

namespace nrl::ops {
namespace {

NRL_DEFINE_TABLE(baseline_kernels, baseline)
NRL_DEFINE_TABLE(avx2_kernels, avx2)
NRL_DEFINE_TABLE(avx512_kernels, avx512)

/// The kernels of AVX-512, and of NRL_BF16_OPS those that multiply bf16 and round to it natively.
const KernelTable& avx512_bf16_kernels() {
  static const KernelTable filled = [] {
    KernelTable table = avx512_kernels();
    using namespace avx512_bf16;
    NRL_BF16_OPS(NRL_FILL)
    return table;
  }();
  return filled;
}

/// The kernels of AVX512_BF16, and of NRL_AMX_OPS those that multiply bf16 on tiles.
const KernelTable& avx512_amx_kernels() {
  static const KernelTable filled = [] {
    KernelTable table = avx512_bf16_kernels();
    using namespace avx512_amx;
    NRL_AMX_OPS(NRL_FILL)
    return table;
  }();
  return filled;
}

}  // namespace

const KernelTable& cpu_kernels(cpu::Isa isa) {
  NRL_CHECK(isa <= cpu::best_isa(), "this processor does not have {}", name_of(isa));
  // No other table is filled: the compiler may fill it with instructions that this processor does not have.
  constexpr const KernelTable& (*tables[])() = {baseline_kernels, avx2_kernels, avx512_kernels,
                                                avx512_bf16_kernels, avx512_amx_kernels};
  return tables[static_cast<int>(isa)]();
}

}  // namespace nrl::ops

// op_tests: every instruction set of this processor, and the GPU's kernels on the CPU.

#include "core/device/cpu/features.h"
#include "core/ops/ops_list.h"
#include "tests/ops/backend.h"

namespace nrl::ops::amx_emulated {
void fill_linear(KernelTable& table);
void fill_attention(KernelTable& table);
}  // namespace nrl::ops::amx_emulated

namespace nrl::ops_test {

Program program() {
  Program program;
  for (cpu::Isa isa :
       {cpu::Isa::baseline, cpu::Isa::avx2, cpu::Isa::avx512, cpu::Isa::avx512_bf16, cpu::Isa::avx512_amx}) {
    if (isa > cpu::best_isa()) continue;
    Backend b;
    b.name = name_of(isa);
    b.kernels = complete(ops::cpu_kernels(isa));
    // All other kernels are those of avx512, and of avx512_bf16 (core/ops/cpu_table.cpp).
#define NRL_NAME(op) #op,
    if (isa == cpu::Isa::avx512_bf16) b.only = {NRL_BF16_OPS(NRL_NAME)};
    if (isa == cpu::Isa::avx512_amx) b.only = {NRL_AMX_OPS(NRL_NAME)};
#undef NRL_NAME
    program.backends.push_back(std::move(b));
  }
  if (cpu::best_isa() >= cpu::Isa::avx512) {
    Backend b;
    b.name = "amx_emulated";
    b.kernels = complete(ops::cpu_kernels(cpu::Isa::avx512));
    ops::amx_emulated::fill_linear(b.kernels);
    ops::amx_emulated::fill_attention(b.kernels);
    // GEMMs and attention of other types are those of avx512.
    b.only = {"attention.bf16", "linear.bf16",   "linear in ",     "linear of ",
              "linear sums",    "linear passes", "grouped_linear."};
    program.backends.push_back(std::move(b));
  }
  program.backends.push_back(sim_backend());
  return program;
}

}  // namespace nrl::ops_test

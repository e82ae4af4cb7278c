#include "core/ops/kernel_table.h"

#include "core/ops/cpu_families.h"

namespace nrl::ops {
namespace {

#define NRL_FILL(family) fill_##family(table);
KernelTable baseline_table() {
  using namespace baseline;
  KernelTable table;
  NRL_OPS_FAMILIES(NRL_FILL)
  return table;
}
KernelTable avx2_table() {
  using namespace avx2;
  KernelTable table;
  NRL_OPS_FAMILIES(NRL_FILL)
  return table;
}
KernelTable avx512_table() {
  using namespace avx512;
  KernelTable table;
  NRL_OPS_FAMILIES(NRL_FILL)
  return table;
}
#undef NRL_FILL

}  // namespace

const KernelTable& cpu_kernels(cpu::Isa isa) {
  NRL_CHECK(isa <= cpu::best_isa(), "this processor does not have {}", cpu::name_of(isa));
  static const KernelTable tables[] = {baseline_table(), avx2_table(), avx512_table()};
  return tables[static_cast<int>(isa)];
}

}  // namespace nrl::ops

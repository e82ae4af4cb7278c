#include "tests/ops/reference/table.h"

#include "core/ops/kernel_table.h"
#include "core/ops/ops_list.h"

namespace nrl::ops {

namespace reference {
NRL_OPS(NRL_DECLARE_FILL)
}

NRL_DEFINE_TABLE(reference_kernels, reference)

}  // namespace nrl::ops

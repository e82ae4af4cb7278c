#include "core/ops/ops_list.h"

namespace nrl::ops {

NRL_DEFINE_TABLE(reference_kernels, reference)

}  // namespace nrl::ops

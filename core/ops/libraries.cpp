#include "core/ops/libraries.h"

#include "core/ops/attention/engine.h"
#include "core/ops/linear/gemm_engine.h"

namespace nrl::ops {

Libraries::Libraries() = default;
Libraries::~Libraries() = default;

}  // namespace nrl::ops

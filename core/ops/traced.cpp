#include "core/ops/traced.h"

#include <cstdint>

namespace nrl::ops {

trace::Range traced(const char* op, const Cost& cost) {
  std::vector<Cost>* const costs = detail::collected_costs;
  if (!costs) return trace::Range(op, trace::Kind::op);
  costs->push_back(cost);
  return trace::Range(op, trace::Kind::op, static_cast<uint32_t>(costs->size() - 1),
                      cost.flops > 0 ? cost.flops : cost.bytes());
}

}  // namespace nrl::ops

#include "core/tensor/tensor.h"

namespace nrl {

std::string describe(const Tensor& t) {
  std::string out(name_of(t.dtype));
  out += "[";
  for (int i = 0; i < t.rank; ++i) out += (i ? ", " : "") + std::to_string(t.dim(i));
  return out + "]";
}

}  // namespace nrl

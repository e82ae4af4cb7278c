#pragma once
// What carries out the matrix products of a GPU: cuBLASLt, or host code on the simulated device.

namespace nrl::ops::gemm {

class Engine {
 public:
  virtual ~Engine() = default;
};

}  // namespace nrl::ops::gemm

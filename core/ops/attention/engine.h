#pragma once
// A library of fused attention (cuDNN) that takes the shapes it supports; our own kernels do the rest.

namespace nrl::ops::attention {

class Engine {
 public:
  virtual ~Engine() = default;
};

}  // namespace nrl::ops::attention

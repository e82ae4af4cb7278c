#pragma once
// Values that pass from one op of a layer to the next.

#include "apps/model/program/layer.h"
#include "core/ops/quantize.h"

namespace nrl::model {

class PreNorm;

/// An operand of a GEMM: a slot, or values that have no slot because their only reader computes them as it
/// rounds them to FP8 (ops::QuantizeSource): the slot's activation, the gradient of that activation, or the
/// output of a norm.
struct Value {
  Slot slot = {};
  ops::Activation activation = ops::Activation::none;
  bool gated = false;
  Slot d_out = {};                  ///< gradient of the activation: the value is the gradient of `slot`
  Slot amax = {};                   ///< amax of the value; set only if its producer computed it
  const PreNorm* norm = nullptr;    ///< replaces the slot
  int64_t column = 0, columns = 0;  ///< the slot's columns that are the value; 0 columns: all
};

}  // namespace nrl::model

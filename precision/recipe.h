#pragma once
// Which number formats a run uses, per role.

#include <string_view>

#include "core/base/dtype.h"

namespace nrl::precision {

/// Formats by role. Gradients of weights and optimizer state are f32 in every recipe built so far.
struct Recipe {
  DType weights = DType::f32;      ///< what the layers read
  DType activations = DType::f32;  ///< what the slots hold
  /// True when the optimizer keeps f32 master weights apart from the weights the layers read.
  bool master_weights() const { return weights != DType::f32; }
  bool operator==(const Recipe&) const = default;
};

inline constexpr Recipe float32{};
/// bf16 storage of weights and activations, f32 arithmetic and f32 master weights.
inline constexpr Recipe bfloat16{DType::bf16, DType::bf16};

}  // namespace nrl::precision

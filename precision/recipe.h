#pragma once
// The number formats of a run, by role.

#include <string_view>

#include "core/base/dtype.h"

namespace nrl::precision {

/// Weight gradients and optimizer state are f32 in every recipe so far.
struct Recipe {
  DType weights = DType::f32;      ///< what the layers read
  DType activations = DType::f32;  ///< what the slots hold
  /// True when the optimizer keeps separate f32 master weights.
  bool master_weights() const { return weights != DType::f32; }
  bool operator==(const Recipe&) const = default;
};

inline constexpr Recipe float32{};
/// bf16 storage of weights and activations, f32 arithmetic and f32 master weights.
inline constexpr Recipe bfloat16{DType::bf16, DType::bf16};

}  // namespace nrl::precision

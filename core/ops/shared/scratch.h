#pragma once
// Cutting an op's workspace into aligned pieces.

#include <cstddef>
#include <cstdint>

#include "core/base/error.h"
#include "core/ops/exec.h"

namespace nrl::ops {

inline constexpr size_t scratch_alignment = 64;

/// Bytes that `count` elements take in a Scratch, alignment included.
constexpr size_t scratch_bytes(int64_t count, size_t element = sizeof(float)) {
  const size_t bytes = static_cast<size_t>(count) * element;
  return (bytes + scratch_alignment - 1) / scratch_alignment * scratch_alignment;
}

/// Hands out consecutive pieces of a workspace, each aligned to 64 bytes. The workspace must have the size
/// that the op's *_workspace() gives.
class Scratch {
 public:
  Scratch(const char* op, const Workspace& workspace) : op_(op), workspace_(workspace) {
    const auto address = reinterpret_cast<uintptr_t>(workspace.data);
    used_ = (scratch_alignment - address % scratch_alignment) % scratch_alignment;
  }

  float* floats(int64_t count) { return reinterpret_cast<float*>(bytes(scratch_bytes(count))); }

  std::byte* bytes(size_t count) {
    NRL_CHECK(used_ + count <= workspace_.size, "{}: the workspace has {} bytes, {} are needed", op_,
              workspace_.size, used_ + count);
    std::byte* piece = workspace_.data + used_;
    used_ += scratch_bytes(static_cast<int64_t>(count), 1);
    return piece;
  }

  /// The rest of the workspace, for a callee.
  Workspace rest() const {
    return used_ < workspace_.size ? Workspace{workspace_.data + used_, workspace_.size - used_}
                                   : Workspace{};
  }

 private:
  const char* op_;
  Workspace workspace_;
  size_t used_ = 0;
};

}  // namespace nrl::ops

#pragma once
// Causal attention over the tokens of all ranks of a context-parallel group, forward and backward.
//
//   p2p         keys and values go around the ring while the rank attends to those it has; the results over
//               the ranks' keys are merged in f32 by their lse. The gradients of keys and values go around
//               with them, in f32.
//   a2a         an all-to-all turns local tokens with all heads into all tokens with heads / c (Ulysses,
//               Jacobs et al. 2023)
//   a2a+p2p     both (bounds.h)
//   all_gather  all keys and values are gathered; each chunk of queries attends to its prefix, and the
//               gradients of keys and values are reduce-scattered in f32
//
// All memory is the caller's, so that it comes from the memory plan: what the backward pass needs (`saved`)
// and what lives only during a pass (`buffer`). Both are (N, bytes per row) with the widths that the class
// states, where N are the local rows.

#include <span>
#include <vector>

#include "core/ops/exec.h"
#include "parallel/comm/communicator.h"
#include "parallel/context/shape.h"

namespace nrl::parallel {

/// The group and its parts; all for the memory of the exec. Null where the exchange needs none.
struct ContextGroups {
  comm::Communicator* all = nullptr;   ///< all_gather
  comm::Communicator* a2a = nullptr;   ///< exchange.a2a neighboring ranks; rank % a2a is the rank in it
  comm::Communicator* ring = nullptr;  ///< the ranks with the same rank in their a2a; rank / a2a in it
};

/// The groups of ContextGroups.
enum class ContextRanks : uint8_t { all, a2a, ring };

class ContextAttention {
 public:
  explicit ContextAttention(const ContextShape& shape);

  /// Bytes per local row of what the backward pass reads besides its inputs.
  int64_t saved_width() const;
  /// Bytes per local row of the memory that the passes need while they run.
  int64_t forward_width() const;
  int64_t backward_width() const;
  /// With an all-to-all the backward pass has q, k, v and out in `saved` and does not read its own.
  bool saves_inputs() const { return shape_.exchange.a2a > 1; }

  struct Forward {
    Tensor q, k, v;                      ///< (N, heads, d), (N, kv_heads, d) twice; heads must be contiguous
    Tensor out;                          ///< (N, heads, d)
    Tensor saved;                        ///< (N, saved_width()) u8, written
    Tensor buffer;                       ///< (N, forward_width()) u8
    std::span<const CallBounds> bounds;  ///< of ContextBounds for the same exchange
    ops::FusedDropout dropout =
        {};  ///< of probabilities; first_row belongs to the first sample's first token
  };
  struct Backward {
    Tensor dout;          ///< (N, heads, d)
    Tensor q, k, v, out;  ///< as in the forward pass; may be empty if saves_inputs()
    Tensor dq, dk, dv;    ///< overwritten; must not alias the inputs
    Tensor saved;         ///< as the forward pass left it
    Tensor buffer;        ///< (N, backward_width()) u8
    std::span<const CallBounds> bounds;
    ops::FusedDropout dropout = {};  ///< as in the forward pass
  };
  /// Collective over the groups.
  void forward(ops::Exec& exec, const ContextGroups& groups, const Forward& a) const;
  void backward(ops::Exec& exec, const ContextGroups& groups, const Backward& a) const;

 private:
  /// The attention between the all-to-alls.
  ContextShape core() const;
  void forward_all_to_all(ops::Exec& exec, const ContextGroups& groups, const Forward& a) const;
  void backward_all_to_all(ops::Exec& exec, const ContextGroups& groups, const Backward& a) const;

  ContextShape shape_;
};

}  // namespace nrl::parallel

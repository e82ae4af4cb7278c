#pragma once
// Slots: the named activations of a layer, and the policy that says how each of them reaches the backward
// pass. Every recompute or offload option of the configuration is only a rule that fills the policy table.

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "core/base/dtype.h"
#include "memory/plan.h"

namespace nrl::memory {

/// How a slot reaches its backward readers. keep_fp8 and offload are part of the vocabulary of the table;
/// rules that would need them are refused by the validator until they are built.
enum class Keep : uint8_t { keep, keep_fp8, offload, recompute };

/// One slot of a layer. Steps number the work inside a layer: forward steps 0..forward_steps-1, and backward
/// steps likewise. made = -1 means "written by the last forward step of the layer before" (the residual
/// stream).
struct SlotSpec {
  std::string_view name;
  int64_t width = 0;  ///< elements per token; 0: the model does not have this slot
  DType dtype = DType::f32;
  int made = 0;            ///< forward step that writes it
  int forward_until = 0;   ///< last forward step that reads it
  int backward_from = 0;   ///< first backward step that reads it (recomputed just before)
  int backward_until = 0;  ///< last backward step that reads it
  std::string_view module =
      "";  ///< rule name that may recompute it ("norm", "activation"); empty: never on its own
};

/// A gradient that lives inside one layer's backward pass.
struct GradientSlotSpec {
  std::string_view name;
  int64_t width = 0;
  DType dtype = DType::f32;
  int made = 0, until = 0;  ///< backward steps
};

/// The policy table: Keep per (layer, slot).
class SlotPolicy {
 public:
  SlotPolicy(int layers, std::span<const SlotSpec> slots);
  Keep get(int layer, int slot) const { return table_[static_cast<size_t>(layer * slots_ + slot)]; }
  /// Recompute every slot that belongs to `module` in all layers; false when no slot does.
  bool recompute_module(std::string_view module, std::span<const SlotSpec> slots);

 private:
  int slots_;
  std::vector<Keep> table_;
};

/// The order of the work of one microbatch on one rank: embedding, layers forward, head (loss and its
/// gradient), layers backward, embedding backward. Ticks are consecutive.
struct TickMap {
  int layers = 0, forward_steps = 0, backward_steps = 0;
  int embedding() const { return 0; }
  int forward(int layer, int step) const { return 1 + layer * forward_steps + step; }
  int head() const { return 1 + layers * forward_steps; }
  int backward(int layer, int step) const {
    return head() + 1 + (layers - 1 - layer) * backward_steps + step;
  }
  int embedding_backward() const { return head() + 1 + layers * backward_steps; }
};

/// Where the slots of all layers lie for one microbatch of `tokens` tokens. A kept slot has one place; a
/// recomputed one has a place in the forward pass and another in the backward pass.
class SlotPlan {
 public:
  SlotPlan() = default;
  /// Declares everything in `plan` (category activations).
  SlotPlan(MemoryPlan& plan, const TickMap& ticks, std::span<const SlotSpec> slots,
           std::span<const GradientSlotSpec> gradients, const SlotPolicy& policy, int64_t tokens);

  enum class Phase : uint8_t { forward, backward };
  BufferId buffer(int layer, int slot, Phase phase) const;
  BufferId gradient(int layer, int slot) const;

 private:
  int slots_ = 0, gradients_ = 0;
  std::vector<BufferId> forward_, backward_, gradient_;
};

}  // namespace nrl::memory

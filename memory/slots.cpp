#include "memory/slots.h"

#include <spdlog/fmt/fmt.h>

#include "core/base/error.h"

namespace nrl::memory {

SlotPolicy::SlotPolicy(int layers, std::span<const SlotSpec> slots)
    : slots_(static_cast<int>(slots.size())),
      table_(static_cast<size_t>(layers) * slots.size(), Keep::keep) {}

bool SlotPolicy::recompute_module(std::string_view module, std::span<const SlotSpec> slots) {
  bool found = false;
  for (size_t i = 0; i < table_.size(); ++i) {
    if (slots[i % slots.size()].module != module) continue;
    table_[i] = Keep::recompute;
    found = true;
  }
  return found;
}

SlotPlan::SlotPlan(MemoryPlan& plan, const TickMap& ticks, std::span<const SlotSpec> slots,
                   std::span<const GradientSlotSpec> gradients, const SlotPolicy& policy, int64_t tokens)
    : slots_(static_cast<int>(slots.size())), gradients_(static_cast<int>(gradients.size())) {
  for (int layer = 0; layer < ticks.layers; ++layer) {
    for (int s = 0; s < slots_; ++s) {
      const SlotSpec& spec = slots[static_cast<size_t>(s)];
      if (spec.width == 0) {
        forward_.push_back(-1);
        backward_.push_back(-1);
        continue;
      }
      const int64_t bytes = spec.width * tokens * size_of(spec.dtype);
      const std::string name = fmt::format("layer {} {}", layer, spec.name);
      const int made = ticks.forward(layer, spec.made);
      const int last = ticks.backward(layer, spec.backward_until);
      if (policy.get(layer, s) == Keep::recompute) {
        forward_.push_back(
            plan.add(name, Category::activations, bytes, {made, ticks.forward(layer, spec.forward_until)}));
        backward_.push_back(plan.add(name + " (recomputed)", Category::activations, bytes,
                                     {ticks.backward(layer, spec.backward_from), last}));
      } else {
        NRL_CHECK(policy.get(layer, s) == Keep::keep, "slot {} has a policy that is not built", spec.name);
        forward_.push_back(plan.add(name, Category::activations, bytes, {made, last}));
        backward_.push_back(forward_.back());
      }
    }
    for (const GradientSlotSpec& spec : gradients)
      gradient_.push_back(
          spec.width == 0 ? -1
                          : plan.add(fmt::format("layer {} {}", layer, spec.name), Category::activations,
                                     spec.width * tokens * size_of(spec.dtype),
                                     {ticks.backward(layer, spec.made), ticks.backward(layer, spec.until)}));
  }
}

BufferId SlotPlan::buffer(int layer, int slot, Phase phase) const {
  return (phase == Phase::forward ? forward_ : backward_)[static_cast<size_t>(layer * slots_ + slot)];
}

BufferId SlotPlan::gradient(int layer, int slot) const {
  return gradient_[static_cast<size_t>(layer * gradients_ + slot)];
}

}  // namespace nrl::memory

#pragma once
// What a layer computes, as data: its slots (activations and gradients that steps hand to each other) and its
// steps in the order of their text. A layer's forward() and backward(), run once without computing, fill this
// table (apps/model/layer.h); recomputation and the plan's lifetimes are derived from it.

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "core/base/dtype.h"

namespace nrl::memory {

/// A set of a layer's slots, one bit each.
using SlotSet = uint64_t;
inline constexpr size_t max_slots = 64, max_steps = 64;

/// A slot of a layer by its number; -1: this layer has no such slot, which steps may name all the same.
struct Slot {
  int8_t id = -1;
  explicit operator bool() const { return id >= 0; }
  SlotSet bit() const { return id < 0 ? 0 : SlotSet{1} << id; }
};

struct SlotSpec {
  std::string_view name;
  int64_t width = 0;  ///< elements per row
  DType dtype = DType::f32;
  int rows = 0;       ///< number of the row domain: what a row is and how many there are
  bool port = false;  ///< belongs to the layer before or behind: read here, never written
  /// Names of the rules that recompute it in backward passes ("norm", "activation"), with spaces between.
  std::string_view rules = "";
};

enum class Pass : uint8_t {
  forward,
  data,    ///< gradients of activations
  weight,  ///< gradients of weights that nothing else in the backward pass waits for
};

/// The runs that a forward step takes part in, as bits.
enum Mode : uint8_t {
  training = 1,
  evaluation = 2,  ///< no backward pass follows
  generation = 4,  ///< with a key/value cache
  recompute = 8,   ///< inside of a backward pass
};
using Modes = uint8_t;
inline constexpr Modes every_mode = training | evaluation | generation | recompute;

struct TakeOver {
  Slot output, input;
};

struct Step {
  std::string_view name;
  Pass pass = Pass::forward;
  Modes modes = every_mode;
  SlotSet reads = 0, writes = 0;
  std::array<TakeOver, 2>
      take_over{};  ///< outputs that may have an input's memory, where nobody reads it again
};

class LayerTable {
 public:
  /// Fails (70) beyond max_slots.
  Slot add(const SlotSpec& spec);
  /// Forward steps first. Fails (70) on a step that reads what no step or port wrote, or writes a port.
  void add(const Step& step);

  const std::vector<SlotSpec>& slots() const { return slots_; }
  const std::vector<Step>& steps() const { return steps_; }
  int forward_steps() const { return forward_steps_; }
  SlotSet ports() const { return ports_; }

  /// Slots that forward steps of the layer can make again in a backward pass from slots of the layer that
  /// stay. Not among them: what is made from ports, because the layer before may be done with it.
  SlotSet recomputable() const;
  /// Recomputable slots with this rule.
  SlotSet with_rule(std::string_view rule) const;

 private:
  std::vector<SlotSpec> slots_;
  std::vector<Step> steps_;
  int forward_steps_ = 0;
  SlotSet ports_ = 0, written_ = 0;
};

/// How the slots of one layer reach their readers in the backward pass: kept, or made again.
class LayerPolicy {
 public:
  /// Fails (70) when `recomputed` has slots that are not recomputable.
  LayerPolicy(const LayerTable& table, SlotSet recomputed);

  SlotSet recomputed() const { return recomputed_; }
  /// The forward steps, as bits, that make `wanted` again from what is kept or in `made`; what they write is
  /// added to `made`.
  uint64_t steps_for(SlotSet wanted, SlotSet& made) const;

 private:
  const LayerTable* table_;
  SlotSet recomputed_;
  std::array<int8_t, max_slots> producer_{};
};

}  // namespace nrl::memory

#pragma once
// A layer as data. A slot is a stash entry: one named activation, saved statistic or gradient of the layer
// for one microbatch. A step is one operation with the slots it reads and writes. forward() and backward() of
// a layer, run once without computing, fill this table (apps/model/program/layer.h); recomputation and the
// lifetimes in the memory plan are derived from it.

#include <array>
#include <bit>
#include <bitset>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "core/base/dtype.h"

namespace nrl::memory {

inline constexpr size_t max_slots = 192;
/// A set of a layer's slots, one bit each.
using SlotSet = std::bitset<max_slots>;
/// Of a layer; forward steps fit into the bits of a uint64_t.
inline constexpr size_t max_steps = 128, max_forward_steps = 64;
/// The index of the first slot of a set, which must not be empty.
inline size_t first_slot(const SlotSet& set) {
  size_t first = 0;
  for (const SlotSet word = ~uint64_t{0};; first += 64)
    if (const uint64_t bits = (set >> first & word).to_ullong(); bits != 0)
      return first + static_cast<size_t>(std::countr_zero(bits));
}
/// Calls visit(index) for each slot of a set, in order.
template <class Visit>
void for_each_slot(SlotSet set, const Visit& visit) {
  while (set.any()) {
    const size_t first = first_slot(set);
    visit(first);
    set.reset(first);
  }
}

/// Index of a slot in its layer; -1: the layer has no such slot, and steps that name it ignore it.
struct Slot {
  int16_t id = -1;
  explicit operator bool() const { return id >= 0; }
  SlotSet bit() const { return id < 0 ? SlotSet{} : SlotSet{1} << static_cast<size_t>(id); }
};

struct SlotSpec {
  std::string_view name;
  int64_t width = 0;  ///< elements per row
  DType dtype = DType::f32;
  int rows = 0;       ///< row domain: what a row is and how many there are
  bool port = false;  ///< belongs to the previous or next layer: must not be written here
  /// Names of the rules of recomputation and offloading that select it ("norm", "activation"), separated by
  /// spaces.
  std::string_view rules = "";
  /// Padding elements at the end of each row, whose contents are undefined.
  int64_t unused = 0;
};

enum class Pass : uint8_t {
  forward,
  data,    ///< dgrad: gradients of activations
  weight,  ///< wgrad: gradients of weights; no other step depends on it
};

/// Modes that a forward step runs in, as bits.
enum Mode : uint8_t {
  training = 1,
  evaluation = 2,  ///< no backward pass follows
  generation = 4,  ///< with a key/value cache
  recompute = 8,   ///< within a backward pass
};
using Modes = uint8_t;
inline constexpr Modes every_mode = training | evaluation | generation | recompute;

/// `output` may reuse the memory of `input` if that is its last use.
struct TakeOver {
  Slot output, input;
};

/// A part of a layer whose steps are executed several times, for parts of their rows (LayerTable::rounds()).
enum class Rounds : uint8_t {
  none,
  each,  ///< in every round
  once,  ///< between steps of rounds, in round 0 only
};

struct Step {
  std::string_view name;
  Pass pass = Pass::forward;
  Modes modes = every_mode;
  SlotSet reads = 0, writes = 0;
  std::array<TakeOver, 2> take_over{};
  /// Backward steps: slots of the forward pass that the step can write as well, if they are recomputed and
  /// not yet made. That replaces the forward step that would recompute them.
  SlotSet remakes = 0;
  Rounds rounds = Rounds::none;  ///< set by the table
};

/// Consecutive steps of a pass that are executed in at most `most` rounds.
struct RoundsRange {
  int begin = 0, end = 0;  ///< indices of steps
  int most = 1;
  Slot carried;  ///< gets its parts from all rounds; a step after them reads it
};

/// The slots through which layers pass the residual stream and its gradient. The input is the pair (x,
/// residual), not yet added: the layer computes dropout(x) + residual itself, fused into its first norm, and
/// passes its own output on in the same form.
struct Ports {
  Slot x, residual;  ///< ports: `out` and `sum` of the previous layer
  Slot out, sum;     ///< own; without `sum`, `out` is the whole stream
  Slot d_out;        ///< port: d_x of the next layer
  Slot d_x;          ///< own; the gradient of the input stream
  /// (1) f32: amax of d_out and of d_x. Port: set if the layer reads it, empty where the next layer is in
  /// another chunk. Own: set if the previous layer reads it.
  Slot d_out_amax, d_x_amax;
};

class LayerTable {
 public:
  /// Fails (70) beyond max_slots.
  Slot add(const SlotSpec& spec);
  /// Forward steps must come first. Fails (70) beyond max_steps or max_forward_steps, or when a step reads a
  /// slot that is neither a port nor written before, or writes a port.
  void add(const Step& step);

  /// The steps from now on are executed in rounds, for parts of their rows; until end_rounds().
  void begin_rounds(int most, Slot carried);
  void end_rounds();
  /// Within rounds: the steps from now on are executed in round 0 only, or in every round again.
  void set_once(bool once) { rounds_ = once ? Rounds::once : Rounds::each; }
  const std::vector<RoundsRange>& rounds() const { return ranges_; }
  /// Recomputable slots that steps in rounds write: each has those of a part of the rows.
  SlotSet in_rounds() const { return in_rounds_ & recomputable(); }

  const std::vector<SlotSpec>& slots() const { return slots_; }
  const std::vector<Step>& steps() const { return steps_; }
  int forward_steps() const { return forward_steps_; }
  SlotSet ports() const { return ports_; }

  /// Slots that forward steps can recompute in a backward pass. Excludes slots that a step of the
  /// training mode alone changes, or writes without a step for recomputation alone that does so as well.
  SlotSet recomputable() const;
  /// Recomputable slots that only steps which read ports write: the layer's input. If they are recomputed,
  /// the ports must be as well, or kept.
  SlotSet inputs() const;
  /// Slots that forward steps of training write: those that can be moved to the host until the backward pass.
  SlotSet offloadable() const;
  /// Recomputable slots with this rule.
  SlotSet with_rule(std::string_view rule) const;
  /// The same among offloadable slots.
  SlotSet offloadable_with_rule(std::string_view rule) const;
  /// What these steps, as bits, read and write together.
  SlotSet reads_of(uint64_t steps) const;
  SlotSet writes_of(uint64_t steps) const;

 private:
  std::vector<SlotSpec> slots_;
  std::vector<Step> steps_;
  /// All slots with this rule.
  SlotSet named(std::string_view rule) const;
  int forward_steps_ = 0;
  Rounds rounds_ = Rounds::none;
  std::vector<RoundsRange> ranges_;
  SlotSet ports_ = 0, written_ = 0, in_rounds_ = 0;
};

/// Which slots of a layer are kept for the backward pass, which are recomputed, and which are moved to the
/// host in between.
class LayerPolicy {
 public:
  /// Fails (70) when `recomputed` has slots that are not recomputable, `offloaded` has some that are not
  /// offloadable, or both have one.
  LayerPolicy(const LayerTable& table, SlotSet recomputed, SlotSet offloaded = 0);

  SlotSet recomputed() const { return recomputed_; }
  SlotSet offloaded() const { return offloaded_; }
  /// The forward steps, as bits, that recompute `wanted` from ports and from slots that are kept or in
  /// `made`. Adds the slots they write to `made`. Reads no ports unless LayerTable::inputs() are recomputed.
  uint64_t steps_for(SlotSet wanted, SlotSet& made) const;

 private:
  const LayerTable* table_;
  SlotSet recomputed_, offloaded_;
  std::array<int8_t, max_slots> producer_{};
};

}  // namespace nrl::memory

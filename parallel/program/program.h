#pragma once
// A program is the list of everything that a rank does in an optimizer step or an evaluation, in order: the
// steps of its layers, copies, messages, and what follows the passes. lower() makes it from a schedule and
// the tables of the layers, the policies of lower.h extend it, one loop executes it
// (apps/model/program/stage.h), and questions about a step are folds over it: live_ranges.h gives the memory.
// It knows no model.
//
// A slot has two buffers per stash: one for what the forward pass writes, one for the contents that a
// backward pass recomputes or fetches. Which of them a step means follows from the steps before it (Places).
// Chunks whose stashes are of one pool share the buffers of equal slots.

#include <algorithm>
#include <array>
#include <compare>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "memory/layer_table.h"
#include "memory/plan.h"
#include "parallel/pipeline/schedule.h"

namespace nrl::program {

/// Index of a slot of this rank.
using SlotId = int;

/// A slot that a step accesses. Encoded so that lists of them are small.
struct Use {
  uint32_t code = 0;
  Use(SlotId slot, bool second) : code((static_cast<uint32_t>(slot) << 1) | (second ? 1U : 0U)) {}
  SlotId slot() const { return static_cast<SlotId>(code >> 1); }
  /// Writes: the contents begin in the second buffer.
  bool second() const { return (code & 1U) != 0; }
};

/// True if one of the accesses is of the slot.
inline bool names(std::span<const Use> uses, SlotId slot) {
  return std::any_of(uses.begin(), uses.end(), [&](const Use& u) { return u.slot() == slot; });
}

/// A bucket of a parameter group: weights that are gathered, and gradients that are summed, at once.
struct BucketId {
  int group = 0, bucket = 0;
  auto operator<=>(const BucketId&) const = default;
};
using Buckets = std::set<BucketId>;

/// A layer of this rank, as far as the program must know it.
struct Layer {
  std::string name;
  const memory::LayerTable* table = nullptr;
  const memory::LayerPolicy* policy = nullptr;  ///< of the first round (LayerTable::rounds())
  const memory::LayerPolicy* later = nullptr;   ///< of later rounds, which keep nothing
  memory::Ports ports = {};
  int chunk = 0;
  /// Buckets of weights that a pass reads and of gradients that it adds to: forward, backward.
  std::array<Buckets, 2> weights = {}, gradients = {};
  std::vector<SlotId> slots = {};  ///< by slot of the table; -1: a port without a neighbor
};

struct SlotInfo {
  int layer = 0;
  memory::Slot slot;  ///< of the layer
  int64_t bytes = 0;  ///< of a microbatch of full size
};

/// The layers of a rank and their slots. Ports share the slots of their neighbors.
struct Layers {
  /// `bytes`: of a slot of a table. Of each layer everything but `slots` must be set, in the order of the
  /// forward pass.
  template <class Bytes>
  Layers(std::vector<Layer> all, Bytes&& bytes) : layers(std::move(all)) {
    for (size_t l = 0; l < layers.size(); ++l) {
      const auto& of_table = layers[l].table->slots();
      for (size_t s = 0; s < of_table.size(); ++s) {
        layers[l].slots.push_back(of_table[s].port ? -1 : static_cast<SlotId>(slots.size()));
        if (!of_table[s].port)
          slots.push_back({static_cast<int>(l), {static_cast<int16_t>(s)}, bytes(of_table[s])});
      }
    }
    link();
  }
  Layers() = default;

  /// Index of the first layer of a chunk, and of the one after its last.
  int begin(int chunk) const { return begins_[chunk]; }
  int end(int chunk) const { return begins_[static_cast<size_t>(chunk) + 1]; }
  int chunks() const { return static_cast<int>(begins_.size()) - 1; }
  const Layer& of(int layer) const { return layers[layer]; }
  int chunk_of(SlotId slot) const { return of(slots[slot].layer).chunk; }
  /// -1: the layer has no such slot.
  SlotId slot(int layer, memory::Slot slot) const { return slot ? of(layer).slots[slot.id] : -1; }
  const memory::SlotSpec& spec(SlotId slot) const {
    const SlotInfo& info = slots[slot];
    return of(info.layer).table->slots()[info.slot.id];
  }
  /// "block 0 norm1".
  std::string name(SlotId slot) const;
  /// "dense bucket 0".
  std::string name(BucketId bucket) const;

  std::vector<Layer> layers;
  std::vector<SlotInfo> slots;
  std::vector<std::string> groups;  ///< names of parameter groups, if some are sharded

 private:
  void link();
  std::vector<int> begins_;
};

enum class StepKind : uint8_t {
  visit,    ///< begins a pass of a layer over a microbatch; its compute steps follow
  compute,  ///< a step of the layer's table
  carry,    ///< rounds begin to fill the slot
  copy,     ///< the stream or its gradient goes to a chunk of this rank
  send,     ///< starts to send the stream or its gradient to another rank
  receive,  ///< starts to receive it
  offload,  ///< starts to copy slots to the host
  fetch,    ///< starts to copy them back
  wait,     ///< for a send, receive, offload or fetch with the same slots, or a gather or reduce of buckets
  report,   ///< the log-probabilities of a microbatch are complete
  gather,   ///< starts to gather sharded weights, in one operation
  release,  ///< sharded weights are not read until they are gathered again
  open,     ///< gradients in buckets begin: the next `microbatches` microbatches add to them
  reduce,   ///< starts to sum complete gradients over the data-parallel ranks, in one operation
  update,   ///< clip, update and gather the weights
};

struct Step {
  StepKind kind = StepKind::compute;
  StepKind of = StepKind::compute;  ///< wait: the kind of step that it completes
  /// The visit is in a backward pass, as the next three describe it; a message or copy moves the gradient; a
  /// step with buckets is for a visit of a backward pass.
  bool backward = false;
  bool dgrad = false, wgrad = false;
  bool again = false;                 ///< forward steps run again, for a backward pass
  bool nested = false;                ///< visit, again: within the visit of the layer itself
  bool starts = false, ends = false;  ///< visit: the first or last one of the chunk's pass
  /// Completes weight gradients (pipeline::Action::last); open: the gradients are the step's last ones.
  bool last = false;
  /// Visit, nested: only where the rounds before it were a single one, because later ones have its results.
  bool one_round = false;
  int8_t round = -1;  ///< of the list, from 0 (RoundsRange); -1: in no rounds
  int16_t chunk = 0;
  int layer = 0;      ///< in Layers
  int16_t index = 0;  ///< compute: of the step in the layer's table; with buckets: of their group
  int microbatch = 0;
  int microbatches = 1;     ///< open: that add to the gradients
  bool throughout = false;  ///< open: in all repetitions of the period; `microbatches` are of Period::times
  // Accessed slots and buckets: set by Program::add().
  uint32_t uses = 0, first_bucket = 0;
  uint16_t reads = 0, writes = 0, buckets = 0;

  /// A wait: the kind of step that it completes.
  StepKind subject() const { return kind == StepKind::wait ? of : kind; }
  bool of_microbatch() const { return subject() < StepKind::gather; }

  bool begins_visit() const { return kind == StepKind::visit && !nested; }
  /// The step belongs to the visit before it, or to one that is nested in that.
  bool within_visit() const {
    return kind == StepKind::compute || kind == StepKind::carry || (kind == StepKind::visit && nested);
  }
};

/// The repeated part of a list of steps.
using pipeline::Period;

struct Program {
  memory::Mode mode = memory::training;
  pipeline::Stashes stashes = {};
  std::vector<Step> steps = {};
  std::vector<Use> uses = {};     ///< of the steps
  std::vector<int> buckets = {};  ///< of the steps, in the groups Step::index
  Period period = {};

  /// Adds the step with these accesses. A slot that is written and not read begins new contents.
  void add(Step step, std::span<const Use> reads, std::span<const Use> writes,
           std::span<const int> of_group = {});
  std::span<const Use> reads(const Step& s) const { return {uses.data() + s.uses, s.reads}; }
  std::span<const Use> writes(const Step& s) const { return {uses.data() + s.uses + s.reads, s.writes}; }
  /// The step's buckets, of the group Step::index. A wait for a reduce without buckets is for all gradients
  /// of the step, sharded or not.
  std::span<const int> buckets_of(const Step& s) const {
    return {buckets.data() + s.first_bucket, s.buckets};
  }
  /// Index of the step after the visit that begins at `visit`.
  size_t visit_end(size_t visit) const {
    do ++visit;
    while (visit < steps.size() && steps[visit].within_visit());
    return visit;
  }
  /// Adds a step of another program of the same layers.
  void take(const Program& from, const Step& step) {
    add(step, from.reads(step), from.writes(step), from.buckets_of(step));
  }
};

/// The step that waits for `step`.
Step wait_for(Step step);

/// The buffers that slots have their contents in, as a program goes on. The program must outlive it.
class Places {
 public:
  Places(const Program& program, const Layers& layers);
  /// Index of a slot in a stash of its chunk's pool: its buffers are 2 * index and 2 * index + 1. Slots of
  /// the same name and size in the same place of two chunks with one pool have the same index, as have the
  /// inputs of these chunks. Other slots, of the embedding and the head, have their own.
  size_t index_in(SlotId slot, int stash) const { return entries_[slot].first + static_cast<size_t>(stash); }
  /// The same in the stash of a microbatch.
  size_t index(SlotId slot, int microbatch) const {
    return index_in(slot, stashes_.of(entries_[slot].chunk, microbatch));
  }
  /// The buffer with the contents.
  size_t at(SlotId slot, int microbatch) const {
    const size_t i = index(slot, microbatch);
    return 2 * i + second_[i];
  }
  size_t buffers() const { return 2 * second_.size(); }
  /// To be called before the step's slots are looked up. `shift`: added to its microbatch.
  void enter(const Program& program, const Step& step, int shift = 0);

 private:
  struct Entry {
    size_t first = 0;
    int chunk = 0;
  };
  const pipeline::Stashes& stashes_;
  std::vector<Entry> entries_;
  std::vector<uint8_t> second_;
};

/// One line per step, indented below its visit, without numbers that depend on other steps: the texts of two
/// layouts can be compared by a program like diff.
std::string text(const Program& program, const Layers& layers);

/// The program with every step of its period in full.
Program unrolled(const Program& program);

}  // namespace nrl::program

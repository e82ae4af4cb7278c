#pragma once
// The layers of one rank, in chunks of consecutive layers, in memory planned by a dry run. The actions of a
// schedule name a chunk and a stash (the saved activations of one microbatch in flight).
//
// Dry run first: record(), then for each program begin() and the actions of its schedule. Nothing is
// computed, and the uses of every buffer go to the Liveness. After bind() has assigned the planned memory,
// the same calls compute.

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "apps/model/program/offloading.h"
#include "memory/host_copies.h"
#include "memory/liveness.h"

namespace nrl::model {

/// The buffers of one stash of a chunk, by buffer index (Stage::BufferKey). Every slot has three: one written
/// by the forward pass, one that the backward pass recomputes it in or fetches it to, and one on the host.
struct Frame {
  std::vector<int> buffers;                     ///< ids in the Liveness; -1: never used
  std::vector<Tensor> tensors = {};             ///< the same buffers after bind()
  std::vector<memory::SlotSet> made;            ///< by layer: slots already recomputed for this microbatch
  std::vector<std::vector<int32_t>> host = {};  ///< by layer: Run::host_values()
  /// By layer: slots that were moved to the host in this microbatch, and the subset that was fetched back.
  std::vector<memory::SlotSet> offloaded, fetched;
};

/// One pass of a layer over a microbatch. Forward steps that a layer runs again for the layers above it are
/// a forward pass.
struct LayerVisit {
  const Layer* layer = nullptr;
  bool backward = false;
  bool dgrad = true, wgrad = true;  ///< backward: the kinds of steps it has
  /// Dry run: the ticks of its steps. A layer without steps has the tick after it.
  int first_tick = 0, last_tick = 0;
};

/// Observes the visits of layers while a program computes, in the order of Decoder::visits().
class LayerWatch {
 public:
  virtual ~LayerWatch() = default;
  /// Before the first visit of a schedule.
  virtual void begin_program(memory::Mode mode) = 0;
  virtual void begin_layer() = 0;
  virtual void end_layer() = 0;
};

/// The tensors that a chunk exchanges with its neighbors in the model.
enum class Boundary : uint8_t { input, output, output_gradient, input_gradient };

class Stage {
 public:
  /// Chunks in the order of the forward pass. `rows`: the largest number of rows of each RowDomain.
  Stage(std::vector<Chunk> chunks, std::array<int64_t, row_domains> rows);

  int chunks() const { return static_cast<int>(chunks_.size()); }

  /// A program is a mode with its own schedule: training, evaluation or generation. `stashes`: number per
  /// chunk. Returns the program's id. Programs never run concurrently and share memory.
  int add_program(memory::Mode mode, std::vector<int> stashes);

  /// Switches to the dry run: nothing is computed, and buffer uses go to `liveness` (null: compute).
  void record(memory::Liveness* liveness) { liveness_ = liveness; }
  /// Must be called before the first action of a schedule. In the dry run once per program.
  void begin(int program);
  /// Assigns the planned memory and ends the dry run. `ids`: the result of Liveness::declare().
  void bind(const memory::MemoryPlan& plan, const std::vector<memory::BufferId>& ids,
            const memory::Arenas& arenas);

  bool recording() const { return liveness_ != nullptr; }
  /// The exec of the layers; must not be called before they are bound.
  ops::Exec& exec() const { return *chunks_.front().front()->context().exec; }
  /// The place of a pass's microbatch in the optimizer step: the first begins the weight gradients, the last
  /// completes them.
  struct Order {
    bool first = false, last = false;
  };
  /// Forward pass of one microbatch through the chunk. The backward passes must get the same batch. `order`:
  /// for the gradients of the head, which are computed in the forward pass.
  void forward(int chunk, int stash, const MicroBatch& batch, Order order);
  struct Parts {
    bool dgrad = true;  ///< gradients of activations
    bool wgrad = true;  ///< gradients of weights; with `dgrad`, both layer by layer
  };
  void backward(int chunk, int stash, const MicroBatch& batch, Parts parts, Order order);
  /// A forward or backward pass of a chunk.
  struct Pass {
    bool backward = false;
    int chunk = 0, stash = 0;
    Parts parts;
  };
  /// Announces the pass that follows the next one, so that its offloaded slots are fetched in time; none: the
  /// next pass is the last.
  void expect(std::optional<Pass> next) { next_ = next; }
  /// Must be called after the last action of a schedule.
  void end();
  /// The slots of a layer that are moved to the host, except in microbatches whose backward pass needs them
  /// at once.
  memory::SlotSet offloaded(int chunk, size_t layer) const {
    return offloading_[static_cast<size_t>(chunk)].of(layer);
  }
  /// The copies of offloaded slots, by step.
  memory::HostCopies& copies() { return copies_; }
  /// Copies the output of the previous chunk of this rank (its stash `from_stash`) to this chunk's input.
  void receive_forward(int chunk, int stash, int from_stash);
  /// Copies the input gradient of the next chunk of this rank to this chunk's output gradient.
  void receive_backward(int chunk, int stash, int from_stash);
  /// A tensor for a message to or from the neighboring chunk, which is on another rank. `begins`: a message
  /// is received into it. In the dry run records the use and returns an empty tensor.
  Tensor message(int chunk, int stash, Boundary which, const MicroBatch& batch, bool begins);

  /// Null: none. Dry runs are not reported.
  void watch_layers(LayerWatch* watch) { watch_ = watch; }
  /// The visits that the dry run of a program recorded.
  const std::vector<LayerVisit>& recorded_visits(int program) const {
    return programs_[static_cast<size_t>(program)].visits;
  }
  const Chunk& layers(int chunk) const { return chunks_[static_cast<size_t>(chunk)]; }
  const Recomputation& recomputation(int chunk) const { return recomputations_[static_cast<size_t>(chunk)]; }

  /// Called before each step while computing. Empty: no call.
  void watch_steps(std::function<void(const memory::LayerTable& table, size_t step)> at_step) {
    at_step_ = std::move(at_step);
  }
  /// Bytes of a slot's buffer, of a microbatch of full size.
  int64_t bytes_of(const memory::SlotSpec& slot) const;

  /// For tests: called before each tick (the time unit of planned lifetimes).
  void watch_ticks(std::function<void(int tick)> at_tick) { at_tick_ = std::move(at_tick); }

 private:
  friend class Run;
  struct Program {
    memory::Mode mode = memory::training;
    std::vector<std::vector<Frame>> frames;  // by chunk and stash
    int first_tick = -1;
    std::vector<LayerVisit> visits;
    /// By call of Run::rounds(): the ticks before each recorded round, and the last one.
    std::vector<std::vector<int>> rounds;
  };

  Run run_of(int chunk, int stash, const MicroBatch& batch, Order order);
  // Offloaded slots (stage_offload.cpp). A slot is copied to the host after the visit of its layer, during
  // the next one, and back during the visit before the first one that uses it.
  struct Copies {
    bool to_host = false;
    int chunk = 0;
    Frame* frame = nullptr;
    int layer = 0;
    memory::SlotSet slots = 0;
    memory::HostCopies::Ticket ticket = -1;
  };
  /// The slots that a visit of the layer reads from their second buffers.
  memory::SlotSet restored(int chunk, const Frame& frame, size_t layer) const;
  /// True if a visit is too short to hide a copy.
  bool brief(int chunk, size_t layer) const;
  /// The last layer with an output whose visit is long enough to hide a copy.
  size_t last_block(int chunk) const;
  /// After a forward visit.
  void offload(const Run& r, size_t layer, int stash);
  /// Before a backward visit: fetches the offloaded slots that it uses and waits for them.
  void fetch(const Run& r, size_t layer, Parts parts);
  /// Before any visit: starts to fetch the slots that the next one uses, if that is a backward visit.
  void prefetch(const Run& r, size_t layer, const Pass& pass);
  void start_fetch(int chunk, Frame& frame, size_t layer, Parts parts);
  void start(Copies copies);
  void finish(const Copies& copies);
  void finish_offloads();
  /// Records a use of the buffers of `copies`, or calls work(from, to) for them.
  template <class F>
  void for_each_buffer(const Copies& copies, bool begins, F&& work);
  Frame& frame_of(int chunk, int stash);

  /// Calls `work` as a visit of the layer.
  void visit(Run& r, int index, bool backward, const std::function<void(Layer&)>& work);
  /// Runs forward steps of a layer again for the layers above it.
  void run_again(const Run& backward, const Recomputation::Visit& again);
  /// Recomputes the slots of `wanted` that are neither kept nor recomputed yet.
  void recompute(Run& r, memory::SlotSet wanted);
  /// Returns the slots of `possible` that are neither kept nor made yet, and marks them: the step makes them.
  memory::SlotSet remake(Run& r, memory::SlotSet possible);
  /// Starts a step that also writes the slots `remade`; false in the dry run, where only its buffer uses are
  /// recorded.
  bool tick(Run& r, const memory::Step& step, memory::SlotSet remade);
  Tensor tensor(const Run& r, Slot slot) const;
  /// The rows of a slot's buffer that the microbatch has.
  Tensor with_rows(Tensor t, const memory::SlotSpec& slot, const MicroBatch& batch) const;
  /// Index of the slot's buffer in the run's frame; -1: none.
  int buffer_index(const Run& r, int slot) const;
  int forward_buffer(int chunk, int layer, Slot slot) const;
  /// The id of a buffer in the Liveness, which is added at its first use.
  int liveness_id(int chunk, Frame& frame, int buffer);
  struct BoundaryBuffer {
    Frame& frame;
    int index;                     // of the buffer
    const memory::SlotSpec* spec;  // of its slot
  };
  BoundaryBuffer boundary(int chunk, int stash, Boundary which);
  int boundary_index(int chunk, Boundary which) const;
  const memory::SlotSpec& slot_of(int chunk, int buffer) const;
  /// Copies a tensor between neighboring chunks.
  void copy_between(int from_chunk, int from_stash, Boundary from, int to_chunk, int to_stash, Boundary to);
  int next_tick();
  // Rounds that are executed have the ticks of those that were recorded, though their number differs.
  /// The memory of `carried`, if it is set, is in use until a step after the rounds reads it.
  void begin_rounds(const Run& r, Slot carried);
  /// `descending`: the last one that was recorded is round 0, else the first one.
  void enter_round(int round, bool descending);
  void end_rounds();

  std::vector<Chunk> chunks_;
  std::vector<Recomputation> recomputations_;  // by chunk
  std::array<int64_t, row_domains> rows_;
  enum Place : uint8_t { written, restored_to, on_host, places };
  struct BufferKey {
    int layer, slot;
    Place place;
  };
  std::vector<std::vector<BufferKey>> buffer_keys_;  // by chunk and buffer index
  // By chunk, layer and slot: index of the buffer of the first place; the others follow. -1: none.
  std::vector<std::vector<std::vector<int>>> forward_buffers_;
  std::vector<std::vector<const char*>> trace_names_;
  std::vector<Program> programs_;
  Program* program_ = nullptr;
  memory::Liveness* liveness_ = nullptr;
  LayerWatch* watch_ = nullptr;
  InFlight in_flight_;                  ///< of the layer that is visited
  std::vector<Offloading> offloading_;  // by chunk
  std::optional<Pass> next_;
  std::vector<Copies> offloads_, fetches_;  // that are pending
  memory::HostCopies copies_;
  std::vector<memory::HostCopy> list_;  // of the copies that are started
  std::function<void(int)> at_tick_;
  std::function<void(const memory::LayerTable&, size_t)> at_step_;
  int tick_ = -1;
  size_t next_rounds_ = 0;  ///< in Program::rounds
};

}  // namespace nrl::model

#pragma once
// The layers of one rank, in chunks of consecutive ones, on memory that a dry run has planned. A schedule's
// actions name a chunk, and a stash: the place of one microbatch that is in flight.
//
// First everything is recorded: record(), then for each program begin() and the schedule's actions, with
// nothing computed. The uses of every buffer are in the Liveness then; bind() gives the planned memory, and
// the same calls compute.

#include <array>
#include <functional>
#include <memory>
#include <vector>

#include "apps/model/chunks.h"
#include "memory/liveness.h"

namespace nrl::model {

/// The memory of one stash of a chunk. A slot has two places: where forward passes leave it, and where
/// backward passes make it again.
struct Frame {
  std::vector<int> buffers;           ///< numbers in the Liveness; -1: never used
  std::vector<Tensor> tensors = {};   ///< the same, bound
  std::vector<memory::SlotSet> made;  ///< by layer: what this microbatch's backward pass made again already
};

class Stage {
 public:
  /// Chunks in the order of the model. `rows`: the largest number of rows of each RowDomain.
  Stage(std::vector<Chunk> chunks, std::array<int64_t, row_domains> rows);

  int chunks() const { return static_cast<int>(chunks_.size()); }

  /// A program is a kind of run that has its own schedule: training, evaluation. `stashes`: per chunk.
  /// Returns its number. Programs share memory, since they do not run at the same time.
  int add_program(memory::Mode mode, std::vector<int> stashes);

  /// From now on nothing is computed, and uses of buffers go into `liveness` (null: compute).
  void record(memory::Liveness* liveness) { liveness_ = liveness; }
  /// The program's schedule begins. While recording: once per program.
  void begin(int program);
  /// `ids`: what Liveness::declare returned.
  void bind(const memory::MemoryPlan& plan, const std::vector<memory::BufferId>& ids,
            const memory::Arenas& arenas);

  bool recording() const { return liveness_ != nullptr; }
  /// One microbatch through the chunk. The batch must be the same in its backward passes. `last`: with this
  /// microbatch the head's gradients are complete.
  void forward(int chunk, int stash, const MicroBatch& batch, bool last);
  struct Parts {
    bool data = true;    ///< gradients of activations
    bool weight = true;  ///< gradients of weights; with `data` layer by layer
    bool last = false;   ///< gradients of weights are complete with this microbatch
  };
  void backward(int chunk, int stash, const MicroBatch& batch, Parts parts);
  /// The chunk's input from the output of the chunk before, whose microbatch lies in `from_stash`.
  void receive_forward(int chunk, int stash, int from_stash);
  /// The gradient of the chunk's output from the chunk behind.
  void receive_backward(int chunk, int stash, int from_stash);

  /// For tests: called when the work of each tick begins, the clock of the planned lifetimes.
  void watch_ticks(std::function<void(int tick)> at_tick) { at_tick_ = std::move(at_tick); }

 private:
  friend class Run;
  struct Program {
    memory::Mode mode;
    std::vector<std::vector<Frame>> frames;  // by chunk and stash
    int first_tick = -1;
  };

  Run run_of(int chunk, int stash, const MicroBatch& batch);
  void enter_layer(Run& r, int index);
  /// Makes those of `wanted` again that are to be, and are not there yet.
  void recompute(Run& r, memory::SlotSet wanted);
  /// The work of a step begins; false when it is only recorded.
  bool tick(Run& r, const memory::Step& step);
  Tensor tensor(const Run& r, Slot slot) const;
  int place(const Run& r, int slot) const;
  /// Copies between layers of neighboring chunks, by place.
  void hand_over(int from_chunk, int from_stash, int from_place, int to_chunk, int to_stash, int to_place);
  int place_of(int chunk, int layer, Slot slot) const;
  int buffer(int chunk, Frame& frame, int place);
  int next_tick();

  std::vector<Chunk> chunks_;
  std::array<int64_t, row_domains> rows_;
  struct Place {
    int layer, slot;
    bool again;
  };
  std::vector<std::vector<Place>> places_;  // by chunk: whose place each is
  std::vector<std::vector<std::vector<int>>>
      slot_place_;  // by chunk, layer, slot: the forward place; -1: none
  std::vector<std::vector<const char*>> trace_names_;
  std::vector<Program> programs_;
  Program* program_ = nullptr;
  memory::Liveness* liveness_ = nullptr;
  std::function<void(int)> at_tick_;
  int tick_ = -1;
};

}  // namespace nrl::model

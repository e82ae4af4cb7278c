#pragma once
// The layers of one rank, in chunks of consecutive layers, and the programs that run on them: add_program()
// lowers a schedule and applies the policies of the layers, declare() plans the memory of all programs, and
// execute() runs one.

#include <array>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "apps/model/program/executor.h"
#include "memory/liveness.h"
#include "parallel/program/live_ranges.h"

namespace nrl::model {

/// One pass of a layer over a microbatch. Forward steps that a layer runs again for the layers above it are
/// a forward pass.
struct LayerVisit {
  const Layer* layer = nullptr;
  bool backward = false;
  bool dgrad = true, wgrad = true;  ///< backward: the kinds of steps it has
  /// The ticks from the beginning of the visit to its last step.
  int first_tick = 0, last_tick = 0;
};

class Stage {
 public:
  /// Chunks in the order of the forward pass, whose policies must not change any more. `rows`: the largest
  /// number of rows of each RowDomain.
  Stage(std::vector<Chunk> chunks, std::array<int64_t, row_domains> rows);

  /// A program for training, evaluation or generation, of the layout's stage. Programs never run concurrently
  /// and share memory. Returns its id, from 0.
  int add_program(memory::Mode mode, const pipeline::Schedule& schedule, const ModelLayout& layout);
  int add_program(program::Program program);
  /// The program that add_program() makes of a schedule.
  program::Program lowered(memory::Mode mode, const pipeline::Schedule& schedule,
                           const ModelLayout& layout) const;

  /// Declares the buffers of all programs in the plan.
  void declare(memory::MemoryPlan& plan);
  /// Assigns the planned memory. The layers' context must have its exec.
  void bind(const memory::MemoryPlan& plan, const memory::Arenas& arenas);

  void execute(int program, const Execution& on);
  /// Executes another list in the memory of a program, which must suit it.
  void execute(int program, const program::Program& list, const Execution& on);

  const program::Program& program(int id) const { return programs_[static_cast<size_t>(id)].list; }
  const program::Layers& all_layers() const { return all_.list; }
  /// The visits of a program; `in_full`: with its period as often as it is executed, else with ticks.
  std::vector<LayerVisit> visits(int program, bool in_full) const;
  /// The layer behind an index of the program's layers.
  Layer& layer(int index) const { return *all_.layers[static_cast<size_t>(index)]; }
  /// Index of the first layer of a chunk.
  int first_layer(int chunk) const { return all_.list.begin(chunk); }

  /// The exec of the layers; must not be called before they are bound.
  ops::Exec& exec() const { return *layer(0).context().exec; }
  /// The copies of offloaded slots, by step.
  memory::HostCopies& copies() { return all_.copies; }
  /// Bytes of a slot's buffer, of a microbatch of full size.
  int64_t bytes_of(const memory::SlotSpec& slot) const;

  /// Null: none.
  void watch_layers(LayerWatch* watch) { all_.watch = watch; }
  /// For tests: called before each step with its tick (the time unit of planned lifetimes).
  void watch_ticks(std::function<void(int tick)> at_tick) { all_.at_tick = std::move(at_tick); }

 private:
  struct Planned {
    program::Program list;
    program::Buffers buffers = {};
    ProgramMemory memory = {};
  };

  std::vector<Chunk> chunks_;
  ProgramLayers all_;
  memory::Liveness liveness_;
  int last_tick_ = -1;
  std::vector<memory::BufferId> ids_;  // by id in the Liveness
  std::vector<Planned> programs_;
};

}  // namespace nrl::model

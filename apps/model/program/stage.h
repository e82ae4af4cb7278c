#pragma once
// The layers of one rank, in chunks of consecutive layers, and the programs that run on them: add_program()
// lowers a schedule and applies the policies of the layers, declare() plans the memory of all programs, and
// execute() runs one.

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "apps/model/program/executor.h"
#include "memory/liveness.h"
#include "parallel/program/live_ranges.h"

namespace nrl::model {

/// The buckets of sharded parameters, by index in ParameterList::all, and when they are communicated.
struct ShardedParameters {
  std::vector<std::string> groups = {};  ///< names, by BucketId::group
  std::map<int, program::BucketId> weights = {}, gradients = {};
  bool prefetch = true;        ///< program::gather_on_use()
  bool overlap_reduce = true;  ///< program::reduce_when_complete()

  bool any() const { return !weights.empty() || !gradients.empty(); }
};

class Stage {
 public:
  /// Chunks in the order of the forward pass, whose policies must not change any more. `rows`: the largest
  /// number of rows of each RowDomain.
  Stage(std::vector<Chunk> chunks, std::array<int64_t, row_domains> rows, ShardedParameters sharded = {});

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

  const program::Program& program(int id) const { return programs_[id].list; }
  const program::Layers& all_layers() const { return all_.list; }
  /// When the buffers of sharded parameters are in use, in the ticks of all programs.
  const program::RangesOfBuckets& buckets() const { return buckets_; }
  /// The layer behind an index of the program's layers.
  Layer& layer(int index) const { return *all_.layers[index]; }
  /// Index of the first layer of a chunk.
  int first_layer(int chunk) const { return all_.list.begin(chunk); }

  /// The exec of the layers; must not be called before they are bound.
  ops::Exec& exec() const { return *layer(0).context().exec; }
  /// The copies of offloaded slots, by step.
  memory::HostCopies& copies() { return all_.copies; }
  /// Bytes of a slot's buffer, of a microbatch of full size.
  int64_t bytes_of(const memory::SlotSpec& slot) const;

  /// Null: the steps of sharded weights and gradients are skipped.
  void connect(ShardedSteps* sharded) { all_.sharded = sharded; }
  /// For tests: called before each step with its tick (the time unit of planned lifetimes).
  void watch_ticks(std::function<void(int tick)> at_tick) { all_.at_tick = std::move(at_tick); }
  /// Called after each step that writes slots, before others may reuse their memory; on a GPU when its work
  /// is enqueued, for more of it. Null: none. Returns the one before.
  ResultsWatch watch_results(ResultsWatch at_results) {
    return std::exchange(all_.at_results, std::move(at_results));
  }

 private:
  struct Planned {
    program::Program list;
    program::Buffers buffers = {};
    ProgramMemory memory = {};
  };

  std::vector<Chunk> chunks_;
  const ShardedParameters sharded_;
  ProgramLayers all_;
  memory::Liveness liveness_;
  int last_tick_ = -1;
  std::vector<memory::BufferId> ids_;  // by id in the Liveness
  std::vector<Planned> programs_;
  program::RangesOfBuckets buckets_;
};

}  // namespace nrl::model

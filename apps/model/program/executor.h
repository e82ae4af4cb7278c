#pragma once
// Executes a program, one step after the other. A visit runs the text of its layer, forward() or backward(),
// once: each step of the text is executed if it is the next one of the list (Run::enter).

#include <array>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "apps/model/program/layer.h"
#include "core/trace/trace.h"
#include "memory/host_copies.h"
#include "parallel/pipeline/messages.h"
#include "parallel/program/program.h"

namespace nrl::model {

/// Executes the steps of sharded weights and gradients: gather, release, open, reduce, and waits for them.
class ShardedSteps {
 public:
  virtual ~ShardedSteps() = default;
  /// `buckets`: of the step (program::Program::buckets_of()), at least one.
  virtual void execute(const program::Step& step, std::span<const int> buckets) = 0;
};

/// The parts of a step outside the layers. Empty hooks are skipped.
struct StepHooks {
  /// Called on the model's last stage when LayerContext::log_prob holds the log-probabilities of
  /// `microbatch`; the next microbatch overwrites them.
  std::function<void(int microbatch)> log_probs_ready = {};
  /// Waits until the gradients are reduced over the data-parallel ranks.
  std::function<void()> finish_reduce = {};
  /// Clips the gradients, updates the weights and gathers them on all ranks.
  std::function<void()> update = {};
};

/// The input of a program that is executed, and what it calls.
struct Execution {
  std::span<const MicroBatch> batches;  ///< by microbatch
  const StepHooks* hooks = nullptr;     ///< null: none
  /// The messages of the stage; null on a stage alone.
  pipeline::StageMessages* messages = nullptr;
  /// False: executions of other microbatches with the same weights came before, without an update.
  bool first = true;
  /// How often the program's period is repeated, if not as it says.
  std::optional<int> times = {};
};

/// A slot with its contents: the rows of a microbatch.
struct SlotValue {
  program::SlotId slot = 0;
  Tensor value;
};
/// Slots that a step of a program has written, after it or, for those that an operation of the layer had in
/// flight, after the step that waited for it.
struct StepResults {
  const program::Step& step;
  int microbatch = 0;  ///< of the program, repetitions of its period included
  memory::Mode mode = memory::training;
  std::vector<SlotValue> written = {};
  std::vector<SlotValue> read = {};  ///< as the step has left them; empty for slots that were in flight
};
using ResultsWatch = std::function<void(const StepResults&)>;

/// The layers of a rank as programs name them, and what observes their steps.
struct ProgramLayers {
  program::Layers list;
  std::vector<Layer*> layers;            ///< by index in `list`
  std::vector<const char*> trace_names;  ///< the same
  std::array<int64_t, row_domains> rows{};
  memory::HostCopies copies;
  ShardedSteps* sharded = nullptr;  ///< null: their steps are skipped
  std::function<void(int)> at_tick;
  ResultsWatch at_results;
};

/// The memory of a program.
struct ProgramMemory {
  int first_tick = 0;                                     ///< the tick of step i is first_tick + i
  std::vector<Tensor> device;                             ///< by Places' index of the buffer
  std::vector<std::byte*> host;                           ///< by Places::index()
  std::vector<std::vector<std::vector<int32_t>>> values;  ///< by layer and stash: Run::host_values()
};

class Executor {
 public:
  Executor(ProgramLayers& all, ProgramMemory& memory, const program::Program& list, const Execution& on);
  void run();

  /// For a step of the text of the run's layer. Executes the visits that are nested in this one and come
  /// first. True: the step is the next one, and must be executed now; false: not in this visit.
  bool enter(Run& r, int index);
  /// True if the program's step that was entered last names the slot.
  bool names(const Run& r, Slot slot) const;
  Tensor tensor(const Run& r, Slot slot) const;
  std::span<int32_t> host_values(const Run& r) const;

  /// The rounds that the list has from here on, in the visit of a run.
  struct ListedRounds {
    std::vector<size_t> begin = {};  ///< by round of the list; `end`: it has no steps
    size_t end = 0;
  };
  ListedRounds rounds(const Run& r) const;
  /// Goes to a round: `index` as in Run::round(). `forward`: the list has the last round first.
  void enter_round(Run& r, const ListedRounds& rounds, int index, bool forward);
  void end_rounds(Run& r, const ListedRounds& rounds);

 private:
  /// A message or copies that were started.
  struct Started {
    program::StepKind kind;
    program::SlotId slot = 0;
    int microbatch = 0;
    comm::Handle message = {};
    memory::HostCopies::Ticket copies = -1;
  };

  /// A step whose results were not reported, or its slot that is in flight.
  struct Unreported {
    const program::Step* step = nullptr;
    int microbatch = 0;
    program::SlotId slot = -1;
  };
  /// Reports the results of the last step, and slots of earlier ones that were in flight until then.
  void report_results();
  SlotValue value(program::SlotId slot, int microbatch) const;
  bool in_flight(program::SlotId slot) const { return in_flight_.holds(all_.list.slots[slot].slot); }

  const program::Step& next() const { return list_.steps[next_]; }
  int microbatch(const program::Step& s) const { return s.microbatch + shift_; }
  /// Goes past the next step, whose slots are then up to date.
  const program::Step& pass();
  void step();
  void visit();
  void visit_nested(const Run& outer);
  void skip_nested();
  void start(const program::Step& s);
  void wait(const program::Step& s);
  void communicate(const program::Step& s);
  void copy(const program::Step& s);
  Tensor tensor_of(program::SlotId slot, int microbatch) const;
  Tensor with_rows(Tensor t, const memory::SlotSpec& slot, const MicroBatch& batch) const;

  ops::Exec& exec() const { return *layer(0).context().exec; }
  Layer& layer(int index) const { return *all_.layers[index]; }

  ProgramLayers& all_;
  ProgramMemory& memory_;
  const program::Program& list_;
  const Execution& on_;
  program::Places places_;
  InFlight in_flight_;  // of the layer that is visited
  size_t next_ = 0;     // index of the next step
  int shift_ = 0;       // of microbatches, in repetitions of the period
  std::vector<Started> started_;
  Unreported last_;                   // the step that was entered last
  std::vector<Unreported> deferred_;  // in flight
  std::optional<trace::Range> pass_;
};

}  // namespace nrl::model

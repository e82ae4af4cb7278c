#pragma once
// A layer is written once, as steps: forward() and backward() read top to bottom, and every step names the
// slots it reads and writes. A slot is a stash entry: an activation, saved statistic or gradient of the
// layer. The same code runs in two ways (Run): without computing it fills the layer's LayerTable, from which
// programs are made (parallel/program); and it executes the steps of a visit that a program has: of the
// forward pass, of the backward pass with dgrad and wgrad together or apart, or those that a backward pass
// runs again. A dry run executes them on a device that computes nothing.
//
// Accessing a slot that the step did not name is an error, so that table and code cannot diverge.

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "apps/model/program/builder.h"
#include "apps/model/spec/layout.h"
#include "apps/model/spec/loss_rule.h"
#include "apps/model/spec/micro_batch.h"
#include "apps/model/spec/parameters.h"
#include "apps/model/spec/row_domains.h"
#include "core/ops/dropout.h"
#include "core/ops/exec.h"
#include "memory/layer_table.h"
#include "parallel/grid/groups.h"
#include "precision/recipe.h"

namespace nrl::model {

using memory::Ports;
using memory::Slot;

/// A parameter in device memory: the weight that layers read and the f32 gradient they accumulate into.
struct ParameterView {
  Tensor weight, grad;
  bool overwrites_gradient = false;  ///< see Parameter
  /// Each microbatch reports its contribution: `grad` holds the sum of one or several.
  bool grad_per_microbatch = false;
};

class Fp8State;

/// State shared by all layers of a decoder.
struct LayerContext {
  ops::Exec* exec = nullptr;
  const ModelSpec* spec = nullptr;  ///< of the rank's part of the model (tensor_part())
  ModelLayout layout = {};
  const parallel::Groups* groups = nullptr;    ///< null for a layout of one rank
  std::optional<parallel::ZigZag> share = {};  ///< context parallelism: this rank's tokens
  std::vector<ParameterView> parameters;       ///< indexed like ParameterList::all
  std::vector<bool> trainable = {};            ///< the same; empty: all are
  bool adapters = true;                        ///< false, in evaluation only: the model without its adapters
  const Fp8State* fp8 = nullptr;               ///< linear/fp8_state.h; null: no GEMM reads FP8
  /// Called before an op that reads the weights of a parameter is enqueued.
  std::function<void(int parameter)> weight_needed;
  std::vector<Tensor> rope_tables;  ///< of ModelSpec::ropes (RopeTables)
  uint64_t seed = 0;                ///< of dropout
  /// What the head computes, in training and evaluation: N rows, of which results() has a microbatch's.
  HeadOutput head;
  Tensor lse;                ///< (N) f32: log-sum-exp of the logits; absent with Dependence::none and batch
  LossNeeds loss;            ///< of the objective
  LossRule* rule = nullptr;  ///< the objective; null while a plan is made
  Tensor next_logits;        ///< (R, V) f32, written by the head in generation: V of this rank's vocabulary
  /// Experts: aux loss, z loss and load of the step, (3) f64 (ops::RouterBalance); may be absent.
  Tensor router_metrics;
  /// (layers, E) i32: tokens of each expert in the step, of this rank (MoeSpec::counts_steps()); may be
  /// absent.
  Tensor router_counts;
  /// (microbatches x layers with experts of this rank, E) i32: tokens of each expert, of this rank, by
  /// MicroBatch::index; without an auxiliary loss, else absent.
  Tensor expert_counts;
  /// (1) f64: the factor of the gradients of all losses; may be absent.
  Tensor loss_scale;
  /// Raised to the rounds of a layer with experts (Run::rounds()); may be absent.
  int* expert_rounds = nullptr;
  /// While kernels are collected: the rows that experts get, relative to a balanced router.
  double expert_load = 1;
  /// True in a dry run that only looks for workspace: Run::rounds() executes the first and the last round.
  /// The others have as many rows as the first.
  bool few_rounds = false;
  int64_t sequences = 1;  ///< samples of equal length in a microbatch of training
  /// Called when the gradient of a parameter is complete for the step.
  std::function<void(int parameter)> gradient_ready;

  const Tensor& rope_table(int layer) const { return rope_tables[spec->layer_kinds[layer].rope]; }
  /// The part of `head` of a microbatch of `rows` rows.
  HeadOutput results(int64_t rows) const;
  /// True if the model has the parameter and the run trains it: layers have no steps, and write nothing, for
  /// other gradients.
  bool trains(int parameter) const {
    return parameter >= 0 && (trainable.empty() || trainable[static_cast<size_t>(parameter)]);
  }
};

/// Together with the layer, identifies a dropout mask within a step. `attention` and `mlp` apply to the
/// output of the sublayer before it is added to the residual stream, `probabilities` to the
/// attention probabilities, `adapter` and those that follow to the inputs of adapters.
enum class DropoutSite : uint8_t { attention, mlp, probabilities, adapter };

class Layer;
class Executor;

/// A set of slots that a step reads.
struct Reads {
  memory::SlotSet set = 0;
  Reads operator|(Reads other) const { return {set | other.set}; }
};
template <class... S>
Reads reads(S... slots) {
  return {(memory::SlotSet{0} | ... | slots.bit())};
}

/// Slots that a step writes; `over(output, input)` when the output may reuse the input's memory. The step
/// must then support both: output aliasing the input, and separate memory.
struct Writes {
  memory::SlotSet set = 0;
  std::array<memory::TakeOver, 2> take_over{};
  memory::SlotSet remakes = 0;
  /// These slots as well.
  Writes with(memory::SlotSet more) const {
    Writes w = *this;
    w.set |= more;
    return w;
  }
};
/// A slot of the forward pass that a dgrad step can compute as well, instead of its recomputation; it may
/// reuse the memory of `input`. Run::remade() says whether the step must.
struct Remade {
  memory::TakeOver take_over;
};
inline Remade remade_over(Slot output, Slot input) {
  return {{output, input}};
}
inline memory::TakeOver over(Slot output, Slot input) {
  return {output, input};
}
namespace detail {
inline void add(Writes& w, Slot slot) {
  w.set |= slot.bit();
}
inline void add(Writes& w, memory::TakeOver t) {
  w.set |= t.output.bit();
  w.take_over[w.take_over[0].output ? 1 : 0] = t;
}
inline void add(Writes& w, Remade r) {
  w.remakes |= r.take_over.output.bit();
  w.take_over[w.take_over[0].output ? 1 : 0] = r.take_over;
}
}  // namespace detail
template <class... S>
Writes writes(S... outputs) {
  Writes w;
  (detail::add(w, outputs), ...);
  return w;
}

/// A contiguous tensor as the memory of an operation.
comm::View view_of(const Tensor& t);

/// Operations that a step has started and a later one of the same pass waits for, by the slot they write. The
/// later step must name the slot, and the memory they read.
class InFlight {
 public:
  void add(Slot slot, std::vector<comm::Handle> operations) { operations_[slot.id] = std::move(operations); }
  /// For the caller to wait for; empty if there are none.
  std::vector<comm::Handle> take(Slot slot);
  bool empty() const { return operations_.empty(); }
  bool holds(Slot slot) const { return operations_.contains(slot.id); }

 private:
  std::map<int, std::vector<comm::Handle>> operations_;
};

/// One pass through forward() or backward() of a layer.
class Run {
 public:
  /// A forward step of all modes.
  template <class F>
  void step(std::string_view name, Reads reads, Writes writes, F&& work) {
    step(memory::every_mode, name, reads, writes, work);
  }
  /// A forward step of the given modes.
  template <class F>
  void step(memory::Modes modes, std::string_view name, Reads reads, Writes writes, F&& work) {
    visit(memory::Pass::forward, modes, name, reads, writes, work);
  }
  /// A backward step that contributes to the gradient of the layer's input.
  template <class F>
  void dgrad(std::string_view name, Reads reads, Writes writes, F&& work) {
    visit(memory::Pass::data, memory::every_mode, name, reads, writes, work);
  }
  /// A backward step that only accumulates weight gradients. It may be deferred.
  template <class F>
  void wgrad(std::string_view name, Reads reads, F&& work) {
    visit(memory::Pass::weight, memory::every_mode, name, reads, {}, work);
  }

  /// Calls `steps`, which executes steps, once for each of `n` parts of the rows that pass through them,
  /// which did not fit into memory at once. The slots of round 0 are kept; the backward pass recomputes the
  /// slots of other rounds, and must then execute dgrad and wgrad steps together. `carried` gets its parts
  /// from all rounds, and a later step of the forward pass reads it. There are never more than `most` rounds:
  /// the dry run records as many, but no more than show everything that lives at the same time.
  void rounds(int n, int most, Slot carried, const std::function<void()>& steps);
  /// Within the `steps` of rounds(): executes `steps` that are no part of the rounds, in one round only (0).
  void once(const std::function<void()>& steps);
  /// The part of the rows, from 0, that a step within rounds() has, and whether it is the last one.
  int round() const { return round_.index; }
  bool last_round() const { return round_.last; }
  /// True if steps are executed, not described.
  bool executes() const { return !table_; }

  /// The slot as a tensor (rows, width). Only valid inside a step that names it. Empty for an unset slot, and
  /// for the port `residual` of the first layer after the embedding.
  Tensor operator[](Slot slot) const;
  /// The slot, if this step must write it (remade_over()); else empty.
  Tensor remade(Slot slot) const;

  const LayerContext& context() const { return *context_; }
  const ModelSpec& spec() const { return *context_->spec; }
  const ModelLayout& layout() const { return context_->layout; }
  ops::Exec& exec() const { return *context_->exec; }
  const MicroBatch& batch() const { return *batch_; }
  /// Empty for parameter -1.
  Tensor weight(int parameter) const;
  Tensor grad(int parameter) const;
  /// Whether a GEMM adds its gradient of this parameter to earlier ones of the step. Only for the first GEMM
  /// of a microbatch that contributes; later ones always add.
  bool accumulates(int parameter) const;
  /// Called when the microbatch's contribution to the gradients of these parameters has been added.
  void gradient_ready(std::initializer_list<int> parameters) const;
  // Communication among the tensor-parallel ranks, ordered by the exec's stream. Tensors must be contiguous.
  // Nothing is communicated on a rank alone: the handles are then empty.
  /// Sums over the ranks, in place.
  comm::Handle all_reduce_async(const Tensor& data) const;
  /// The same over a group of other ranks, completed; nothing without groups.
  void all_reduce(const Tensor& data, const parallel::GroupId& group,
                  comm::Reduce operation = comm::Reduce::sum) const;
  /// `out` gets the ranks' `in`, in rank order. `in` may be this rank's part of `out`.
  comm::Handle all_gather_async(const Tensor& in, const Tensor& out) const;
  /// `out` gets this rank's part of the rows of the sum of the ranks' `in`.
  comm::Handle reduce_scatter_async(const Tensor& in, const Tensor& out) const;
  /// Starts when `previous` has completed.
  comm::Handle exchange_async(std::vector<comm::Message> messages, const comm::Handle& previous = {}) const;
  InFlight& in_flight() const { return *in_flight_; }

  /// Values that the host keeps of this layer and microbatch, Layer::host_values() of them.
  std::span<int32_t> host_values() const;

  bool trains() const { return mode_ == memory::training; }
  /// Forward passes: of the first microbatch of a step or an evaluation, since which no weight has changed.
  bool first_microbatch() const { return first_; }
  bool recomputes() const { return mode_ == memory::recompute; }
  bool generates() const { return mode_ == memory::generation; }
  /// Dropout is off in evaluation and generation.
  ops::FusedDropout dropout(float p, int layer, DropoutSite site) const;
  /// The dropout of the input of a layer's `index`-th adapter, for all rows of the microbatch.
  ops::FusedDropout adapter_dropout(float p, int layer, int index) const {
    return dropout(p, layer, static_cast<DropoutSite>(static_cast<int>(DropoutSite::adapter) + index));
  }
  /// out = dropout(x) (+ residual), with the mask of `site`. out may alias both.
  void drop(const Tensor& x, const Tensor& residual, const Tensor& out, float p, int layer,
            DropoutSite site) const;

 private:
  friend class Layer;
  friend class Executor;

  /// Null when nothing is communicated.
  comm::Communicator* tensor_ranks() const;

  template <class F>
  void visit(memory::Pass pass, memory::Modes modes, std::string_view name, Reads reads, const Writes& writes,
             F& work) {
    if (!enter(pass, modes, name, reads, writes)) return;
    work();
    inside_ = false;
  }
  /// True when the step must be executed now.
  bool enter(memory::Pass pass, memory::Modes modes, std::string_view name, Reads reads,
             const Writes& writes);
  memory::LayerTable* table_ = nullptr;  ///< set: describe
  const LayerContext* context_ = nullptr;
  Executor* executor_ = nullptr;
  Layer* layer_ = nullptr;
  const MicroBatch* batch_ = nullptr;
  int microbatch_ = 0;  ///< of the program
  InFlight* in_flight_ = nullptr;
  int index_ = 0;   ///< of the layer on this rank
  int cursor_ = 0;  ///< index of the next step in the table
  memory::Modes mode_ = 0;
  bool dgrad_ = false, wgrad_ = false;  ///< backward passes: the kinds of steps to execute
  bool first_ = false;                  ///< this microbatch begins the weight gradients
  bool last_ = false;                   ///< this microbatch completes the weight gradients
  struct Round {
    int index = 0;
    bool recomputes = false;  ///< forward steps recompute what backward steps of this round read
    bool again = false;       ///< it keeps nothing, and adds to the gradients of the round before
    bool last = true;
  };
  Round round_;
  int rounds_ = 1;         ///< number of rounds so far
  int listed_round_ = -1;  ///< the round of the program that is executed (program::Step::round)
  bool inside_ = false;    ///< a step, whose slots may be accessed
};

/// The parameters that one pass of a layer uses, as indices into ParameterList::all.
struct ParameterUse {
  std::vector<int> weights;    ///< read, also by recomputation within the pass
  std::vector<int> gradients;  ///< contributed to
};

class Layer {
 public:
  virtual ~Layer() = default;
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  /// The only definition of the layer; all runs execute these.
  virtual void forward(Run& r) = 0;
  virtual void backward(Run& r) = 0;
  /// The parameters of forward() or backward(): sharded ones are gathered for the pass, and their gradients
  /// reduced after it.
  virtual ParameterUse parameters(bool /*backward*/) const { return {}; }

  /// Values that the host must know of a microbatch from the forward pass on (Run::host_values()).
  virtual int64_t host_values() const { return 0; }

  const std::string& name() const { return name_; }
  const LayerContext& context() const { return context_; }
  const Ports& ports() const { return ports_; }
  const memory::LayerTable& table() const { return table_; }
  const memory::LayerPolicy& policy(bool of_later_rounds = false) const {
    return of_later_rounds ? *again_ : *policy_;
  }
  /// Sets the slots that backward passes recompute, and the slots that are moved to the host until the
  /// backward pass; all others are kept.
  void recompute(memory::SlotSet slots, memory::SlotSet offloaded = 0) {
    policy_.emplace(table_, slots, offloaded);
    again_.emplace(table_, slots | table_.in_rounds(), offloaded & ~table_.in_rounds());
  }

 protected:
  Layer(std::string name, const LayerContext& context) : name_(std::move(name)), context_(context) {}
  Slot slot(const memory::SlotSpec& spec) { return table_.add(spec); }
  /// For block `layer`; `recipe` must outlive it.
  LayerBuilder builder(const precision::Recipe& recipe, int layer = 0) {
    return {*context_.spec,
            context_.layout,
            recipe,
            layer,
            [this](const memory::SlotSpec& s) { return slot(s); },
            [&context = context_](int parameter) { return context.trains(parameter); }};
  }
  /// Fills the table. Must be called at the end of the most derived class's constructor.
  void describe();

  Ports ports_;

 private:
  std::string name_;
  const LayerContext& context_;
  memory::LayerTable table_;
  std::optional<memory::LayerPolicy> policy_;
  std::optional<memory::LayerPolicy> again_;  ///< the policy of rounds that keep nothing
};

/// Consecutive layers of the model on one rank.
using Chunk = std::vector<std::unique_ptr<Layer>>;

}  // namespace nrl::model

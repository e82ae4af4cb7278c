#pragma once
// A layer is written once, as steps: forward() and backward() read top to bottom, and every step names the
// slots it reads and writes. The same text runs in four ways (Run):
//
//   describe   fills the layer's LayerTable; nothing is computed
//   record     a dry run of a schedule: the uses of every buffer are written down for the memory plan
//   compute    the work itself, forward or backward, data and weight parts together or apart
//   recompute  inside of a backward pass: those forward steps that make the slots a step wants to read
//
// A step that touches a slot which it did not name fails, so that table and code cannot drift apart.

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "apps/model/micro_batch.h"
#include "apps/model/parameters.h"
#include "core/ops/dropout.h"
#include "core/ops/exec.h"
#include "memory/layer_table.h"

namespace nrl::model {

using memory::Slot;

/// A parameter as a layer sees it: the weight it reads and the f32 gradient it adds to.
struct ParameterView {
  Tensor weight, grad;
};

/// What rows of slots are (SlotSpec::rows).
enum RowDomain : uint8_t {
  token_rows,       ///< tokens of the microbatch
  head_chunk_rows,  ///< tokens whose logits exist at a time
  row_domains
};

/// What all layers of a decoder share.
struct LayerContext {
  ops::Exec* exec = nullptr;
  const ModelSpec* spec = nullptr;
  std::vector<ParameterView> parameters;  ///< indexed like ParameterList::all
  Tensor rope_table;
  uint64_t seed = 0;   ///< of dropout
  Tensor log_prob;     ///< (N) f32: what the head writes in training and evaluation
  Tensor next_logits;  ///< (1, V) f32: what the head writes in generation
  /// Called when the gradient of a parameter is complete for the step.
  std::function<void(int parameter)> gradient_ready;
};

/// Names a dropout mask within a step, with the layer. `attention` and `mlp` lie on the way into the residual
/// stream.
enum class DropoutSite : uint8_t { attention, mlp, probabilities };

class Layer;
class Stage;
struct Frame;

/// A set of slots that a step reads.
struct Reads {
  memory::SlotSet set = 0;
};
template <class... S>
Reads reads(S... slots) {
  return {(memory::SlotSet{0} | ... | slots.bit())};
}

/// Slots that a step writes; `over(output, input)` when the output may have the input's memory. The step must
/// then do with both cases, the same address and another one.
struct Writes {
  memory::SlotSet set = 0;
  std::array<memory::TakeOver, 2> take_over{};
};
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
}  // namespace detail
template <class... S>
Writes writes(S... outputs) {
  Writes w;
  (detail::add(w, outputs), ...);
  return w;
}

/// One pass through the text of a layer.
class Run {
 public:
  /// A forward step of every mode.
  template <class F>
  void step(std::string_view name, Reads reads, Writes writes, F&& work) {
    step(memory::every_mode, name, reads, writes, work);
  }
  /// A forward step of some modes.
  template <class F>
  void step(memory::Modes modes, std::string_view name, Reads reads, Writes writes, F&& work) {
    visit(memory::Pass::forward, modes, name, reads, writes, work);
  }
  /// A backward step on the way to the gradient of the layer's input.
  template <class F>
  void dgrad(std::string_view name, Reads reads, Writes writes, F&& work) {
    visit(memory::Pass::data, memory::every_mode, name, reads, writes, work);
  }
  /// A backward step that only adds to gradients of weights. It may run at any later time.
  template <class F>
  void wgrad(std::string_view name, Reads reads, F&& work) {
    visit(memory::Pass::weight, memory::every_mode, name, reads, {}, work);
  }

  /// The slot, (rows, width); only inside of a step that names it. Empty where there is none: a slot that the
  /// layer does not have, or the residual stream's second part in front of the first layer.
  Tensor operator[](Slot slot) const;

  const LayerContext& context() const { return *context_; }
  const ModelSpec& spec() const { return *context_->spec; }
  ops::Exec& exec() const { return *context_->exec; }
  const MicroBatch& batch() const { return *batch_; }
  /// Empty for parameter -1.
  Tensor weight(int parameter) const;
  Tensor grad(int parameter) const;
  /// The microbatch has added to the gradients of these parameters.
  void gradient_ready(std::initializer_list<int> parameters) const;
  /// Nothing is dropped where no backward pass follows.
  ops::FusedDropout dropout(float p, int layer, DropoutSite site) const;
  /// out = dropout(x) (+ residual), with the mask of `site`. out may alias both.
  void drop(const Tensor& x, const Tensor& residual, const Tensor& out, float p, int layer,
            DropoutSite site) const;

 private:
  friend class Layer;
  friend class Stage;

  template <class F>
  void visit(memory::Pass pass, memory::Modes modes, std::string_view name, Reads reads, const Writes& writes,
             F& work) {
    if (!enter(pass, modes, name, reads, writes)) return;
    work();
    touched_ = 0;
  }
  /// True when the step's work is to be done now.
  bool enter(memory::Pass pass, memory::Modes modes, std::string_view name, Reads reads,
             const Writes& writes);

  memory::LayerTable* table_ = nullptr;  ///< set: describe
  const LayerContext* context_ = nullptr;
  Stage* stage_ = nullptr;
  Layer* layer_ = nullptr;
  Frame* frame_ = nullptr;
  const MicroBatch* batch_ = nullptr;
  int chunk_ = 0;
  int index_ = 0;   ///< of the layer in its chunk
  int cursor_ = 0;  ///< number of the next step in the table
  memory::Modes mode_ = 0;
  bool data_ = false, weight_ = false;  ///< backward passes: which parts run
  bool last_ = false;                   ///< gradients of weights are complete with this microbatch
  uint64_t only_ = 0;                   ///< recompute: the forward steps that run
  memory::SlotSet again_ = 0;           ///< slots that are looked for in their recomputed place
  memory::SlotSet touched_ = 0;         ///< slots of the step that runs
};

/// The slots through which layers hand over the residual stream and its gradient. What comes in is `x`, not
/// yet added to `residual`; the layer adds them (with the dropout of the layer before) and hands on the same
/// way.
struct Ports {
  Slot x, residual;  ///< ports: `out` and `sum` of the layer before
  Slot out, sum;     ///< own; no sum: `out` is the whole stream
  Slot d_out;        ///< port: d_x of the layer behind
  Slot d_x;          ///< own; the gradient of the stream that came in
};

class Layer {
 public:
  virtual ~Layer() = default;
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  /// The layer, once; every run goes through these.
  virtual void forward(Run& r) = 0;
  virtual void backward(Run& r) = 0;

  const std::string& name() const { return name_; }
  const LayerContext& context() const { return context_; }
  const Ports& ports() const { return ports_; }
  const memory::LayerTable& table() const { return table_; }
  const memory::LayerPolicy& policy() const { return *policy_; }
  /// Which slots backward passes make again; all are kept otherwise.
  void recompute(memory::SlotSet slots) { policy_.emplace(table_, slots); }

 protected:
  Layer(std::string name, const LayerContext& context) : name_(std::move(name)), context_(context) {}
  Slot slot(const memory::SlotSpec& spec) { return table_.add(spec); }
  /// Fills the table; at the end of the constructor of the most derived class.
  void describe();

  Ports ports_;

 private:
  std::string name_;
  const LayerContext& context_;
  memory::LayerTable table_;
  std::optional<memory::LayerPolicy> policy_;
};

}  // namespace nrl::model

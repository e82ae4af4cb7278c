#pragma once
// How the tokens of this rank get to the experts that the router chose, and the experts' outputs back.
//
// On a rank with all experts, rows are copied in the order of experts. Otherwise tokens go to other ranks of
// the expert group (expert_exchange_group), G of them, in one of two ways (MoeSpec::dispatcher):
//
//   alltoall    every row goes to the ranks of its expert (parallel::RowExchange), a part of its columns to
//               each, and they gather it; the sums of their results return in such parts. The hosts must know
//               how many rows there are: one all-gather of the ranks' counts that the host waits for. Experts
//               that are padded to their capacity need no counts. There is memory for
//               MoeSpec::row_slack times the rows of a balanced router; if a rank gets more, all ranks work
//               in rounds (Run::rounds()).
//   allgather   every rank gathers the tokens of all ranks and picks the ones that its experts get. A
//               reduce-scatter adds up the results. The host waits for nothing; every rank has memory for the
//               tokens of all ranks.
//
// n tokens on this rank, E experts, k = top_k, L experts on this rank, H hidden size, R rows of the local
// experts: dispatched_rows, of which `rows()` are in use (in a round).

#include <memory>

#include "apps/model/linear/grouped_rows.h"
#include "apps/model/program/layer.h"
#include "apps/model/spec/rank_groups.h"
#include "core/ops/dispatch.h"
#include "parallel/experts/row_exchange.h"

namespace nrl::model {

/// Modes of the steps that route tokens.
inline constexpr memory::Modes decide_once = memory::training | memory::evaluation | memory::generation;

/// The recompute rules of the experts' input. To copy tokens is as cheap as a norm, to exchange them is not.
std::string_view dispatch_rules(const ModelLayout& layout);

/// The slots of the layer between which a dispatch lies.
struct ExpertSlots {
  Slot x;       ///< (n, H): the input of the experts
  Slot choice;  ///< (n, 2k) i32: experts (n, k), then a place for their rows (n, k)
  Slot prob;    ///< (n, k) f32
  Slot d_prob;  ///< (n, k) f32
  Slot rows;    ///< (R, H): x of the rows
  Slot y;       ///< (R, H): the experts' outputs, not yet weighted
  Slot d_out;   ///< (n, H): gradient of the sum of the weighted outputs
  Slot d_y;     ///< (R, H): gradient of the weighted sums
  Slot d_rows;  ///< (R, H)
};

class ExpertDispatch : public GroupedRows {
 public:
  /// Decides where this rank's tokens go: the forward step before the dispatch.
  virtual void route(Run& r) const = 0;
  // Steps within Run::rounds(). Rows are on their way between start_ and finish_, and after give_back until
  // combine(): the shared expert is computed then.
  /// Forward: `rows`.
  virtual void start_dispatch(Run& /*r*/) const {}
  virtual void finish_dispatch(Run& r) const = 0;
  /// Forward, when y is computed: begins to send it back.
  virtual void give_back(Run& /*r*/) const {}
  /// Backward: d_y and the weights of its rows.
  virtual void start_dispatch_gradient(Run& /*r*/) const {}
  virtual void finish_dispatch_gradient(Run& /*r*/) const {}
  /// Backward, when d_rows and the gradients of the weights are computed: begins to send them back.
  virtual void give_back_gradient(Run& /*r*/) const {}
  /// Arguments of Run::rounds().
  virtual int rounds(const Run& /*r*/) const { return 1; }
  virtual int most_rounds() const { return 1; }
  virtual Slot carried() const { return {}; }
  // Parts of steps of the layer, which names the slots that they use besides ExpertSlots.
  struct Uses {
    Reads reads = {};
    memory::SlotSet writes = 0;
  };
  /// out (n, H) = the weighted sums of y (+ addend, which may be out).
  virtual void combine(const Run& r, const Tensor& addend, const Tensor& out) const = 0;
  /// Reads d_out (n, H), the gradient of the weighted sums. d_y follows, or the dispatch of the gradient.
  virtual void combine_backward(const Run& r, const Tensor& d_out) const = 0;
  /// Arguments of ops::GateBackward.
  struct Gate {
    Tensor prob, row, d_prob;
  };
  virtual Gate gate(const Run& r) const = 0;
  /// d_x (n, H) (+ addend, which may be d_x) from d_rows, and d_prob.
  virtual void dispatch_backward(const Run& r, const Tensor& addend, const Tensor& d_x) const = 0;
  Uses combine_uses, combine_backward_uses, gate_uses, dispatch_backward_uses;

  /// The number of Run::host_values() that the dispatch uses.
  virtual int64_t host_values() const { return 0; }

 protected:
  ExpertDispatch(const ModelSpec& spec, const ExpertSlots& slots) : spec_(spec), slots_(slots) {}
  static Tensor flat(const Tensor& t) { return make_tensor(t.data, t.dtype, {t.numel()}); }
  /// The two halves of a slot (m, 2k) like ExpertSlots::choice, or of weights and their gradients.
  static Tensor first_half(const Run& r, Slot slot);
  static Tensor second_half(const Run& r, Slot slot);
  /// The sort of this rank's choices.
  ops::DispatchSort sort(const Run& r, const Tensor& offsets, const Tensor& source) const;
  static comm::Communicator& ranks(const Run& r, const parallel::GroupId& group = expert_exchange_group);

  const ModelSpec& spec_;
  const ExpertSlots slots_;
};

/// The dispatch of the layout.
std::unique_ptr<ExpertDispatch> expert_dispatch(const LayerBuilder& b, const ExpertSlots& slots);

// The two ways to other ranks (expert_alltoall.cpp, expert_allgather.cpp).
std::unique_ptr<ExpertDispatch> alltoall_dispatch(const LayerBuilder& b, const ExpertSlots& slots);
std::unique_ptr<ExpertDispatch> allgather_dispatch(const LayerBuilder& b, const ExpertSlots& slots);

}  // namespace nrl::model

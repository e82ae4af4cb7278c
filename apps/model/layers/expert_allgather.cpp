// Every rank gathers the tokens of all ranks and picks the ones that its experts get.
#include <algorithm>

#include "apps/model/layers/expert_dispatch.h"
#include "core/ops/kernel_table.h"

namespace nrl::model {
namespace {

class AllGatherDispatch final : public ExpertDispatch {
 public:
  AllGatherDispatch(const LayerBuilder& b, const ExpertSlots& slots)
      : ExpertDispatch(b.spec, slots),
        local_(local_experts(b.spec, b.layout)),
        rank_(b.layout.expert_group_rank()),
        activation_(b.recipe.activations()),
        gradient_(b.recipe.gradients()) {
    const ModelSpec& spec = b.spec;
    NRL_CHECK(spec.moe.capacity_factor == 0, "the configuration was not checked");
    const int64_t k = spec.moe.rule.top_k;
    const auto of_group = [&](std::string_view name, int64_t width, DType dtype,
                              std::string_view rules = "") {
      return b.add({.name = name, .width = width, .dtype = dtype, .rows = expert_group_rows, .rules = rules});
    };
    source_ = b.add({.name = "tokens of rows", .width = 1, .dtype = DType::i32, .rows = dispatched_rows});
    offsets_count_ = local_.count + 1;
    offsets =
        b.add({.name = "expert offsets", .width = offsets_count_, .dtype = DType::i32, .rows = one_row});
    tokens_ = of_group("tokens of all ranks", spec.hidden, activation_, dispatch_rules(b.layout));
    d_tokens_ = of_group("gradients of all ranks", spec.hidden, gradient_);
    sums_ = of_group("parts of sums", spec.hidden * std::max(size_of(activation_), size_of(gradient_)),
                     DType::u8);
    choice_ = of_group("experts of all tokens", 2 * k, DType::i32);
    weights_ = of_group("weights of all tokens", 2 * k, DType::f32);
    combine_uses = {reads(slots.y, choice_, weights_), sums_.bit()};
    combine_backward_uses = {{}, d_tokens_.bit()};
    gate_uses = {reads(choice_, weights_), weights_.bit()};
    dispatch_backward_uses = {reads(slots.d_rows, choice_, weights_), sums_.bit() | slots.d_prob.bit()};
  }

  void route(Run& r) const override {
    r.step(decide_once, "route", reads(slots_.choice, slots_.prob),
           writes(choice_, weights_, source_, offsets), [&] {
             gather(r, first_half(r, slots_.choice), first_half(r, choice_));
             gather(r, r[slots_.prob], first_half(r, weights_));
             ops::dispatch_sort(r.exec(), {.expert = first_half(r, choice_),
                                           .first = local_.begin,
                                           .offsets = offsets_of(r),
                                           .row = second_half(r, choice_),
                                           .source = flat(r[source_])});
           });
  }
  void start_dispatch(Run& r) const override {
    r.step("dispatch", reads(slots_.x), writes(tokens_), [&] { start_gather(r, r[slots_.x], tokens_); });
  }
  void finish_dispatch(Run& r) const override {
    r.step("dispatched", reads(slots_.x, tokens_, source_), writes(slots_.rows),
           [&] { pick(r, tokens_, r[slots_.rows]); });
  }

  void combine(const Run& r, const Tensor& addend, const Tensor& out) const override {
    add_up(r, r[slots_.y], first_half(r, weights_), activation_, addend, out);
  }

  void combine_backward(const Run& r, const Tensor& d_out) const override {
    start_gather(r, d_out, d_tokens_);
  }
  void finish_dispatch_gradient(Run& r) const override {
    r.dgrad("dispatched", reads(slots_.d_out, d_tokens_, source_), writes(slots_.d_y),
            [&] { pick(r, d_tokens_, r[slots_.d_y]); });
  }

  Gate gate(const Run& r) const override {
    return {first_half(r, weights_), second_half(r, choice_), second_half(r, weights_)};
  }

  void dispatch_backward(const Run& r, const Tensor& addend, const Tensor& d_x) const override {
    add_up(r, r[slots_.d_rows], {}, gradient_, addend, d_x);
    // Each entry's is on the ranks of its expert, and zero on the others.
    scatter(r, second_half(r, weights_), r[slots_.d_prob]);
  }

 private:
  void gather(const Run& r, const Tensor& in, const Tensor& out) const {
    ranks(r).all_gather_async(view_of(in), view_of(out), comm::StreamRef{r.exec().stream}).wait();
  }
  void scatter(const Run& r, const Tensor& in, const Tensor& out) const {
    ranks(r)
        .reduce_scatter_async(view_of(in), view_of(out), comm::Reduce::sum, comm::StreamRef{r.exec().stream})
        .wait();
  }
  /// From all ranks into `slot`; until pick().
  void start_gather(const Run& r, const Tensor& x, Slot slot) const {
    r.in_flight().add(
        slot, {ranks(r).all_gather_async(view_of(x), view_of(r[slot]), comm::StreamRef{r.exec().stream})});
  }
  void pick(const Run& r, Slot slot, const Tensor& out) const {
    for (comm::Handle& handle : r.in_flight().take(slot)) handle.wait();
    ops::permute(r.exec(),
                 {.x = r[slot], .source = flat(r[source_]), .top_k = spec_.moe.rule.top_k, .out = out});
  }
  /// out = the sums over the ranks of this rank's tokens (+ addend).
  void add_up(const Run& r, const Tensor& x, const Tensor& prob, DType dtype, const Tensor& addend,
              const Tensor& out) const {
    const Tensor parts = r[sums_], row = second_half(r, choice_);
    const Tensor all = make_tensor(parts.data, dtype, {parts.dim(0), spec_.hidden});
    const int64_t n = out.dim(0), own = rank_ * n;
    // This rank adds the addend, to its own tokens.
    const auto tokens = [&](int64_t begin, int64_t count, const Tensor& more) {
      ops::unpermute(r.exec(), {.x = x,
                                .row = row.rows(begin, count),
                                .prob = prob ? prob.rows(begin, count) : Tensor{},
                                .addend = more,
                                .out = all.rows(begin, count)});
    };
    tokens(0, own, {});
    tokens(own, n, addend);
    tokens(own + n, all.dim(0) - own - n, {});
    scatter(r, all, out);
  }

  const Slice local_;
  int64_t rank_;
  DType activation_, gradient_;
  Slot source_;    ///< (R, 1) i32
  Slot tokens_;    ///< (G n, H): the tokens of all ranks
  Slot d_tokens_;  ///< (G n, H): the gradients of their outputs
  Slot sums_;      ///< (G n, H): this rank's parts of all tokens' outputs or gradients; read by no other step
  Slot choice_;    ///< (G n, 2k) i32: experts, then rows on this rank
  Slot weights_;   ///< (G n, 2k) f32: the router's weights, then their gradients
};

}  // namespace

std::unique_ptr<ExpertDispatch> allgather_dispatch(const LayerBuilder& b, const ExpertSlots& slots) {
  return std::make_unique<AllGatherDispatch>(b, slots);
}

}  // namespace nrl::model

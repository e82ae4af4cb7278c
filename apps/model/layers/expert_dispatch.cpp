#include "apps/model/layers/expert_dispatch.h"

#include <algorithm>
#include <cmath>

#include "core/ops/kernel_table.h"

namespace nrl::model {

std::string_view dispatch_rules(const ModelLayout& layout) {
  return exchanges_tokens(layout) ? "moe" : "norm moe";
}

Tensor ExpertDispatch::first_half(const Run& r, Slot slot) {
  const Tensor t = r[slot];
  return make_tensor(t.data, t.dtype, {t.dim(0), t.dim(1) / 2}, t.device);
}

Tensor ExpertDispatch::second_half(const Run& r, Slot slot) {
  const Tensor t = r[slot];
  const int64_t n = t.dim(0), k = t.dim(1) / 2;
  return make_tensor(static_cast<std::byte*>(t.data) + n * k * size_of(t.dtype), t.dtype, {n, k}, t.device);
}

ops::DispatchSort ExpertDispatch::sort(const Run& r, const Tensor& offsets, const Tensor& source) const {
  const MoeSpec& m = spec_.moe;
  const int64_t capacity = m.capacity(r[slots_.choice].dim(0), r.generates());
  return {.expert = first_half(r, slots_.choice),
          .prob = m.drop_by_probability ? r[slots_.prob] : Tensor{},
          .capacity = capacity,
          .pad = capacity > 0 && m.pad_to_capacity,
          .offsets = offsets,
          .row = second_half(r, slots_.choice),
          .source = source};
}

comm::Communicator& ExpertDispatch::ranks(const Run& r, const parallel::GroupId& group) {
  NRL_CHECK(r.context().groups, "experts on several ranks without groups");
  return (*r.context().groups)[group];
}

namespace {

/// All experts are on this rank.
class LocalDispatch final : public ExpertDispatch {
 public:
  LocalDispatch(const LayerBuilder& b, const ExpertSlots& slots) : ExpertDispatch(b.spec, slots) {
    source_ = b.add({.name = "tokens of rows", .width = 1, .dtype = DType::i32, .rows = dispatched_rows});
    offsets_count_ = b.spec.moe.experts + 1;
    offsets =
        b.add({.name = "expert offsets", .width = offsets_count_, .dtype = DType::i32, .rows = one_row});
    combine_uses = {reads(slots.y, slots.choice, slots.prob)};
    combine_backward_uses = {reads(source_), slots.d_y.bit()};
    gate_uses = {reads(slots.choice, slots.prob), slots.d_prob.bit()};
    dispatch_backward_uses = {reads(slots.d_rows, slots.choice, slots.d_prob)};
  }

  void route(Run& r) const override {
    r.step(decide_once, "route", reads(slots_.choice, slots_.prob), writes(slots_.choice, source_, offsets),
           [&] { ops::dispatch_sort(r.exec(), sort(r, offsets_of(r), flat(r[source_]))); });
  }
  void finish_dispatch(Run& r) const override {
    r.step("dispatch", reads(slots_.x, source_), writes(slots_.rows),
           [&] { permute(r, r[slots_.x], r[slots_.rows]); });
  }
  void combine(const Run& r, const Tensor& addend, const Tensor& out) const override {
    ops::unpermute(r.exec(), {.x = r[slots_.y],
                              .row = second_half(r, slots_.choice),
                              .prob = r[slots_.prob],
                              .addend = addend,
                              .out = out});
  }
  void combine_backward(const Run& r, const Tensor& d_out) const override {
    permute(r, d_out, r[slots_.d_y]);
  }
  Gate gate(const Run& r) const override {
    return {r[slots_.prob], second_half(r, slots_.choice), r[slots_.d_prob]};
  }
  void dispatch_backward(const Run& r, const Tensor& addend, const Tensor& d_x) const override {
    ops::unpermute(
        r.exec(),
        {.x = r[slots_.d_rows], .row = second_half(r, slots_.choice), .addend = addend, .out = d_x});
  }

 private:
  void permute(const Run& r, const Tensor& x, const Tensor& out) const {
    ops::permute(r.exec(), {.x = x, .source = flat(r[source_]), .top_k = spec_.moe.rule.top_k, .out = out});
  }

  Slot source_;  ///< (R, 1) i32
};

}  // namespace

std::unique_ptr<ExpertDispatch> expert_dispatch(const LayerBuilder& b, const ExpertSlots& slots) {
  if (!exchanges_tokens(b.layout)) return std::make_unique<LocalDispatch>(b, slots);
  return b.spec.moe.dispatcher == TokenDispatcher::allgather ? allgather_dispatch(b, slots)
                                                             : alltoall_dispatch(b, slots);
}

}  // namespace nrl::model

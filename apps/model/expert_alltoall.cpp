// Rows that go to the ranks of their experts.
#include <algorithm>

#include "apps/model/expert_dispatch.h"
#include "core/ops/kernel_table.h"
#include "core/ops/transfer.h"

namespace nrl::model {
namespace {

/// Rows in transit, and the weight of each.
constexpr int64_t row_alignment = 16;
constexpr int64_t weight_bytes = 16;

class AllToAllDispatch final : public ExpertDispatch {
 public:
  AllToAllDispatch(const ModelSpec& spec, const ModelLayout& layout, const precision::Recipe& recipe,
                   const AddSlot& add, const ExpertSlots& slots)
      : ExpertDispatch(spec, slots),
        exchange_(expert_shape(spec, layout), layout.expert_group_rank()),
        activation_(recipe.activations()),
        gradient_(recipe.gradients()) {
    const int64_t size = spec.hidden * std::max(size_of(activation_), size_of(gradient_));
    row_bytes_ = (size + row_alignment - 1) / row_alignment * row_alignment;
    source_ = add({.name = "tokens of rows", .width = 1, .dtype = DType::i32, .rows = sent_rows});
    offsets_at_ = exchange_.table_size();
    offsets_count_ = exchange_.shape().local() + 1;
    offsets = add({.name = "expert offsets",
                   .width = offsets_at_ + offsets_count_,
                   .dtype = DType::i32,
                   .rows = one_row});
    transit_ = add({.name = "rows in transit",
                    .width = row_bytes_ + weight_bytes,
                    .dtype = DType::u8,
                    .rows = returned_rows,
                    .rules = dispatch_rules(layout)});
    weights_ = add({.name = "weights of rows", .width = 2, .rows = dispatched_rows});
    combine_uses = {reads(slots.choice, slots.prob), transit_.bit()};
    combine_backward_uses = {reads(source_, slots.prob), transit_.bit() | weights_.bit()};
    gate_uses = {reads(weights_), weights_.bit()};
    dispatch_backward_uses = {reads(slots.choice, weights_), transit_.bit() | slots.d_prob.bit()};
  }

  int64_t host_values() const override { return offsets_at_ + offsets_count_; }

  void dispatch(Run& r) const override {
    r.step(decide_once, "route", reads(slots_.choice, slots_.prob), writes(slots_.choice, source_, offsets),
           [&] { route(r); });
    r.step("dispatch", reads(slots_.x, source_), writes(slots_.rows, transit_), [&] {
      const Tensor sent = in_transit(r, activation_, sent_of(r));
      permute(r, r[slots_.x], sent);
      send(r, {{sent, r[slots_.rows]}});
    });
  }

  void combine(const Run& r, const Tensor& addend, const Tensor& out) const override {
    const int64_t copies = exchange_.shape().etp, n = sent_of(r);
    const Tensor returned = in_transit(r, activation_, copies * n);
    bring_back(r, {{r[slots_.y], returned}});
    for (int64_t t = 0; t < copies; ++t)
      ops::unpermute(r.exec(), {.x = returned.rows(t * n, n),
                                .row = second_half(r, slots_.choice),
                                .prob = r[slots_.prob],
                                .addend = t == 0 ? addend : out,
                                .out = out});
  }

  void combine_backward(const Run& r, const Tensor& d_out) const override {
    const int64_t n = sent_of(r);
    const Tensor sent = in_transit(r, gradient_, n), weights = weights_in_transit(r, n);
    permute(r, d_out, sent);
    const Tensor prob = r[slots_.prob];
    ops::permute(r.exec(), {.x = make_tensor(prob.data, DType::f32, {prob.numel(), 1}),
                            .source = flat(r[source_]).rows(0, n),
                            .top_k = 1,
                            .out = weights});
    send(r, {{sent, r[slots_.d_y]}, {weights, first_half(r, weights_)}});
  }

  Gate gate(const Run& r) const override {
    const int64_t n = received_of(r);
    return {first_half(r, weights_).rows(0, n), {}, second_half(r, weights_).rows(0, n)};
  }

  void dispatch_backward(const Run& r, const Tensor& addend, const Tensor& d_x) const override {
    const int64_t copies = exchange_.shape().etp, n = sent_of(r);
    const Tensor returned = in_transit(r, gradient_, copies * n), weights = weights_in_transit(r, copies * n);
    bring_back(r, {{r[slots_.d_rows], returned}, {second_half(r, weights_), weights}});
    const Tensor row = second_half(r, slots_.choice), d_prob = r[slots_.d_prob];
    const Tensor entries = make_tensor(row.data, DType::i32, {row.numel(), 1}),
                 d_entries = make_tensor(d_prob.data, DType::f32, {d_prob.numel(), 1});
    for (int64_t t = 0; t < copies; ++t) {
      ops::unpermute(r.exec(),
                     {.x = returned.rows(t * n, n), .row = row, .addend = t == 0 ? addend : d_x, .out = d_x});
      ops::unpermute(r.exec(), {.x = weights.rows(t * n, n),
                                .row = entries,
                                .addend = t == 0 ? Tensor{} : d_entries,
                                .out = d_entries});
    }
  }

  Tensor rows(const Run& r, Slot slot) const override { return r[slot].rows(0, received_of(r)); }

 private:
  struct Pair {
    Tensor in, out;
  };

  std::span<const int32_t> table(const Run& r) const {
    return std::span<const int32_t>(r.host_values()).first(static_cast<size_t>(offsets_at_));
  }
  // While kernels are collected nothing is routed: as if every expert got as many rows.
  int64_t sent_of(const Run& r) const { return r.exec().needed ? most(r).sent : exchange_.sent(table(r)); }
  int64_t received_of(const Run& r) const {
    if (!r.exec().needed) return exchange_.received(table(r));
    const ExpertRows rows = most(r);
    return std::min(rows.returned, rows.dispatched);
  }
  ExpertRows most(const Run& r) const {
    const int64_t tokens = r.batch().ids.dim(0), ranks = r.layout().sequence_parallel ? r.layout().tensor : 1;
    return expert_rows(spec_, r.layout(), tokens / ranks, r.generates());
  }

  void route(const Run& r) const;
  /// From this rank's tokens to the experts' rows, and back.
  void send(const Run& r, std::initializer_list<Pair> pairs) const;
  void bring_back(const Run& r, std::initializer_list<Pair> pairs) const;
  static std::vector<parallel::RowExchange::Rows> views(std::initializer_list<Pair> pairs);
  void permute(const Run& r, const Tensor& x, const Tensor& out) const {
    ops::permute(
        r.exec(),
        {.x = x, .source = flat(r[source_]).rows(0, out.dim(0)), .top_k = spec_.moe.rule.top_k, .out = out});
  }
  Tensor in_transit(const Run& r, DType dtype, int64_t n) const {
    return make_tensor(r[transit_].data, dtype, {n, spec_.hidden});
  }
  Tensor weights_in_transit(const Run& r, int64_t n) const {
    const Tensor t = r[transit_];
    return make_tensor(static_cast<std::byte*>(t.data) + t.dim(0) * row_bytes_, DType::f32, {n, 1});
  }

  const parallel::RowExchange exchange_;
  DType activation_, gradient_;
  int64_t row_bytes_;
  Slot source_;   ///< (sent, 1) i32
  Slot transit_;  ///< rows on their way, at this rank's tokens
  Slot weights_;  ///< (R, 2) f32: the router's weights of the rows, then their gradients
};

void AllToAllDispatch::route(const Run& r) const {
  const int64_t own = (spec_.moe.experts + 1) * r.layout().expert_group_rank();
  const Tensor own_offsets = values(r, offsets, own, spec_.moe.experts + 1);
  const ops::DispatchSort sorted = sort(r, own_offsets, flat(r[source_]));
  ops::dispatch_sort(r.exec(), sorted);
  comm::Communicator* const group = ranks(r);
  if (!group) return;
  const std::span<int32_t> host = r.host_values();
  const std::span<int32_t> every = host.first(static_cast<size_t>(offsets_at_)),
                           local = host.subspan(static_cast<size_t>(offsets_at_));
  if (sorted.pad) {
    exchange_.padded_table(sorted.capacity, every);
  } else {
    const Tensor all = values(r, offsets, 0, offsets_at_);
    group->all_gather_async(view_of(own_offsets), view_of(all), comm::StreamRef{r.exec().stream}).wait();
    ops::download(r.exec(), all, every.data());
  }
  exchange_.local_offsets(every, local);
  ops::upload(r.exec(), offsets_of(r), local.data());
}

void AllToAllDispatch::send(const Run& r, std::initializer_list<Pair> pairs) const {
  if (comm::Communicator* const group = ranks(r))
    exchange_.dispatch(*group, table(r), views(pairs), comm::StreamRef{r.exec().stream}).wait();
}

void AllToAllDispatch::bring_back(const Run& r, std::initializer_list<Pair> pairs) const {
  if (comm::Communicator* const group = ranks(r))
    exchange_.combine(*group, table(r), views(pairs), comm::StreamRef{r.exec().stream}).wait();
}

std::vector<parallel::RowExchange::Rows> AllToAllDispatch::views(std::initializer_list<Pair> pairs) {
  std::vector<parallel::RowExchange::Rows> out;
  for (const Pair& p : pairs) {
    NRL_CHECK(p.in.contiguous() && p.out.contiguous() && p.in.dim(1) == p.out.dim(1));
    out.push_back({view_of(p.in), view_of(p.out), p.in.dim(1)});
  }
  return out;
}

}  // namespace

std::unique_ptr<ExpertDispatch> alltoall_dispatch(const ModelSpec& spec, const ModelLayout& layout,
                                                  const precision::Recipe& recipe, const AddSlot& add,
                                                  const ExpertSlots& slots) {
  return std::make_unique<AllToAllDispatch>(spec, layout, recipe, add, slots);
}

}  // namespace nrl::model

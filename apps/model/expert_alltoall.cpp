// Rows that go to the ranks of their experts.
#include <algorithm>
#include <cmath>

#include "apps/model/expert_dispatch.h"
#include "core/ops/kernel_table.h"
#include "core/ops/transfer.h"

namespace nrl::model {
namespace {

/// A row in transit, and its weight.
constexpr int64_t weight_bytes = 16;

class AllToAllDispatch final : public ExpertDispatch {
 public:
  AllToAllDispatch(const ModelSpec& spec, const ModelLayout& layout, const precision::Recipe& recipe,
                   const AddSlot& add, const ExpertSlots& slots)
      : ExpertDispatch(spec, slots),
        exchange_(expert_shape(spec, layout), layout.expert_group_rank()),
        regroups_(exchange_.shape().local() > 1),
        most_rounds_(rounds_at_most(spec.moe, exchange_.shape())),
        activation_(recipe.activations()),
        gradient_(recipe.gradients()) {
    source_ = add({.name = "tokens of rows", .width = 1, .dtype = DType::i32, .rows = sent_rows});
    offsets_at_ = exchange_.table_size();
    offsets_count_ = exchange_.shape().local() + 1;
    round_values_ = offsets_count_ + (regroups_ ? 2 * exchange_.group_count() + 1 : 0);
    offsets = add({.name = "expert offsets",
                   .width = offsets_at_ + most_rounds_ * round_values_,
                   .dtype = DType::i32,
                   .rows = one_row});
    sent_ = add({.name = "rows to send",
                 .width = spec.hidden,
                 .dtype = activation_,
                 .rows = sent_rows,
                 .rules = dispatch_rules(layout)});
    returned_ =
        add({.name = "rows returned", .width = spec.hidden, .dtype = activation_, .rows = returned_rows});
    const int64_t d_row = (spec.hidden * size_of(gradient_) + weight_bytes - 1) / weight_bytes * weight_bytes;
    d_transit_ = add({.name = "gradients in transit",
                      .width = d_row + weight_bytes,
                      .dtype = DType::u8,
                      .rows = returned_rows});
    weights_ = add({.name = "weights of rows", .width = 2 + regroups_, .rows = dispatched_rows});
    if (regroups_) {
      const auto staged = [&](std::string_view name, DType dtype, std::string_view rules = "") {
        return add(
            {.name = name, .width = spec.hidden, .dtype = dtype, .rows = dispatched_rows, .rules = rules});
      };
      arrived_ = staged("rows arrived", activation_, dispatch_rules(layout));
      leaving_ = staged("rows to return", activation_);
      d_staged_ = staged("gradients by ranks", gradient_);
    }
    arrives_ = regroups_ ? arrived_ : slots.rows;
    d_arrives_ = regroups_ ? d_staged_ : slots.d_y;
    combine_uses = {reads(slots.choice, slots.prob, returned_, regroups_ ? leaving_ : slots.y)};
    combine_backward_uses = {reads(source_, slots.prob), d_transit_.bit()};
    gate_uses = {reads(weights_), weights_.bit()};
    dispatch_backward_uses = {reads(slots.choice, weights_, d_transit_, regroups_ ? d_staged_ : slots.d_rows),
                              slots.d_prob.bit()};
  }

  int64_t host_values() const override { return offsets_at_ + most_rounds_ * round_values_ + 1; }
  int rounds(const Run& r) const override {
    if (!r.executes()) return 1;
    if (!r.exec().needed) return r.host_values().back();
    const ExpertRows rows = most(r);
    return static_cast<int>((planned_load(r, rows) + rows.dispatched - 1) / rows.dispatched);
  }
  int most_rounds() const override { return most_rounds_; }
  Slot carried() const override { return returned_; }

  void route(Run& r) const override {
    r.step(decide_once, "route", reads(slots_.choice, slots_.prob), writes(slots_.choice, source_, offsets),
           [&] { send_counts(r); });
  }

  void start_dispatch(Run& r) const override {
    r.step("permute", reads(slots_.x, source_), writes(sent_),
           [&] { permute(r, r[slots_.x], r[sent_].rows(0, sent_of(r))); });
    r.step("dispatch", reads(sent_, offsets), writes(arrives_), [&] {
      start_send(r, arrives_, {{r[sent_].rows(0, sent_of(r)), rows(r, arrives_)}});
      // Rows that are not regrouped are recomputed by this step alone.
      if (!regroups_ && r.recomputes()) finish(r, arrives_);
    });
  }

  void finish_dispatch(Run& r) const override {
    r.step("dispatched", reads(sent_, offsets, arrives_), regroups_ ? writes(slots_.rows) : writes(), [&] {
      finish(r, arrives_);
      if (regroups_) by_experts(r, rows(r, arrives_), rows(r, slots_.rows));
    });
  }

  void give_back(Run& r) const override {
    r.step("return", reads(slots_.y, offsets), writes(returned_, leaving_), [&] {
      const Tensor y = rows(r, slots_.y), leaving = regroups_ ? rows(r, leaving_) : y;
      if (regroups_) by_ranks(r, y, leaving);
      start_return(r, returned_, {{leaving, r[returned_].rows(0, returned_of(r))}});
    });
  }

  void combine(const Run& r, const Tensor& addend, const Tensor& out) const override {
    finish(r, returned_);
    const int64_t n = sent_of(r);
    for (int64_t t = 0; t < exchange_.shape().etp; ++t)
      ops::unpermute(r.exec(), {.x = r[returned_].rows(t * n, n),
                                .row = second_half(r, slots_.choice),
                                .prob = r[slots_.prob],
                                .addend = t == 0 ? addend : out,
                                .out = out});
  }

  void combine_backward(const Run& r, const Tensor& d_out) const override {
    const int64_t n = sent_of(r);
    permute(r, d_out, d_rows_in_transit(r, n));
    const Tensor prob = r[slots_.prob];
    ops::permute(r.exec(), {.x = make_tensor(prob.data, DType::f32, {prob.numel(), 1}),
                            .source = flat(r[source_]).rows(0, n),
                            .top_k = 1,
                            .out = weights_in_transit(r, n)});
  }

  void start_dispatch_gradient(Run& r) const override {
    r.dgrad("dispatch", reads(d_transit_, offsets), writes(d_arrives_, weights_), [&] {
      const int64_t n = sent_of(r);
      start_send(r, d_arrives_,
                 {{d_rows_in_transit(r, n), rows(r, d_arrives_)},
                  {weights_in_transit(r, n), weights_of(r, regroups_ ? staged : router)}});
    });
  }

  void finish_dispatch_gradient(Run& r) const override {
    r.dgrad("dispatched", reads(d_transit_, offsets, d_arrives_, weights_),
            regroups_ ? writes(slots_.d_y, weights_) : writes(), [&] {
              finish(r, d_arrives_);
              if (!regroups_) return;
              by_experts(r, rows(r, d_arrives_), rows(r, slots_.d_y));
              by_experts(r, weights_of(r, staged), weights_of(r, router));
            });
  }

  void give_back_gradient(Run& r) const override {
    r.dgrad("return", reads(slots_.d_rows, weights_, offsets, d_transit_),
            writes(d_transit_, weights_, d_staged_), [&] {
              const int64_t n = returned_of(r);
              const Tensor d_rows = rows(r, slots_.d_rows), leaving = regroups_ ? rows(r, d_staged_) : d_rows;
              const Tensor weights = weights_of(r, gradients),
                           leaving_weights = weights_of(r, regroups_ ? staged : gradients);
              if (regroups_) {
                by_ranks(r, d_rows, leaving);
                by_ranks(r, weights, leaving_weights);
              }
              start_return(r, d_transit_,
                           {{leaving, d_rows_in_transit(r, n)}, {leaving_weights, weights_in_transit(r, n)}});
            });
  }

  Gate gate(const Run& r) const override { return {weights_of(r, router), {}, weights_of(r, gradients)}; }

  void dispatch_backward(const Run& r, const Tensor& addend, const Tensor& d_x) const override {
    finish(r, d_transit_);
    const int64_t copies = exchange_.shape().etp, n = sent_of(r);
    const Tensor returned = d_rows_in_transit(r, copies * n), weights = weights_in_transit(r, copies * n);
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
  /// The columns of weights_.
  enum Weights : int64_t { router, gradients, staged };

  static int rounds_at_most(const MoeSpec& m, const parallel::ExpertShape& shape) {
    if (m.row_slack == 0 || (m.capacity_factor > 0 && m.pad_to_capacity)) return 1;
    const auto k = static_cast<double>(m.rule.top_k),
               choices = std::min(k, static_cast<double>(shape.local()));
    return static_cast<int>(std::ceil(shape.ep * choices / (m.row_slack * k)));
  }

  std::span<const int32_t> table(const Run& r) const {
    return std::span<const int32_t>(r.host_values()).first(static_cast<size_t>(offsets_at_));
  }
  // While kernels are collected nothing is routed: every rank gets as many rows, or expert_load times as
  // many.
  int64_t sent_of(const Run& r) const { return r.exec().needed ? most(r).sent : exchange_.sent(table(r)); }
  int64_t returned_of(const Run& r) const { return exchange_.shape().etp * sent_of(r); }
  static int64_t planned_load(const Run& r, const ExpertRows& rows) {
    const double load = r.context().expert_load * static_cast<double>(rows.returned);
    return std::clamp<int64_t>(std::llround(load), 1, rows.most);
  }
  int64_t received_of(const Run& r) const {
    if (!r.exec().needed) return exchange_.received(table(r), range(r));
    const ExpertRows rows = most(r);
    return std::min(rows.dispatched, planned_load(r, rows) - r.round() * rows.dispatched);
  }
  /// The rows of the round.
  parallel::RowRange range(const Run& r) const {
    if (rounds(r) == 1) return {};
    const int64_t n = most(r).dispatched;
    return {r.round() * n, n};
  }
  ExpertRows most(const Run& r) const {
    const int64_t tokens = r.batch().ids.dim(0), ranks = r.layout().sequence_parallel ? r.layout().tensor : 1;
    return expert_rows(spec_, r.layout(), tokens / ranks, r.generates());
  }

  void send_counts(const Run& r) const;
  /// From this rank's tokens to the experts' rows, into `slot`; until finish().
  void start_send(const Run& r, Slot slot, std::initializer_list<Pair> pairs) const {
    if (comm::Communicator* const group = ranks(r))
      r.in_flight().add(slot, {exchange_.dispatch(*group, table(r), views(pairs), range(r),
                                                  comm::StreamRef{r.exec().stream})});
  }
  /// Back, into `slot`. The last round's are on their way until finish().
  void start_return(const Run& r, Slot slot, std::initializer_list<Pair> pairs) const {
    comm::Communicator* const group = ranks(r);
    if (!group) return;
    comm::Handle handle =
        exchange_.combine(*group, table(r), views(pairs), range(r), comm::StreamRef{r.exec().stream});
    if (!r.last_round()) return handle.wait();
    r.in_flight().add(slot, {std::move(handle)});
  }
  static void finish(const Run& r, Slot slot) {
    for (comm::Handle& handle : r.in_flight().take(slot)) handle.wait();
  }
  /// Rows as they arrive, and as the GEMMs of experts read them.
  void by_experts(const Run& r, const Tensor& arrived, const Tensor& rows) const {
    regroup(r, arrived, rows, false);
  }
  void by_ranks(const Run& r, const Tensor& rows, const Tensor& leaving) const {
    regroup(r, rows, leaving, true);
  }
  void regroup(const Run& r, const Tensor& x, const Tensor& out, bool placed_in) const {
    const int64_t at = offsets_at_ + r.round() * round_values_ + offsets_count_, n = exchange_.group_count();
    ops::regroup_rows(r.exec(), {.x = x,
                                 .begin = values(r, offsets, at, n + 1),
                                 .place = values(r, offsets, at + n + 1, n),
                                 .placed_in = placed_in,
                                 .out = out});
  }
  static std::vector<parallel::RowExchange::Rows> views(std::initializer_list<Pair> pairs);
  void permute(const Run& r, const Tensor& x, const Tensor& out) const {
    ops::permute(
        r.exec(),
        {.x = x, .source = flat(r[source_]).rows(0, out.dim(0)), .top_k = spec_.moe.rule.top_k, .out = out});
  }
  Tensor weights_of(const Run& r, Weights which) const {
    const Tensor t = r[weights_];
    return make_tensor(t.ptr<float>() + which * t.dim(0), DType::f32, {received_of(r), 1}, t.device);
  }
  Tensor d_rows_in_transit(const Run& r, int64_t n) const {
    return make_tensor(r[d_transit_].data, gradient_, {n, spec_.hidden});
  }
  /// Behind the rows.
  Tensor weights_in_transit(const Run& r, int64_t n) const {
    const Tensor t = r[d_transit_];
    return make_tensor(static_cast<std::byte*>(t.data) + t.dim(0) * (t.dim(1) - weight_bytes), DType::f32,
                       {n, 1});
  }

  const parallel::RowExchange exchange_;
  const bool regroups_;  ///< rows do not arrive by experts
  const int most_rounds_;
  DType activation_, gradient_;
  Slot source_;    ///< (sent, 1) i32
  Slot sent_;      ///< (sent, H): rows by experts, of this rank's tokens
  Slot arrived_;   ///< (R, H): the same at the experts, by ranks; as the next two unset if that is by experts
  Slot leaving_;   ///< (R, H): y by ranks
  Slot d_staged_;  ///< (R, H): gradients that arrive and leave
  Slot arrives_, d_arrives_;  ///< where rows and their gradients arrive: the staging slots, or rows and d_y
  Slot returned_;             ///< (T sent, H)
  Slot d_transit_;  ///< (T sent) gradients of rows and weights, sent and then returned in the same place
  Slot weights_;  ///< (2 or 3, R) f32: the router's weights of the rows, their gradients, and either by ranks
};

void AllToAllDispatch::send_counts(const Run& r) const {
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
  const int64_t rows = most(r).dispatched;
  const auto n = static_cast<int32_t>((exchange_.most_received(every) + rows - 1) / rows);
  NRL_CHECK(n <= most_rounds_, "{} rounds, at most {}", n, most_rounds_);
  host.back() = std::max(n, 1);
  if (int* const most = r.context().expert_rounds) *most = std::max(*most, host.back());
  const auto count = static_cast<size_t>(offsets_count_),
             groups = static_cast<size_t>(exchange_.group_count());
  for (int64_t i = 0; i < host.back(); ++i) {
    const std::span<int32_t> round = local.subspan(static_cast<size_t>(i * round_values_));
    const parallel::RowRange range =
        host.back() == 1 ? parallel::RowRange{} : parallel::RowRange{i * rows, rows};
    exchange_.local_offsets(every, round.first(count), range);
    if (regroups_)
      exchange_.groups(every, round.subspan(count, groups + 1), round.subspan(count + groups + 1, groups),
                       range);
  }
  ops::upload(r.exec(), values(r, offsets, offsets_at_, host.back() * round_values_), local.data());
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

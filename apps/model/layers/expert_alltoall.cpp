// Rows that go to the ranks of their experts.
#include <algorithm>
#include <cmath>
#include <optional>

#include "apps/model/layers/expert_dispatch.h"
#include "apps/model/linear/quantized_value.h"
#include "core/ops/kernel_table.h"
#include "core/ops/transfer.h"
#include "parallel/comm/ledger.h"

namespace nrl::model {
namespace {

constexpr int64_t transit_alignment = 16;  ///< bytes

int64_t aligned(int64_t bytes) {
  return (bytes + transit_alignment - 1) / transit_alignment * transit_alignment;
}

class AllToAllDispatch final : public ExpertDispatch {
 public:
  AllToAllDispatch(const LayerBuilder& b, const ExpertSlots& slots)
      : ExpertDispatch(b.spec, slots),
        exchange_(expert_shape(b.spec, b.layout), b.layout.expert_group_rank()),
        parts_(exchange_.shape().etp),
        regroups_(exchange_.shape().local() > 1 || parts_ > 1),
        most_rounds_(rounds_at_most(b.spec.moe, exchange_.shape())),
        purpose_(b.spec.moe.capacity_factor > 0 && b.spec.moe.pad_to_capacity ? comm::Purpose::layers
                                                                              : comm::Purpose::experts),
        activation_(b.recipe.activations()),
        gradient_(b.recipe.gradients()) {
    if (most_rounds_ > 1) scale_ranks_ = ranks_of_rounds(b);
    const int64_t hidden = b.spec.hidden;
    source_ = b.add({.name = "tokens of rows", .width = 1, .dtype = DType::i32, .rows = sent_rows});
    offsets_at_ = exchange_.table_size();
    offsets_count_ = exchange_.shape().local() + 1;
    round_values_ = offsets_count_ + (regroups_ ? 2 * exchange_.group_count() + 1 : 0);
    offsets = b.add({.name = "expert offsets",
                     .width = offsets_at_ + most_rounds_ * round_values_,
                     .dtype = DType::i32,
                     .rows = one_row});
    sent_ = b.add({.name = "rows to send",
                   .width = hidden,
                   .dtype = activation_,
                   .rows = sent_rows,
                   .rules = dispatch_rules(b.layout)});
    returned_ = b.add({.name = "rows returned", .width = hidden, .dtype = activation_, .rows = sent_rows});
    d_row_bytes_ = aligned(hidden * size_of(gradient_));
    d_transit_ = b.add({.name = "gradients in transit",
                        .width = d_row_bytes_ + aligned(parts_ * size_of(DType::f32)),
                        .dtype = DType::u8,
                        .rows = sent_rows});
    weights_ = b.add({.name = "weights of rows", .width = 2 + regroups_, .rows = dispatched_rows});
    if (regroups_) {
      const auto staged = [&](std::string_view name, DType dtype, std::string_view rules = "") {
        return b.add(
            {.name = name, .width = hidden, .dtype = dtype, .rows = dispatched_rows, .rules = rules});
      };
      arrived_ = staged("rows arrived", activation_, dispatch_rules(b.layout));
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
  int rounds(const Run& r) const override { return r.executes() ? r.host_values().back() : 1; }
  int most_rounds() const override { return most_rounds_; }
  Slot carried() const override { return returned_; }

  void route(Run& r) const override {
    r.step(decide_once, "route", reads(slots_.choice, slots_.prob), writes(slots_.choice, source_, offsets),
           [&] { send_counts(r); });
  }

  void start_dispatch(Run& r) const override {
    r.step("permute", reads(slots_.x, source_), writes(sent_),
           [&] { permute_parts(r, r[slots_.x], r[sent_].rows(0, sent_of(r))); });
    r.step("dispatch", reads(sent_, offsets), writes(arrives_), [&] {
      start_send(r, arrives_, {r[sent_].rows(0, sent_of(r)), rows(r, arrives_)});
      // Rows that are not regrouped are recomputed by this step alone.
      if (!regroups_ && r.recomputes()) finish(r, arrives_);
    });
  }

  void finish_dispatch(Run& r) const override {
    r.step("dispatched", reads(sent_, offsets, arrives_), regroups_ ? writes(slots_.rows) : writes(), [&] {
      finish(r, arrives_);
      if (regroups_) by_experts(r, rows(r, arrives_), rows(r, slots_.rows), parts_);
    });
  }

  void give_back(Run& r) const override {
    r.step("return", reads(slots_.y, offsets), writes(returned_, leaving_), [&] {
      const Tensor y = rows(r, slots_.y), leaving = regroups_ ? rows(r, leaving_) : y;
      if (regroups_) by_ranks(r, y, leaving, parts_);
      start_return(r, returned_, {leaving, r[returned_].rows(0, sent_of(r))});
    });
  }

  void combine(const Run& r, const Tensor& addend, const Tensor& out) const override {
    finish(r, returned_);
    const Tensor returned = r[returned_].rows(0, sent_of(r));
    for (int part = 0; part < parts_; ++part)
      ops::unpermute(r.exec(), {.x = block(returned, part),
                                .row = second_half(r, slots_.choice),
                                .prob = r[slots_.prob],
                                .addend = columns(addend, part),
                                .out = columns(out, part)});
  }

  void combine_backward(const Run& r, const Tensor& d_out) const override {
    const int64_t n = sent_of(r);
    permute_parts(r, d_out, d_rows_in_transit(r, n));
    const Tensor prob = r[slots_.prob];
    ops::permute(r.exec(), {.x = make_tensor(prob.data, DType::f32, {prob.numel(), 1}),
                            .source = flat(r[source_]).rows(0, n),
                            .top_k = 1,
                            .out = weights_in_transit(r, n)});
  }

  void start_dispatch_gradient(Run& r) const override {
    r.dgrad("dispatch", reads(d_transit_, offsets), writes(d_arrives_, weights_), [&] {
      const int64_t n = sent_of(r);
      start_send(r, d_arrives_, {d_rows_in_transit(r, n), rows(r, d_arrives_)},
                 {weights_in_transit(r, n), weights_of(r, regroups_ ? staged : router)});
    });
  }

  void finish_dispatch_gradient(Run& r) const override {
    r.dgrad("dispatched", reads(d_transit_, offsets, d_arrives_, weights_),
            regroups_ ? writes(slots_.d_y, weights_) : writes(), [&] {
              finish(r, d_arrives_);
              if (!regroups_) return;
              by_experts(r, rows(r, d_arrives_), rows(r, slots_.d_y), parts_);
              by_experts(r, weights_of(r, staged), weights_of(r, router), 1);
            });
  }

  void give_back_gradient(Run& r) const override {
    r.dgrad("return", reads(slots_.d_rows, weights_, offsets, d_transit_),
            writes(d_transit_, weights_, d_staged_), [&] {
              const int64_t n = sent_of(r);
              const Tensor d_rows = rows(r, slots_.d_rows), leaving = regroups_ ? rows(r, d_staged_) : d_rows;
              const Tensor weights = weights_of(r, gradients),
                           leaving_weights = weights_of(r, regroups_ ? staged : gradients);
              if (regroups_) {
                by_ranks(r, d_rows, leaving, parts_);
                by_ranks(r, weights, leaving_weights, 1);
              }
              start_return(r, d_transit_, {leaving, d_rows_in_transit(r, n)},
                           {leaving_weights, weights_in_transit(r, parts_ * n)});
            });
  }

  Gate gate(const Run& r) const override { return {weights_of(r, router), {}, weights_of(r, gradients)}; }

  void dispatch_backward(const Run& r, const Tensor& addend, const Tensor& d_x) const override {
    finish(r, d_transit_);
    const int64_t n = sent_of(r);
    const Tensor returned = d_rows_in_transit(r, n), weights = weights_in_transit(r, parts_ * n);
    const Tensor row = second_half(r, slots_.choice), d_prob = r[slots_.d_prob];
    const Tensor entries = make_tensor(row.data, DType::i32, {row.numel(), 1}),
                 d_entries = make_tensor(d_prob.data, DType::f32, {d_prob.numel(), 1});
    for (int part = 0; part < parts_; ++part) {
      ops::unpermute(r.exec(), {.x = block(returned, part),
                                .row = row,
                                .addend = columns(addend, part),
                                .out = columns(d_x, part)});
      ops::unpermute(r.exec(), {.x = weights.rows(part * n, n),
                                .row = entries,
                                .addend = part == 0 ? Tensor{} : d_entries,
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
  int64_t sent_of(const Run& r) const { return exchange_.sent(table(r)); }
  int64_t received_of(const Run& r) const { return exchange_.received(table(r), range(r)); }
  /// The rows of the round.
  parallel::RowRange range(const Run& r) const {
    if (rounds(r) == 1) return {};
    const int64_t n = most(r).dispatched;
    return {r.round() * n, n};
  }
  ExpertRows most(const Run& r) const {
    return expert_rows(spec_, r.layout(), r.layout().own_tokens(r.batch().ids.dim(0)), r.generates());
  }

  void send_counts(const Run& r) const;
  /// In a dry run nothing is routed: every rank gets as many rows, or this one expert_load times as many.
  void plan_counts(const Run& r, const ops::DispatchSort& sorted, std::span<int32_t> table) const;
  // Rows are communicated in T blocks (rows, H / T) of their columns, one after the other in memory.
  int64_t part_width() const { return spec_.hidden / parts_; }
  /// Part of the columns of (n, H); empty of an empty tensor.
  Tensor columns(const Tensor& t, int part) const {
    return t ? t.columns(part * part_width(), part_width()) : t;
  }
  /// A block in the memory of (n, H).
  Tensor block(const Tensor& t, int part) const {
    const int64_t n = t.dim(0);
    return make_tensor(static_cast<std::byte*>(t.data) + part * n * part_width() * size_of(t.dtype), t.dtype,
                       {n, part_width()}, t.device);
  }
  int own_part(const Run& r) const { return r.layout().expert_tensor_rank; }

  /// From this rank's tokens to the experts' rows, into `slot`; until finish(). The T ranks of an expert
  /// gather `rows` from the blocks that each of them gets.
  void start_send(const Run& r, Slot slot, const Pair& rows, const Pair& weights = {}) const {
    const comm::PurposeScope purpose(purpose_);
    const comm::StreamRef stream{r.exec().stream};
    const Tensor own = block(rows.out, own_part(r));
    std::vector<comm::Handle> handles{
        exchange_.dispatch(ranks(r), table(r), views({rows.in, own}, weights), range(r), stream)};
    if (parts_ > 1)
      handles.push_back(ranks(r, expert_parts_group)
                            .all_gather_async(view_of(own), view_of(rows.out), {stream, handles.front()}));
    r.in_flight().add(slot, std::move(handles));
  }
  /// Back, into `slot`, in blocks of the sums over the T ranks. The last round's are on their way until
  /// finish().
  void start_return(const Run& r, Slot slot, const Pair& rows, const Pair& weights = {}) const {
    const comm::PurposeScope purpose(purpose_);
    const comm::StreamRef stream{r.exec().stream};
    const Tensor own = block(rows.in, own_part(r));
    std::vector<comm::Handle> handles;
    if (parts_ > 1)
      handles.push_back(ranks(r, expert_parts_group)
                            .reduce_scatter_async(view_of(rows.in), view_of(own), comm::Reduce::sum, stream));
    const comm::After after = parts_ > 1 ? comm::After{stream, handles.front()} : comm::After{stream};
    handles.push_back(
        exchange_.combine(ranks(r), table(r), views({own, rows.out}, weights), range(r), after));
    r.in_flight().add(slot, std::move(handles));
    if (!r.last_round()) finish(r, slot);
  }
  static void finish(const Run& r, Slot slot) {
    for (comm::Handle& handle : r.in_flight().take(slot)) handle.wait();
  }
  // Rows as they arrive, in blocks if their columns are in `parts`, and as the GEMMs of experts read them.
  void by_experts(const Run& r, const Tensor& arrived, const Tensor& rows, int parts) const {
    for (int part = 0; part < parts; ++part)
      regroup(r, parts > 1 ? block(arrived, part) : arrived, parts > 1 ? columns(rows, part) : rows, false);
  }
  void by_ranks(const Run& r, const Tensor& rows, const Tensor& leaving, int parts) const {
    for (int part = 0; part < parts; ++part)
      regroup(r, parts > 1 ? columns(rows, part) : rows, parts > 1 ? block(leaving, part) : leaving, true);
  }
  void regroup(const Run& r, const Tensor& x, const Tensor& out, bool placed_in) const {
    const int64_t at = offsets_at_ + r.round() * round_values_ + offsets_count_, n = exchange_.group_count();
    ops::regroup_rows(r.exec(), {.x = x,
                                 .begin = values(r, offsets, at, n + 1),
                                 .place = values(r, offsets, at + n + 1, n),
                                 .placed_in = placed_in,
                                 .out = out});
  }
  static std::vector<parallel::RowExchange::Rows> views(const Pair& rows, const Pair& weights);
  /// Rows of tokens in the order in which they are sent, in blocks.
  void permute_parts(const Run& r, const Tensor& x, const Tensor& out) const {
    for (int part = 0; part < parts_; ++part) permute(r, columns(x, part), block(out, part));
  }
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
    return make_tensor(static_cast<std::byte*>(t.data) + t.dim(0) * d_row_bytes_, DType::f32, {n, 1});
  }

  const parallel::RowExchange exchange_;
  const int parts_;      ///< T: of the matrices of an expert
  const bool regroups_;  ///< rows do not arrive by experts, or in blocks
  const int most_rounds_;
  /// ranks_of_rounds(), where there may be several rounds.
  std::optional<parallel::GroupId> scale_ranks_;
  const comm::Purpose purpose_;  ///< of rows: `experts` if their number depends on the router
  DType activation_, gradient_;
  int64_t d_row_bytes_;
  Slot source_;    ///< (sent, 1) i32
  Slot sent_;      ///< (sent, H): rows by experts, of this rank's tokens
  Slot arrived_;   ///< (R, H): the same at the experts, by ranks; as the next two unset if that is by experts
  Slot leaving_;   ///< (R, H): y by ranks
  Slot d_staged_;  ///< (R, H): gradients that arrive and leave
  Slot arrives_, d_arrives_;  ///< where rows and their gradients arrive: the staging slots, or rows and d_y
  Slot returned_;             ///< (sent, H)
  /// (sent) gradients of rows and weights, sent and then returned in the same place; T weights return.
  Slot d_transit_;
  Slot weights_;  ///< (2 or 3, R) f32: the router's weights of the rows, their gradients, and either by ranks
};

void AllToAllDispatch::send_counts(const Run& r) const {
  const int64_t own = (spec_.moe.experts + 1) * r.layout().expert_group_rank();
  const Tensor own_offsets = values(r, offsets, own, spec_.moe.experts + 1);
  const ops::DispatchSort sorted = sort(r, own_offsets, flat(r[source_]));
  ops::dispatch_sort(r.exec(), sorted);
  const std::span<int32_t> host = r.host_values();
  const std::span<int32_t> every = host.first(static_cast<size_t>(offsets_at_)),
                           local = host.subspan(static_cast<size_t>(offsets_at_));
  if (sorted.pad) {
    exchange_.padded_table(sorted.capacity, every);
  } else {
    const Tensor all = values(r, offsets, 0, offsets_at_);
    ranks(r).all_gather_async(view_of(own_offsets), view_of(all), comm::StreamRef{r.exec().stream}).wait();
    if (r.exec().needed)
      plan_counts(r, sorted, every);
    else
      ops::download(r.exec(), all, every.data());
  }
  const int64_t rows = most(r).dispatched;
  const auto n = static_cast<int32_t>((exchange_.most_received(every) + rows - 1) / rows);
  NRL_CHECK(n <= most_rounds_, "{} rounds, at most {}", n, most_rounds_);
  host.back() = std::max(n, 1);
  if (scale_ranks_) {
    const Tensor agreed = values(r, offsets, offsets_at_, 1);
    ops::upload(r.exec(), agreed, &host.back());
    r.all_reduce(agreed, *scale_ranks_, comm::Reduce::max);
    if (!r.exec().needed) ops::download(r.exec(), agreed, &host.back());
  }
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

void AllToAllDispatch::plan_counts(const Run& r, const ops::DispatchSort& sorted,
                                   std::span<int32_t> table) const {
  const ExpertRows rows = most(r);
  const int64_t sent =
      sorted.capacity > 0 ? std::min(rows.sent, spec_.moe.experts * sorted.capacity) : rows.sent;
  const double load = r.context().expert_load * static_cast<double>(sent * parts_);
  exchange_.planned_table(sent, std::clamp<int64_t>(std::llround(load), 1, rows.most), table);
}

std::vector<parallel::RowExchange::Rows> AllToAllDispatch::views(const Pair& rows, const Pair& weights) {
  std::vector<parallel::RowExchange::Rows> out{
      {view_of(rows.in), view_of(rows.out), std::min(rows.in.dim(1), rows.out.dim(1)), true}};
  if (weights.in) out.push_back({view_of(weights.in), view_of(weights.out), 1});
  return out;
}

}  // namespace

std::unique_ptr<ExpertDispatch> alltoall_dispatch(const LayerBuilder& b, const ExpertSlots& slots) {
  return std::make_unique<AllToAllDispatch>(b, slots);
}

}  // namespace nrl::model

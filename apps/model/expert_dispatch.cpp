#include "apps/model/expert_dispatch.h"

#include <algorithm>
#include <cmath>

#include "core/ops/kernel_table.h"

namespace nrl::model {

int64_t ExpertRows::of(RowDomain domain) const {
  switch (domain) {
    case sent_rows:
      return sent;
    case dispatched_rows:
      return dispatched;
    case expert_group_rows:
      return group;
    case dispatched_rows_by_16:
      return grouped_rows(dispatched, experts, 16);
    case dispatched_rows_by_128:
      return grouped_rows(dispatched, experts, 128);
    default:
      NRL_CHECK(false, "row domain {} is not of experts", static_cast<int>(domain));
  }
}

bool exchanges_tokens(const ModelLayout& layout) {
  return layout.expert_ranks() > 1;
}

std::string_view dispatch_rules(const ModelLayout& layout) {
  return exchanges_tokens(layout) ? "moe" : "norm moe";
}

ExpertRows expert_rows(const ModelSpec& spec, const ModelLayout& layout, int64_t tokens, bool generation) {
  const MoeSpec& m = spec.moe;
  if (m.experts == 0) return {};
  ExpertRows rows{.sent = m.rows(tokens, generation)};
  rows.dispatched = rows.most = rows.sent;
  rows.experts = expert_shape(spec, layout).local();
  if (!exchanges_tokens(layout)) return rows;
  const int64_t capacity = m.capacity(tokens, generation);
  const bool pad = capacity > 0 && m.pad_to_capacity;
  rows.most = most_received(expert_shape(spec, layout), tokens, m.rule.top_k, {.rows = capacity, .pad = pad});
  rows.balanced = rows.sent * layout.expert_tensor;
  rows.group = tokens * layout.expert_ranks();
  const double slack = generation || pad || m.dispatcher == TokenDispatcher::allgather ? 0 : m.row_slack;
  const auto balanced = static_cast<double>(rows.balanced);
  rows.dispatched =
      slack > 0 ? std::min(rows.most, static_cast<int64_t>(std::ceil(slack * balanced))) : rows.most;
  return rows;
}

std::array<int64_t, row_domains> domain_rows(const ModelSpec& spec, const ModelLayout& layout, int64_t tokens,
                                             int64_t own, int64_t head_chunk, bool generation) {
  std::array<int64_t, row_domains> rows{};
  rows[token_rows] = tokens;
  rows[sequence_rows] = own;
  rows[head_chunk_rows] = head_chunk;
  const ExpertRows experts = expert_rows(spec, layout, own, generation);
  for (const RowDomain d :
       {sent_rows, dispatched_rows, expert_group_rows, dispatched_rows_by_16, dispatched_rows_by_128})
    rows[d] = experts.of(d);
  rows[one_row] = 1;
  return rows;
}

Tensor ExpertDispatch::values(const Run& r, Slot slot, int64_t begin, int64_t count) {
  return make_tensor(r[slot].ptr<int32_t>() + begin, DType::i32, {count});
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
  LocalDispatch(const ModelSpec& spec, const AddSlot& add, const ExpertSlots& slots)
      : ExpertDispatch(spec, slots) {
    source_ = add({.name = "tokens of rows", .width = 1, .dtype = DType::i32, .rows = dispatched_rows});
    offsets_count_ = spec.moe.experts + 1;
    offsets = add({.name = "expert offsets", .width = offsets_count_, .dtype = DType::i32, .rows = one_row});
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

std::unique_ptr<ExpertDispatch> expert_dispatch(const ModelSpec& spec, const ModelLayout& layout,
                                                const precision::Recipe& recipe, const AddSlot& add,
                                                const ExpertSlots& slots) {
  if (!exchanges_tokens(layout)) return std::make_unique<LocalDispatch>(spec, add, slots);
  return spec.moe.dispatcher == TokenDispatcher::allgather
             ? allgather_dispatch(spec, layout, recipe, add, slots)
             : alltoall_dispatch(spec, layout, recipe, add, slots);
}

}  // namespace nrl::model

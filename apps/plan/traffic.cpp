#include "apps/plan/traffic.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <numeric>

#include "apps/model/context_parallel.h"
#include "apps/model/expert_dispatch.h"
#include "apps/model/moe.h"
#include "apps/model/projection.h"
#include "apps/model/tensor_parallel.h"
#include "core/base/error.h"
#include "core/ops/step.h"
#include "parallel/grid/groups.h"

namespace nrl::plan {
namespace {

/// How often each bucket of a group is summed and gathered in a step, and in how many operations.
struct ReductionVisits {
  std::vector<int64_t> sums, gathers;
  int64_t sum_calls = 0, gather_calls = 0;
};

ReductionVisits visits_of(const RunPlan& plan, int group) {
  const ParamGroup& g = plan.groups[static_cast<size_t>(group)];
  const size_t buckets = g.layout.buckets().size();
  ReductionVisits out{std::vector<int64_t>(buckets, g.gradients_sharded ? 0 : 1),
                      std::vector<int64_t>(buckets)};
  std::vector<bool> gathered(buckets);
  for (const LayerTraffic& visit : plan.traffic.training) {
    for (const auto* list : {&visit.gather, &visit.prefetch}) {
      bool starts = false;
      for (const BucketRef& ref : *list) {
        const auto b = static_cast<size_t>(ref.bucket);
        if (ref.group != group || gathered[b]) continue;
        starts = gathered[b] = true;
        ++out.gathers[b];
      }
      out.gather_calls += starts ? 1 : 0;
    }
    bool reduces = false;
    for (const BucketRef& ref : visit.reduce) {
      if (ref.group != group) continue;
      reduces = true;
      ++out.sums[static_cast<size_t>(ref.bucket)];
    }
    out.sum_calls += reduces ? 1 : 0;
    for (const BucketRef& ref : visit.release)
      if (ref.group == group) gathered[static_cast<size_t>(ref.bucket)] = false;
  }
  // Others are issued bucket by bucket.
  const bool together = g.gradients_sharded && g.reduce_options(true).staging_elements(g.layout) == 0;
  if (!together) out.sum_calls = std::accumulate(out.sums.begin(), out.sums.end(), int64_t{0});
  return out;
}

using comm::Op;
using Add =
    std::function<void(const parallel::GroupId& id, Op op, int64_t count, int64_t bytes, bool balanced)>;

/// What this rank's routers communicate: the counts of their experts (apps/model/moe.cpp), for a loss in each
/// layer and microbatch, else once (Decoder::add_expert_load()).
void add_routers(const RunPlan& plan, const Add& add) {
  const model::ModelLayout& layout = plan.layout;
  const model::MoeSpec& moe = plan.spec.moe;
  const int64_t layers = held_expert_layers(plan.spec, layout, plan.spec.layers);
  if (layers == 0) return;
  const int64_t segments = moe.aux_tokens == model::AuxLoss::sequence ? plan.batch.micro : 1,
                counted = layers * plan.batch.accumulation, bytes = counted * segments * moe.experts * 4;
  const parallel::GroupId batch = model::batch_ranks(layout.tensor);
  const int64_t calls = moe.has_aux_loss() ? counted : 1;
  if (moe.has_aux_loss() && moe.aux_tokens == model::AuxLoss::global)
    add(batch, Op::all_reduce, calls, bytes, false);
  else if (layout.tensor * layout.context > 1)
    add(model::microbatch_ranks(layout.tensor, layout.context), Op::all_reduce, calls, bytes, false);
  if (moe.expert_bias) add(batch, Op::all_reduce, 1, plan.spec.layers * moe.experts * 4, false);
}

/// The attention of a block among context-parallel ranks.
parallel::ContextAttention attention_of(const RunPlan& plan, int block) {
  const model::ModelLayout& layout = plan.layout;
  const model::ModelSpec part = model::tensor_part(plan.spec, layout);
  return parallel::ContextAttention(
      {.exchange = layout.exchanges[static_cast<size_t>(block)],
       .zigzag = {plan.batch.micro, plan.sequence_length, layout.context, layout.context_rank},
       .heads = part.heads,
       .kv_heads = part.kv_heads,
       .d = part.head_dim,
       .dtype = plan.recipe.activations(),
       .window = part.window});
}

bool is_padded(const model::MoeSpec& m, int64_t tokens) {
  return m.capacity(tokens, false) > 0 && m.pad_to_capacity;
}

/// The rows that the router sends for this many tokens, at most.
int64_t rows_sent(const model::MoeSpec& m, int64_t tokens) {
  const int64_t capacity = m.capacity(tokens, false);
  return capacity > 0 ? std::min(m.rows(tokens, false), m.experts * capacity) : tokens * m.rule.top_k;
}

/// What the attention of this rank's layers communicates among context-parallel ranks.
void add_attention(const RunPlan& plan, const Add& add) {
  const model::ModelLayout& layout = plan.layout;
  if (layout.context == 1) return;
  for (int l = 0; l < static_cast<int>(plan.spec.layers); ++l) {
    if (!model::holds_block(layout, plan.spec.layers, l)) continue;
    for (const parallel::ContextTransfer& t : attention_of(plan, l).transfers())
      add(model::context_group(layout.exchanges[static_cast<size_t>(l)], t.ranks), t.op,
          t.count * plan.batch.accumulation, t.bytes * plan.batch.accumulation, false);
  }
}

/// What the layers of this rank communicate among tensor-parallel ranks (apps/model/tensor_parallel.h).
void add_layers(const RunPlan& plan, const Add& add_one) {
  const model::ModelLayout& layout = plan.layout;
  if (layout.tensor == 1) return;
  using precision::Gemm, precision::Role;
  const model::DecoderOptions& options = plan.decoder->options();
  const precision::Recipe& recipe = plan.recipe;
  const int64_t tokens = options.tokens, microbatches = plan.batch.accumulation;
  const bool sequence = layout.sequence_parallel;
  const auto add = [&](Op op, int64_t count, int64_t bytes) {
    add_one(parallel::group::tp, op, count * microbatches, bytes * microbatches, false);
  };
  const auto add_calls = [&](const model::CommCalls& c) { add(c.op, c.count, c.bytes); };
  const auto bytes = [&](DType dtype) { return tokens * plan.spec.hidden * size_of(dtype); };
  const DType activations = recipe.activations(), gradients = recipe.gradients();
  const model::CommOverlap alone;  // embedding and head do not overlap
  // Of matrices that read `input`.
  const auto column_input = [&](const model::CommOverlap& overlap, DType input) {
    if (sequence) add_calls(calls_of_gather(layout, overlap, tokens, bytes(input)));
    add_calls(calls_of_sum(layout, alone, tokens, bytes(gradients)));
  };
  const auto row_output = [&](const model::CommOverlap& overlap, DType d_out) {
    add_calls(calls_of_sum(layout, overlap, tokens, bytes(activations)));
    if (sequence) add_calls(calls_of_gather(layout, overlap, tokens, bytes(d_out)));
  };
  if (layout.first_stage()) row_output(alone, gradients);
  for (int l = 0; l < static_cast<int>(plan.spec.layers); ++l) {
    if (!model::holds_block(layout, plan.spec.layers, l)) continue;
    // Gathered as FP8 codes or as they are.
    const auto type = [&](Gemm gemm, DType values) {
      return model::gathers_fp8(plan.spec, layout, recipe, l, gemm) ? DType::u8 : values;
    };
    column_input(layout.overlap, type(Gemm::qkv, activations));
    row_output(layout.overlap, type(Gemm::o_proj, gradients));
    const bool experts = plan.spec.has_experts(l);
    if (experts && plan.spec.moe.shared_ffn == 0) continue;
    const model::CommOverlap& overlap = experts ? alone : layout.overlap;  // a shared expert's is alone
    column_input(overlap, type(experts ? Gemm::shared_in : Gemm::mlp_in, activations));
    row_output(overlap, type(experts ? Gemm::shared_out : Gemm::mlp_out, gradients));
  }
  if (!layout.last_stage()) return;
  column_input(alone, recipe.of(0, Gemm::lm_head, Role::input).dtype);
  const int64_t chunk = plan.decoder->head_chunk();
  add(Op::all_gather, (tokens + chunk - 1) / chunk, layout.tensor * tokens * 3 * size_of(DType::f32));
}

/// The largest magnitudes of FP8 tensors that several ranks have parts of (apps/model/projection.h,
/// Decoder::update_scales()).
void add_scales(const RunPlan& plan, const Add& add) {
  using precision::Gemm, precision::Role;
  const model::ModelLayout& layout = plan.layout;
  const precision::Recipe& recipe = plan.recipe;
  const auto layers = static_cast<int>(plan.spec.layers);
  if (const precision::ScaleLayout scales = recipe.scales(layers, plan.spec.expert_layers() > 0);
      scales.layers > 0)
    return add(parallel::group::all, Op::all_reduce, 1, scales.operands() * size_of(DType::f32), false);
  const auto amax = [&](const parallel::GroupId& ranks, int64_t times) {
    add(ranks, Op::all_reduce, times, times * size_of(DType::f32), false);
  };
  const Scaling of_weights = recipe.quantized().weight.scaling;
  const auto of_weight = [&](int layer, Gemm gemm, int64_t times_input, int64_t times_gradient) {
    const bool column = gemm == Gemm::qkv || gemm == Gemm::mlp_in || gemm == Gemm::shared_in,
               experts = gemm == Gemm::experts_in || gemm == Gemm::experts_out;
    const bool gathers = model::gathers_fp8(plan.spec, layout, recipe, layer, gemm);
    for (const auto& [parts, times] :
         {std::pair(!column || gathers, times_input), {column || gathers, times_gradient}})
      for (const auto& ranks : model::ranks_of_scale(layout, parts, experts))
        if (ranks) amax(*ranks, times * plan.batch.accumulation);
    if (recipe.keeps_fp8(layer, gemm)) return;
    if (const auto ranks = model::ranks_of_weight_scale(layout, experts)) amax(*ranks, 1);
  };
  const model::MoeSpec& moe = plan.spec.moe;
  for (int l = 0; l < layers; ++l) {
    if (recipe.of(l, Gemm::qkv, Role::input).scaling != Scaling::tensor ||
        !model::holds_block(layout, layers, l))
      continue;
    of_weight(l, Gemm::qkv, 1, 1);
    of_weight(l, Gemm::o_proj, 1, 1);
    if (recipe.quantizes_attention(l))
      for (const auto& ranks : model::ranks_of_scale(layout, true, false))
        if (ranks)
          amax(*ranks, static_cast<int64_t>(precision::attention_operands.size()) * plan.batch.accumulation);
    if (!plan.spec.has_experts(l)) {
      of_weight(l, Gemm::mlp_in, 1, 1);
      of_weight(l, Gemm::mlp_out, 1, 1);
      continue;
    }
    // x and x times the weights of the router.
    of_weight(l, Gemm::experts_in, 1, 1);
    of_weight(l, Gemm::experts_out, 2, 1);
    if (moe.shared_ffn == 0) continue;
    of_weight(l, Gemm::shared_in, 1, 1);
    of_weight(l, Gemm::shared_out, moe.shared_gate ? 2 : 1, 1);
  }
  for (const ParamGroup& g : plan.groups) {
    if (!g.fp8) continue;
    int64_t bytes = 0;  // of scales
    for (const int p : g.parameters) {
      const std::vector<int64_t>& shape = plan.parameters.all[static_cast<size_t>(p)].shape;
      bytes += scale_matrix(of_weights, shape[0], shape[1]).bytes;
    }
    if (const auto ranks = g.scale_group(layout.tensor, of_weights))
      add(*ranks, Op::all_reduce, 1, bytes, false);
  }
}

/// What goes to the experts of other ranks and back (apps/model/expert_dispatch.h).
void add_experts(const RunPlan& plan, const Add& add_one) {
  const model::ModelLayout& layout = plan.layout;
  if (!model::exchanges_tokens(layout)) return;
  const int64_t layers = held_expert_layers(plan.spec, plan.layout, plan.spec.layers);
  if (layers == 0) return;
  const model::MoeSpec& m = plan.spec.moe;
  const int64_t times = layers * plan.batch.accumulation;
  const auto add_to = [&](const parallel::GroupId& id, Op op, int64_t count, int64_t bytes, bool balanced) {
    add_one(id, op, count * times, bytes * times, balanced);
  };
  const auto add = [&](Op op, int64_t count, int64_t bytes, bool balanced = false) {
    add_to(model::expert_exchange_group, op, count, bytes, balanced);
  };
  const int64_t ranks = layout.expert_ranks(), k = m.rule.top_k;
  const int64_t tokens = plan.decoder->options().tokens / (layout.sequence_parallel ? layout.tensor : 1);
  const int64_t activations = plan.spec.hidden * size_of(plan.recipe.activations()),
                gradients = plan.spec.hidden * size_of(plan.recipe.gradients());
  constexpr int64_t word = 4;  // an index or a weight
  if (m.dispatcher == model::TokenDispatcher::allgather) {
    const int64_t all = ranks * tokens;
    add(Op::all_gather, 4, all * (2 * k * word + activations + gradients));
    add(Op::reduce_scatter, 3, all * (activations + gradients + k * word));
    return;
  }
  if (!is_padded(m, tokens)) add(Op::all_gather, 1, ranks * (m.experts + 1) * word);
  const int64_t rows = rows_sent(m, tokens), parts = layout.expert_tensor;
  add(Op::exchange, 4, rows * (2 * activations + 2 * (gradients + parts * word)), !is_padded(m, tokens));
  if (parts == 1) return;
  for (const Op op : {Op::all_gather, Op::reduce_scatter})
    add_to(model::expert_parts_group, op, 2, rows * parts * (activations + gradients), !is_padded(m, tokens));
}

/// What the forward steps communicate that the backward pass repeats.
void add_repeated(const RunPlan& plan, const Add& add_one) {
  const model::ModelLayout& layout = plan.layout;
  const int64_t tokens = plan.decoder->options().tokens, microbatches = plan.batch.accumulation;
  const DType activations = plan.recipe.activations();
  const auto add = [&](const parallel::GroupId& id, Op op, int64_t count, int64_t bytes,
                       bool balanced = false) {
    add_one(id, op, count * microbatches, bytes * microbatches, balanced);
  };
  const auto of_tokens = [&](int64_t n, DType dtype) { return n * plan.spec.hidden * size_of(dtype); };
  const auto row_output = [&](const model::CommOverlap& overlap) {
    if (layout.tensor == 1) return;
    const model::CommCalls c = calls_of_sum(layout, overlap, tokens, of_tokens(tokens, activations));
    add(parallel::group::tp, c.op, c.count, c.bytes);
  };
  const auto experts = [&](Op op) {
    if (!model::exchanges_tokens(layout)) return;
    const model::MoeSpec& m = plan.spec.moe;
    const int64_t own = tokens / (layout.sequence_parallel ? layout.tensor : 1);
    if (m.dispatcher == model::TokenDispatcher::allgather)
      return add(model::expert_exchange_group, op, 1, of_tokens(layout.expert_ranks() * own, activations));
    const int64_t bytes = of_tokens(rows_sent(m, own), activations);
    add(model::expert_exchange_group, Op::exchange, 1, bytes, !is_padded(m, own));
    if (layout.expert_tensor > 1)
      add(model::expert_parts_group, op, 1, bytes * layout.expert_tensor, !is_padded(m, own));
  };
  for (const model::Decoder::Repeated& r : plan.decoder->repeated())
    for (uint64_t steps = r.steps; steps != 0; steps &= steps - 1) {
      const memory::Step& step = r.table->steps()[static_cast<size_t>(std::countr_zero(steps))];
      if (step.name == "gather") {
        const memory::SlotSpec& x = r.table->slots()[static_cast<size_t>(memory::first_slot(step.writes))];
        add(parallel::group::tp, Op::all_gather, 1, tokens * x.width * size_of(x.dtype));
      } else if (step.name == "o_proj" || step.name == "mlp_out") {
        row_output(layout.overlap);
      } else if (step.name == "shared_out") {
        row_output({});
      } else if (step.name == "dispatch") {
        experts(Op::all_gather);
      } else if (step.name == "combine") {
        experts(Op::reduce_scatter);
      } else if (step.name == "attention" && layout.context > 1) {
        for (const parallel::ContextTransfer& t : attention_of(plan, r.block).forward_transfers())
          add(model::context_group(layout.exchanges[static_cast<size_t>(r.block)], t.ranks), t.op, t.count,
              t.bytes);
      }
    }
}

}  // namespace

std::vector<TrafficPart> traffic_parts(const RunPlan& plan, const parallel::ProcessGrid& grid) {
  std::vector<TrafficPart> out;
  Purpose purpose = Purpose::layers;
  const Add add = [&](const parallel::GroupId& id, comm::Op op, int64_t count, int64_t bytes, bool balanced) {
    const auto ranks = static_cast<int>(grid.members(id).size());
    if (ranks > 1) out.push_back({purpose, {id, ranks, op, count, bytes, balanced}});
  };
  add_layers(plan, add);
  add_attention(plan, add);
  add_routers(plan, add);
  add_scales(plan, add);
  add_experts(plan, add);
  add_repeated(plan, add);
  purpose = Purpose::messages;
  for (const model::Decoder::Message& m : plan.decoder->messages())
    add(parallel::group::pp, m.sent ? Op::send : Op::recv, 1, m.bytes, false);
  for (size_t i = 0; i < plan.groups.size(); ++i) {
    const ParamGroup& g = plan.groups[i];
    if (!g.trainable) continue;
    const ReductionVisits visits = visits_of(plan, static_cast<int>(i));
    const parallel::ReduceOptions options = g.reduce_options(true);
    const auto buckets = static_cast<int64_t>(g.layout.buckets().size());
    int64_t summed = 0, gathered = 0;  // bytes
    for (size_t b = 0; b < g.layout.buckets().size(); ++b) {
      summed += visits.sums[b] * options.wire_elements(g.layout, static_cast<int>(b)) * size_of(g.wire);
      gathered += visits.gathers[b] * g.layout.buckets()[b].size * size_of(g.read_type());
    }
    purpose = Purpose::gradients;
    if (options.sums_parts()) {
      add(g.shard_group(), Op::all_to_all, visits.sum_calls, summed, false);
      if (!g.strategy.optimizer_state) add(g.shard_group(), Op::all_gather, visits.sum_calls, summed, false);
    } else {
      add(g.shard_group(), g.strategy.optimizer_state ? Op::reduce_scatter : Op::all_reduce, visits.sum_calls,
          summed, false);
    }
    if (g.replicas > 1)
      add(g.replica_group(), Op::all_reduce, buckets, g.layout.shard_total() * size_of(g.main_gradient),
          false);
    purpose = Purpose::weights;
    if (g.weights_gathered)
      add(g.gather_group(), Op::all_gather, visits.gather_calls, gathered, false);
    else if (g.strategy.optimizer_state)
      add(g.shard_group(), Op::all_gather, buckets, g.layout.total() * size_of(g.read_type()), false);
  }
  purpose = Purpose::scalars;
  add(parallel::group::all, Op::all_reduce, 1, ops::StepScalar::sums * size_of(DType::f64), false);
  return out;
}

std::vector<Traffic> step_traffic(const RunPlan& plan, const parallel::ProcessGrid& grid,
                                  std::span<const parallel::GroupId> groups) {
  const std::vector<parallel::GroupAlias> aliases = group_aliases(grid, groups);
  std::vector<Traffic> out;
  for (const auto& [purpose, part] : traffic_parts(plan, grid)) {
    const auto alias = std::find_if(aliases.begin(), aliases.end(),
                                    [&](const parallel::GroupAlias& a) { return a.id == part.group; });
    NRL_CHECK(alias != aliases.end(), "group {} is not requested", name_of(part.group));
    const auto same = std::find_if(
        out.begin(), out.end(), [&](const Traffic& t) { return t.group == alias->made && t.op == part.op; });
    if (same == out.end()) {
      out.push_back(part);
      out.back().group = alias->made;
      continue;
    }
    same->count += part.count;
    same->bytes += part.bytes;
    same->balanced = same->balanced || part.balanced;
  }
  return out;
}

}  // namespace nrl::plan

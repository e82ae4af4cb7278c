// Rules about experts: the ranks that divide them, how tokens get to them, and keys of theirs without effect.
#include "apps/check/rule.h"

namespace nrl::check {
namespace {

constexpr const char *experts = "distributed.expert_parallel_size",
                     *parts = "distributed.expert_tensor_parallel_size",
                     *tensor = "distributed.tensor_parallel_size",
                     *context = "distributed.context_parallel_size",
                     *sequence = "distributed.sequence_parallel", *schedule = "distributed.pipeline_schedule",
                     *graph = "policy.cuda_graph", *dispatcher = "policy.model.moe_token_dispatcher_type",
                     *slack = "policy.model.moe_row_slack",
                     *balancing = "policy.model.moe_router_load_balancing_type",
                     *aux_loss = "policy.model.moe_aux_loss_coeff";

using Size = int64_t (*)(const Facts&);

bool has_experts(const Facts& f) {
  return f.spec().moe.experts > 0;
}
bool gathers(const Facts& f) {
  return f.spec().moe.dispatcher == model::TokenDispatcher::allgather;
}
int64_t expert_ranks(const Facts& f) {
  return f.distributed().expert_parallel_size * f.distributed().expert_tensor_parallel_size;
}
bool divided(const Facts& f) {
  return has_experts(f) && expert_ranks(f) > 1;
}
std::string ranks_text(const Facts& f) {
  return fmt::format("experts are divided over {} ranks", expert_ranks(f));
}

int64_t size_ep(const Facts& f) {
  return f.distributed().expert_parallel_size;
}
int64_t size_etp(const Facts& f) {
  return f.distributed().expert_tensor_parallel_size;
}

/// Ranks of experts in a model without.
Rule needs_experts(const char* key, Size ranks) {
  return {{key}, [=](const Facts& f) -> Verdict {
            if (has_experts(f) || ranks(f) == 1) return {};
            return {{fmt::format("{} is {}, but a {} model has no experts", key, ranks(f),
                                 name_of(f.spec().family)),
                     {"remove it"}}};
          }};
}

/// Ranks among which a capacity would count tokens.
Rule knows_own_tokens(const char* key, Size ranks) {
  return {{key}, [=](const Facts& f) -> Verdict {
            if (!has_experts(f) || ranks(f) == 1 || f.spec().moe.capacity_factor <= 0) return {};
            return {{fmt::format("{} is {}, but policy.model.moe_expert_capacity_factor drops tokens of a "
                                 "microbatch, of which every rank knows its own only",
                                 key, ranks(f)),
                     {fmt::format("remove moe_expert_capacity_factor, or set {} to 1", key)}}};
          }};
}

Rule divides(const char* key, Size ranks, Size size, const char* what) {
  return {{key}, [=](const Facts& f) -> Verdict {
            if (!has_experts(f) || size(f) % ranks(f) == 0) return {};
            return {{fmt::format("{} is {}, which does not divide the {} {} of the model", key, ranks(f),
                                 size(f), what)}};
          }};
}

Verdict judge_sequence(const Facts& f) {
  if (!has_experts(f) || f.distributed().tensor_parallel_size == 1 || f.distributed().splits_sequence())
    return {};
  return {{fmt::format("{}: false leaves all tokens on every tensor-parallel rank, but the experts of a {} "
                       "model need ranks with tokens of their own",
                       sequence, name_of(f.spec().family)),
           {fmt::format("set {} to true or auto, or {} to 1", sequence, tensor)}}};
}

Verdict judge_capacity(const Facts& f) {
  if (!divided(f) || !gathers(f) || f.spec().moe.capacity_factor <= 0) return {};
  return {{.reason = fmt::format("{}: allgather does not drop tokens, but moe_expert_capacity_factor is {}",
                                 dispatcher, f.spec().moe.capacity_factor),
           .remedy = {"remove moe_expert_capacity_factor, or use alltoall"},
           .label = ranks_text(f)}};
}

Verdict judge_rounds(const Facts& f) {
  if (!divided(f) || gathers(f) || f.spec().moe.row_slack <= 0 || !f.result.given(slack) ||
      f.distributed().pipeline_schedule.value_or(ScheduleKind::one_f_one_b) != ScheduleKind::zb_h1)
    return {};
  return {{.reason = fmt::format(
               "{} is {}, but {} is zb_h1, which computes weight gradients later: of rows that are "
               "exchanged in rounds nothing is kept until then",
               slack, f.spec().moe.row_slack, schedule),
           .remedy = {fmt::format("set {} to 0 (memory for all rows that can come), or {} to 1f1b", slack,
                                  schedule)},
           .label = ranks_text(f)}};
}

Verdict judge_graph(const Facts& f) {
  if (!divided(f) || gathers(f) || !f.policy().cuda_graph) return {};
  return {{.reason = fmt::format("{}: true cannot capture a step in which the host waits for the numbers of "
                                 "tokens of experts ({}: alltoall)",
                                 graph, dispatcher),
           .remedy = {fmt::format("set {} to allgather, or {} to false", dispatcher, graph)},
           .label = ranks_text(f)}};
}

Verdict judge_idle_dispatcher(const Facts& f) {
  if (!has_experts(f) || !gathers(f) || expert_ranks(f) > 1) return {};
  return {
      {.reason = fmt::format("{}: allgather has no effect: no rank has experts that others lack", dispatcher),
       .remedy = {fmt::format("Fix: remove it, or set {} above 1", experts)},
       .idle = true}};
}

Verdict judge_idle_slack(const Facts& f) {
  if (!has_experts(f) || (divided(f) && !gathers(f) && !f.spec().moe.pad_to_capacity)) return {};
  return {{.reason = fmt::format("{} has no effect: {}", slack,
                                 !divided(f)  ? "no rank has experts that others lack"
                                 : gathers(f) ? "allgather brings all tokens to every rank"
                                              : "padded experts get as many rows as their capacity"),
           .remedy = {"Fix: remove it"},
           .idle = true}};
}

Verdict judge_idle_balancing(const Facts& f) {
  const model::MoeSpec& moe = f.spec().moe;
  if (!has_experts(f) || moe.aux_loss != 0 || moe.aux_tokens == model::AuxLoss::microbatch) return {};
  return {
      {.reason = fmt::format("{}: {} has no effect without {} above 0", balancing, moe.aux_name(), aux_loss),
       .remedy = {fmt::format("Fix: remove it, or set {}", aux_loss)},
       .idle = true}};
}

const Rule expert_table[] = {
    needs_experts(experts, size_ep),
    needs_experts(parts, size_etp),
    {{sequence, tensor}, judge_sequence},
    knows_own_tokens(tensor, [](const Facts& f) { return f.distributed().tensor_parallel_size; }),
    knows_own_tokens(context, [](const Facts& f) { return f.distributed().context_parallel_size; }),
    divides(
        experts, size_ep, [](const Facts& f) { return f.spec().moe.experts; }, "experts"),
    divides(
        parts, size_etp, [](const Facts& f) { return f.spec().moe.ffn; }, "columns of an expert"),
    divides(
        parts, size_etp, [](const Facts& f) { return gathers(f) ? 0 : f.spec().hidden; },
        "columns of the residual stream"),
    {{dispatcher}, judge_capacity},
    {{slack}, judge_rounds},
    {{graph}, judge_graph},
    {{dispatcher, experts, parts}, judge_idle_dispatcher},
    {{slack, experts, parts, dispatcher, "policy.model.moe_pad_expert_input_to_capacity"}, judge_idle_slack},
    {{balancing, aux_loss}, judge_idle_balancing},
};

}  // namespace

std::span<const Rule> expert_rules() {
  return expert_table;
}

}  // namespace nrl::check

#include "apps/plan/parts.h"

#include <array>

namespace nrl::plan {
namespace {

constexpr std::string_view experts = "router and dispatch", objective = "objective";

struct PartRule {
  std::string_view op, layers, head;  ///< `head`: within loss_computation; empty: the same
};
constexpr PartRule rules[] = {
    {"linear_forward", "layer GEMMs, forward", "head GEMM, forward"},
    {"linear_backward_data", "layer GEMMs, dgrad", "head GEMM, dgrad"},
    {"linear_backward_weight", "layer GEMMs, wgrad", "head GEMM, wgrad"},
    {"attention_forward", "attention, forward", ""},
    {"attention_backward", "attention, backward", ""},
    {"norm_forward", "norms, forward", ""},
    {"norm_backward", "norms, backward", ""},
    {"rope", "RoPE, QK norm", ""},
    {"qk_norm_rope_forward", "RoPE, QK norm", ""},
    {"qk_norm_rope_backward", "RoPE, QK norm", ""},
    {"activation_forward", "activation, forward", ""},
    {"activation_backward", "activation, backward", ""},
    {"grouped_linear_forward", "layer GEMMs, forward", ""},
    {"grouped_linear_backward_data", "layer GEMMs, dgrad", ""},
    {"grouped_linear_backward_weight", "layer GEMMs, wgrad", ""},
    {"router_forward", experts, ""},
    {"router_counts", experts, ""},
    {"router_balance", experts, ""},
    {"router_backward", experts, ""},
    {"router_bias", experts, ""},
    {"dispatch_sort", experts, ""},
    {"permute", experts, ""},
    {"regroup_rows", experts, ""},
    {"unpermute", experts, ""},
    {"gate_backward", experts, ""},
    {"merge_attention", "attention, forward", ""},
    {"cache_write", "attention, forward", ""},
    {"attention_paged", "attention, forward", ""},
    {"add_rows", "attention, backward", ""},
    {"cross_entropy", "cross entropy", ""},
    {"cross_entropy_statistics", "cross entropy", ""},
    {"cross_entropy_gradient", "cross entropy", ""},
    {"segment_sum", objective, ""},
    {"segment_rows", objective, ""},
    {"pair_loss", objective, ""},
    {"policy_loss", objective, ""},
    {"gather_columns", "cross entropy", ""},
    {"topk_kl", objective, ""},
    {"top_columns", objective, ""},
    {"scatter_columns", "cross entropy", ""},
    {"sample_tokens", "cross entropy", ""},
    {"join_samples", "cross entropy", ""},
    {"column_sums", "bias gradients", ""},
    {"dropout", "dropout", ""},
    {"embedding_forward", "embedding", ""},
    {"embedding_backward", "embedding", ""},
    {"adamw", "optimizer", ""},
    {"add_sum_of_squares", "optimizer", ""},
    {"sum_parts", "optimizer", ""},
    {"fp8_encode", "optimizer", ""},
    {"fp8_decode", "optimizer", ""},
    {"quantize", "quantization", ""},
    {"transpose", "quantization", ""},
    {"largest_magnitude", "quantization", ""},
    {"block_magnitudes", "quantization", ""},
    {"quantize_part", "quantization", ""},
    {"update_scales", "quantization", ""},
    {"decide_step", "optimizer", ""},
    {"add_sum", other_ops, ""},
    {"add_hash", other_ops, ""},
    {"convert", other_ops, ""},
    {"copy", other_ops, ""},
    {"zero", other_ops, ""},
};

constexpr std::array<std::string_view, 24> order{"layer GEMMs, forward",
                                                 "layer GEMMs, dgrad",
                                                 "layer GEMMs, wgrad",
                                                 "head GEMM, forward",
                                                 "head GEMM, dgrad",
                                                 "head GEMM, wgrad",
                                                 "attention, forward",
                                                 "attention, backward",
                                                 "norms, forward",
                                                 "norms, backward",
                                                 "RoPE, QK norm",
                                                 "activation, forward",
                                                 "activation, backward",
                                                 experts,
                                                 "recomputed",
                                                 "quantization",
                                                 "cross entropy",
                                                 objective,
                                                 "bias gradients",
                                                 "dropout",
                                                 "embedding",
                                                 "optimizer",
                                                 other_ops,
                                                 between_kernels};

}  // namespace

std::string_view part_of(std::string_view op, std::string_view range) {
  for (const PartRule& rule : rules) {
    if (op != rule.op) continue;
    if (range == "recompute") return "recomputed";
    return range == "loss_computation" && !rule.head.empty() ? rule.head : rule.layers;
  }
  return "";
}

std::span<const std::string_view> step_parts() {
  return order;
}

Attainable attainable(const ops::Cost& cost, const Peaks& peaks) {
  double rate = peaks.f32_flops;
  if (size_of(cost.operands) == 2 && peaks.bf16_flops > 0) rate = peaks.bf16_flops;
  if (size_of(cost.operands) == 1) rate = peaks.fp8_flops > 0 ? peaks.fp8_flops : peaks.bf16_flops;
  return {.arithmetic = rate > 0 ? cost.flops / rate : 0,
          .memory = peaks.copy > 0 ? cost.bytes() / peaks.copy : 0};
}

}  // namespace nrl::plan

#include "apps/machine/trainer_kernels.h"

#include <algorithm>
#include <utility>

#include "core/base/error.h"

namespace nrl::machine {
namespace {

// Counted in the trainers' source: every kernel reads its operands and writes its results once, 2 bytes for
// an element of bf16, 4 for one of f32. Nothing is fitted to times of steps.
//
// Ours, for an element of the op's rows: norm_forward with the residual 8, norm_backward 8, rope 4,
// qk_norm_rope 4 and 6, SwiGLU 6 and 10, cross_entropy 4 for a logit, adamw 30 for a parameter. Norms stand
// for what else the others move beside the GEMMs: each of a layer's two norms for half of it.

/// The loss of PyTorch: to f32 6, log_softmax 8, backward: zeros 4, log_softmax 12, to bf16 6; compiled it
/// reads its logits twice. TransformerEngine's, and Megatron's in f32 (megatron/mpu/cross_entropy.py).
constexpr OpKernels eager_loss{"cross_entropy", 36.0 / 4, 7}, compiled_loss{"cross_entropy", 7.0 / 4, 3},
    fused_loss{"cross_entropy", 10.0 / 4, 3}, f32_loss{"cross_entropy", 52.0 / 4, 24};
/// AdamW with the bf16 copy 6: foreach 80 (torch/optim/adamw.py), or one kernel 28, also Apex's.
constexpr OpKernels foreach_adamw{"adamw", 86.0 / 30, 9}, fused_adamw{"adamw", 34.0 / 30, 2};

/// torchtitan's Llama on PyTorch 2.5 to 2.7 (models/llama3/model/model.py) without torch.compile:
///   norm    ATen's rms_norm_symint: addition 6, to f32 6, pow 8, mean 4, * rstd 8, * weight 8, to bf16 6;
///           backward by derivatives.yaml 110, and sums of the gradients of q, k, v, gate and up, 18 a layer
///   rope    to f32 6, complex product 8, to bf16 6; copies of k and v for their query heads 4
///   swiglu  silu 4, product 6; backward 6 + 6 + 6
constexpr OpKernels pytorch_rms[] = {{"norm_forward", 46.0 / 8, 9},
                                     {"norm_backward", (110.0 + 18.0 / 2) / 8, 20},
                                     {"rope", 24.0 / 4, 4},
                                     {"qk_norm_rope_forward", 64.0 / 4, 13},
                                     {"qk_norm_rope_backward", 128.0 / 6, 22},
                                     {"activation_forward", 10.0 / 6, 2},
                                     {"activation_backward", 18.0 / 10, 3},
                                     eager_loss,
                                     foreach_adamw};
/// GPT-2 as in nanoGPT, or MPT in llm-foundry, in bf16: ATen's layer_norm 4 and an addition 6, backward 6 + 4
/// + 6; GELU on 4 times the width 4 and 6; the gradients of q, k and v joined 12.
constexpr OpKernels pytorch_layer_norm[] = {{"norm_forward", (10 + 4 * 4.0 / 2) / 8, 3},
                                            {"norm_backward", (16 + 4 * 6.0 / 2 + 12.0 / 2) / 8, 4},
                                            eager_loss,
                                            foreach_adamw};
/// The same with torch.compile of each block and of the loss, by the rules of Inductor: what is added is read
/// in the norm, gradients of its weight are another kernel, complex rope is not compiled. Operands in FP8
/// (torchao/float8/float8_linear.py and float8_ops.py) are casts 3 and transposed copies for the gradient of
/// the weight 2, after SwiGLU 6 and 13; magnitudes are found in the kernels before, but for the output of
/// attention and the gradients of q, k, v and of both projections: in a layer of Llama 8B 152 and 9 for our
/// 82 and 37.5.
constexpr OpKernels compiled_rms[] = {{"norm_forward", 18.0 / 2 / 8, 2},
                                      {"norm_backward", 38.0 / 2 / 8, 3},
                                      {"rope", 24.0 / 4, 4},
                                      {"qk_norm_rope_forward", 28.0 / 4, 5},
                                      {"qk_norm_rope_backward", 34.0 / 6, 6},
                                      {"activation_backward", 13.0 / 10, 1},
                                      {"quantize", 152.0 / 82, 3},
                                      {"largest_magnitude", 9 / 37.5, 1},
                                      compiled_loss,
                                      fused_adamw};
constexpr OpKernels compiled_layer_norm[] = {{"norm_forward", (9 + 4 * 4.0 / 2) / 8, 2},
                                             {"norm_backward", (13 + 4 * 6.0 / 2 + 12.0 / 2) / 8, 4},
                                             compiled_loss,
                                             fused_adamw};
/// JAX with XLA's fusions, by the same rules as Inductor's; rope is compiled as well. MaxText
/// (max_utils.py, cross_entropy_with_logits) has its loss in f32, of which it keeps the exponentials:
/// maximum 2, exponentials and their sum 6, probability of the target 2, backward 6. Attention is cuDNN's.
constexpr OpKernels xla_loss{"cross_entropy", 16.0 / 4, 4};
constexpr OpKernels xla[] = {
    {"rope", 1, 1}, {"qk_norm_rope_forward", 8.0 / 4, 2}, {"qk_norm_rope_backward", 14.0 / 6, 3}, xla_loss};
/// Megatron's GEMMs add to gradients of either type (fuse_wgrad_accumulation; gradient_accumulation_fusion).
/// Taken for all additions, also of what other ranks send.
constexpr OpKernels gemm_sums{"sum_parts", 0, 0};
/// Megatron-Core with TransformerEngine, 2025: addition 6 and norm 4, backward 6 + 6; queries copied 4, the
/// gradients of q, k and v joined 4; bias and GELU 4, 8 backward.
/// In FP8 SwiGLU is a kernel before the cast, where ours are one. For an element of the width in a layer of
/// Llama 8B, of which SwiGLU has 3.5: with scales of the step before 118 (a cast with its transpose 4, SwiGLU
/// 6, backward 10) for our 82; with current scales 156 (largest magnitudes 2, but not of norms) for our 82
/// and 37.5. GELU is counted with the norms, also backward, where ours is apart: 58 for our 72. Casts of
/// outputs' gradients give the gradients of biases (common/cast, cast_transpose_dbias).
constexpr OpKernels megatron_rms[] = {{"norm_forward", (10 + 4.0 / 2) / 8, 2},
                                      {"norm_backward", (12 + 4 * 1.5 / 2) / 8, 4},
                                      {"qk_norm_rope_forward", 8.0 / 4, 2},
                                      {"qk_norm_rope_backward", 10.0 / 6, 3},
                                      {"quantize", 1.4, 2},
                                      {"largest_magnitude", 1.1, 1},
                                      {"router_forward", 29.0 / 4, 6},
                                      {"router_backward", 41.0 / 8, 8},
                                      gemm_sums,
                                      fused_loss,
                                      fused_adamw};
/// Experts (Megatron-Core 0.15, megatron/core/transformer/moe; TransformerEngine 2.10,
/// pytorch/module/grouped_linear.py and common/fused_router) with the options of NVIDIA's recipes: alltoall,
/// fused permutation and router. For tokens times experts, where ours move 4 and 8 for logits in f32: scores
/// twice, for the choice and for the auxiliary loss, 29, backward 41. Sizes for the exchange and the map of
/// rows are 9 kernels (10 here), for which the host waits. Each expert has GEMMs of cuBLASLt on 4 streams.
/// Rows are sorted as ours, and in FP8 copied once more to pad them. Casts to FP8 are a kernel for 64 experts
/// with scales of the step before, one for each with scales of blocks, and four with current scales of
/// tensors. From 2.13 on there are kernels for all experts, where a recipe asks for them (cublaslt grouped
/// GEMMs, group_quantize).
constexpr OpKernels experts[] = {{.op = "dispatch_sort", .launches = 5, .host_waits = true},
                                 {"grouped_linear_forward", 1, 1, 1},
                                 {"grouped_linear_backward_data", 1, 1, 1},
                                 {"grouped_linear_backward_weight", 1, 1, 1}};
constexpr OpKernels padded_rows{"regroup_rows", 2, 2};
constexpr OpKernels experts_delayed[] = {padded_rows},
                    experts_current[] = {{"quantize", 1.4, 2, 4}, padded_rows},
                    experts_blocks[] = {{"quantize", 1.4, 2, 1}, padded_rows};
constexpr OpKernels megatron_layer_norm[] = {{"norm_forward", (10 + 4 * 4.0 / 2) / 8, 3},
                                             {"norm_backward", (12 + 4 * 8.0 / 2 + 12.0 / 2) / 8, 5},
                                             {"quantize", 58.0 / 72, 2},
                                             {"activation_backward", 0, 0},
                                             {"column_sums", 0, 0},
                                             gemm_sums,
                                             fused_loss,
                                             fused_adamw};
/// Megatron-LM, Megatron-DeepSpeed and GPT-NeoX of 2022: addition 6 and Apex's FusedLayerNorm 4, backward 6,
/// 10 and 2 for the gradient of a bias; bias and GELU 4 and 8; transposed context 4; the gradients of q, k
/// and v joined 12. Scores without dropout: the products
/// move 4 and 8, the softmax, which reads below the diagonal only, 3 and 4.
constexpr OpKernels megatron_2022[] = {{"norm_forward", (10 + 4 * 4.0 / 2 + 4.0 / 2) / 8, 3},
                                       {"norm_backward", (18 + 4 * 8.0 / 2 + 12.0 / 2) / 8, 6},
                                       f32_loss,
                                       fused_adamw};
constexpr Scores megatron_2022_scores = {.forward = {.products = 4, .others = 3},
                                         .backward = {.products = 8, .others = 4}};
/// Dropout reads and writes what it drops, and a mask: scores 5 each way, the residual stream 1 and 5.
constexpr OpKernels megatron_2022_dropout[] = {{"norm_forward", (11 + 4 * 4.0 / 2 + 4.0 / 2) / 8, 3},
                                               {"norm_backward", (23 + 4 * 8.0 / 2 + 12.0 / 2) / 8, 7},
                                               f32_loss,
                                               fused_adamw};
constexpr Scores megatron_2022_dropped = {.forward = {.products = 4, .others = 8},
                                          .backward = {.products = 8, .others = 9}};

/// FlashAttention-2, which scaled_dot_product_attention of PyTorch 2.5.1 to 2.7 is on an H100: at 16,384
/// causal keys 299 and 335 TFLOP/s forward (Shah et al. 2024, figure 5), 278 and 325 backward (from forward
/// and both in flash2_h100_fwd_bwd_benchmark.png of its repository); 256 is assumed. Our A100 has its rates.
constexpr FusedAttention flash2[] = {
    {9, {.d64 = 0.31, .d128 = 0.35, .d256 = 0.33}, {.d64 = 0.29, .d128 = 0.34, .d256 = 0.30}}};
/// FlashAttention 1, forward and backward together at 16,384 causal keys: 156 and 137 TFLOP/s on an H100, 97
/// and 83 on an A100 (the same repository).
constexpr AttentionRates flash1_hopper = {.d64 = 0.162, .d128 = 0.143, .d256 = 0.143},
                         flash1_ampere = {.d64 = 0.32, .d128 = 0.275, .d256 = 0.275};
constexpr FusedAttention flash1[] = {{8, flash1_ampere, flash1_ampere}, {9, flash1_hopper, flash1_hopper}};

constexpr auto rms = ops::NormKind::rms, layer_norm = ops::NormKind::layer;
/// PyTorch's FSDP2 (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py) copies gathered weights into
/// tensors of their own, 2 and 2 for an element of 2 bytes, and bf16 gradients into a buffer of f32, 2 and 4
/// for one of 4. Tokens are the second dimension, so that parts that tensor-parallel ranks gather or sum are
/// put together or cut apart by a copy (torch/distributed/_functional_collectives.py).
constexpr TrainerKernels pytorch(std::string_view name, ops::NormKind norm, std::span<const OpKernels> ops) {
  return {.name = name,
          .norm = norm,
          .ops = ops,
          .streams = true,
          .gather_copies = 2,
          .reduce_copies = 1.5,
          .layer_copies = 2,
          .attention = flash2};
}
/// FSDP1 has weights in views of one tensor, whose gradient is joined, 2 and 2 for an element of 2 bytes.
constexpr TrainerKernels pytorch_2023(ops::NormKind norm, std::span<const OpKernels> ops) {
  return {.name = "pytorch-2023", .norm = norm, .ops = ops, .reduce_copies = 2, .attention = flash1};
}
constexpr TrainerKernels megatron(std::span<const OpKernels> of_fp8 = {}, std::optional<Fp8Recipe> fp8 = {}) {
  return {.name = "megatron",
          .norm = rms,
          .fp8 = fp8,
          .ops = megatron_rms,
          .first = {of_fp8, experts},
          .streams = true,
          .expert_gemms = true,
          .gathers_again_beside = true,
          .caches_weights = true};
}
constexpr TrainerKernels trainers[] = {
    pytorch("pytorch", rms, pytorch_rms),
    pytorch("pytorch", layer_norm, pytorch_layer_norm),
    pytorch("pytorch-compile", rms, compiled_rms),
    pytorch("pytorch-compile", layer_norm, compiled_layer_norm),
    pytorch_2023(rms, pytorch_rms),
    pytorch_2023(layer_norm, pytorch_layer_norm),
    {.name = "jax", .norm = rms, .ops = compiled_rms, .first = {xla}, .compiled = true},
    {.name = "jax", .norm = layer_norm, .ops = compiled_layer_norm, .first = {xla}, .compiled = true},
    megatron(),
    megatron(experts_delayed, Fp8Recipe::delayed),
    megatron(experts_current, Fp8Recipe::tensorwise),
    megatron(experts_blocks, Fp8Recipe::blockwise),
    megatron(experts_blocks, Fp8Recipe::mxfp8),
    {.name = "megatron",
     .norm = layer_norm,
     .ops = megatron_layer_norm,
     .streams = true,
     .gathers_again_beside = true,
     .caches_weights = true},
    {.name = "megatron-2022",
     .norm = layer_norm,
     .ops = megatron_2022,
     .gathers_again_beside = true,
     .scores = megatron_2022_scores},
    {.name = "megatron-2022",
     .norm = layer_norm,
     .dropout = true,
     .ops = megatron_2022_dropout,
     .gathers_again_beside = true,
     .scores = megatron_2022_dropped}};

}  // namespace

const OpKernels* TrainerKernels::find(std::string_view op, const ExpertsOfTrainer& experts) const {
  // DeepEP delivers rows that need no sorting. In FP8 they are copied to pad them, as ours to sort them.
  static constexpr OpKernels none{"regroup_rows", 0, 0};
  if (experts.once && op == none.op) return fp8 && !experts.in_order ? nullptr : &none;
  for (const std::span<const OpKernels> list : {first[0], first[1], ops})
    for (const OpKernels& k : list)
      if (k.op == op) return &k;
  return nullptr;
}

DeviceModel TrainerKernels::on(DeviceModel gpu) const {
  gpu.kernels = this;
  for (const FusedAttention& of : attention)
    if (of.major == gpu.major) gpu.forward = of.forward, gpu.backward = of.backward;
  return gpu;
}

DeviceModel Trainer::on(DeviceModel gpu) const {
  gpu = kernels->on(gpu);
  gpu.experts = experts;
  if (graphs) gpu.host_operation = 0;
  return gpu;
}

std::string trainer_names() {
  std::string names;
  std::string_view last;
  for (const TrainerKernels& t : trainers)
    if (std::exchange(last, t.name) != t.name) names += (names.empty() ? "" : ", ") + std::string(t.name);
  return names;
}

const TrainerKernels& find_trainer_kernels(std::string_view name, const TrainedModel& model) {
  const auto of_name = [&](const TrainerKernels& t) { return t.name == name; };
  if (std::none_of(std::begin(trainers), std::end(trainers), of_name))
    fail(Exit::usage, "--trainer: unknown trainer '{}'; expected one of: {}", name, trainer_names());
  const TrainerKernels* found = nullptr;
  for (const TrainerKernels& t : trainers)
    if (of_name(t) && t.norm == model.norm && (model.dropout || !t.dropout) && (!t.fp8 || t.fp8 == model.fp8))
      found = &t;
  if (found) return *found;
  fail(Exit::usage, "--trainer: the kernels of {} are counted for models with {} only", name,
       model.norm == rms ? "LayerNorm" : "RMSNorm");
}

namespace {

struct Property {
  std::string_view name, text;
  std::array<bool ExpertsOfTrainer::*, 2> of_experts = {};  // none: graphs
  bool exchange = false;
};
constexpr Property properties[] = {
    {"graphs", "CUDA graphs of whole steps"},
    {"grouped", "one kernel for all experts of a rank", {&ExpertsOfTrainer::grouped}},
    {"deepep",
     "DeepEP: a token goes once to each node that has experts for it",
     {&ExpertsOfTrainer::once},
     true},
    {"hybridep",
     "HybridEP: as deepep, and rows arrive as experts take them",
     {&ExpertsOfTrainer::once, &ExpertsOfTrainer::in_order},
     true},
    {"overlap",
     "rows of experts are exchanged beside the computation of another microbatch",
     {&ExpertsOfTrainer::beside},
     true}};

/// Why a property has no effect; empty: it has one.
std::string without_effect(const Property& p, const Trainer& trainer, const TrainedModel& model) {
  if (!p.of_experts[0])
    return !trainer.graphs             ? ""
           : trainer.kernels->compiled ? "the host is never late"
                                       : "steps are in graphs already";
  if (!model.experts) return "the model has no experts";
  if (!trainer.kernels->expert_gemms)
    return fmt::format("{} has our kernels and exchange for experts", trainer.kernels->name);
  if (p.exchange && !model.exchanges) return "no rows of experts are exchanged, or as many for each expert";
  return trainer.experts.*p.of_experts[0] ? "another property says so" : "";
}

}  // namespace

std::string trainer_properties() {
  std::string text;
  for (const Property& p : properties)
    text += fmt::format("{}{} ({})", text.empty() ? "" : ", ", p.name, p.text);
  return text;
}

Trainer find_trainer(std::string_view text, const TrainedModel& model) {
  size_t end = text.find('+');
  Trainer found{.kernels = &find_trainer_kernels(text.substr(0, end), model)};
  found.graphs = model.graphs || found.kernels->compiled;
  while (end != text.npos) {
    const size_t begin = end + 1;
    end = text.find('+', begin);
    const std::string_view name = text.substr(begin, end == text.npos ? end : end - begin);
    const auto at = std::find_if(std::begin(properties), std::end(properties),
                                 [&](const Property& p) { return p.name == name; });
    if (at == std::end(properties))
      fail(Exit::usage, "--trainer {}: unknown property '{}'; expected {}", text, name, trainer_properties());
    if (const std::string why = without_effect(*at, found, model); !why.empty())
      fail(Exit::usage, "--trainer {}: {} has no effect: {}. Fix: leave it out", text, name, why);
    if (!at->of_experts[0]) found.graphs = true;
    for (bool ExpertsOfTrainer::*const fact : at->of_experts)
      if (fact) found.experts.*fact = true;
  }
  return found;
}

}  // namespace nrl::machine

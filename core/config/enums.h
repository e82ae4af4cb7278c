#pragma once
// All enumerations of the configuration, with their YAML spellings.

#include <span>
#include <string_view>

namespace nrl {

/// The spellings of an enumeration: `names[i]` is the enumerator of value i; `synonyms` are other accepted
/// spellings (older NeMo documentation, Megatron, NeMo RL), reported as translated.
template <class E>
struct EnumNames;

struct Synonym {
  std::string_view spelling;
  std::string_view name;
};

// NRL_ENUM(Type, enumerators..., names..., synonyms...): the enumeration and its table in one place.
#define NRL_ENUM(Type, ENUMERATORS, NAMES, SYNONYMS)                      \
  enum class Type { NRL_UNWRAP ENUMERATORS };                             \
  template <>                                                             \
  struct EnumNames<Type> {                                                \
    static constexpr std::string_view names[] = {NRL_UNWRAP NAMES};       \
    static constexpr Synonym synonyms[] = {{"", ""} NRL_UNWRAP SYNONYMS}; \
  };
#define NRL_UNWRAP(...) __VA_ARGS__

NRL_ENUM(Algorithm, (pretrain, sft, dpo, rm, grpo, distill),
         ("pretrain", "sft", "dpo", "rm", "grpo", "distill"), ())
NRL_ENUM(DeviceKind, (automatic, cpu, cuda), ("auto", "cpu", "cuda"), (, {"gpu", "cuda"}))
NRL_ENUM(CommBackend, (automatic, mpi, nccl, staged), ("auto", "mpi", "nccl", "staged"), (, {"ray", "auto"}))
NRL_ENUM(ShardStrategy, (ddp, optim, optim_grads, optim_grads_params, hsdp),
         ("ddp", "optim", "optim_grads", "optim_grads_params", "hsdp"),
         (, {"no_shard", "ddp"}, {"zero1", "optim"}, {"zero2", "optim_grads"},
          {"zero3", "optim_grads_params"}, {"fsdp", "optim_grads_params"},
          {"FULL_SHARD", "optim_grads_params"}))
NRL_ENUM(TpCommOverlap, (none, bulk, pipelined, ring), ("none", "bulk", "pipelined", "ring"),
         (, {"pipeline", "pipelined"}, {"ring_exchange", "ring"}))
NRL_ENUM(CpCommType, (p2p, all_gather, a2a, a2a_p2p), ("p2p", "all_gather", "a2a", "a2a+p2p"),
         (, {"allgather", "all_gather"}))
NRL_ENUM(PipelineSchedule, (automatic, one_f_one_b, interleaved, zb_h1),
         ("auto", "1f1b", "interleaved", "zb_h1"),
         (, {"interleaved_1f1b", "interleaved"}, {"zb-h1", "zb_h1"}))
NRL_ENUM(StateDType, (fp32, bf16, fp16, fp8), ("fp32", "bf16", "fp16", "fp8"),
         (, {"float32", "fp32"}, {"bfloat16", "bf16"}, {"float16", "fp16"}))
NRL_ENUM(MainGradsDType, (fp32, bf16), ("fp32", "bf16"), (, {"float32", "fp32"}, {"bfloat16", "bf16"}))
NRL_ENUM(ReduceDType, (fp32, bf16, fp8), ("fp32", "bf16", "fp8"),
         (, {"float32", "fp32"}, {"bfloat16", "bf16"}))
NRL_ENUM(Precision, (automatic, float32, bfloat16, float16, fastest),
         ("auto", "float32", "bfloat16", "float16", "fastest"),
         (, {"fp32", "float32"}, {"bf16", "bfloat16"}, {"fp16", "float16"}, {"32", "float32"}))
NRL_ENUM(Fp8Format, (hybrid, e4m3), ("hybrid", "e4m3"), ())
NRL_ENUM(Fp8Recipe, (tensorwise, delayed, blockwise, mxfp8), ("tensorwise", "delayed", "blockwise", "mxfp8"),
         (, {"current", "tensorwise"}))
NRL_ENUM(AmaxAlgorithm, (most_recent, max), ("most_recent", "max"), ())
NRL_ENUM(LogitsDType, (automatic, float32, bfloat16), ("auto", "float32", "bfloat16"),
         (, {"fp32", "float32"}, {"bf16", "bfloat16"}))
NRL_ENUM(AttentionType, (automatic, flash_attention, cudnn, unfused),
         ("auto", "flash_attention", "cudnn", "unfused"),
         (, {"flash", "flash_attention"}, {"fused", "cudnn"}))
NRL_ENUM(RecomputeGranularity, (automatic, none, selective, full), ("auto", "none", "selective", "full"), ())
NRL_ENUM(RecomputeMethod, (uniform, block), ("uniform", "block"), ())
NRL_ENUM(RecomputeModule, (norm, activation, gather, core_attn, mlp, moe),
         ("norm", "activation", "gather", "core_attn", "mlp", "moe"),
         (, {"layernorm", "norm"}, {"moe_act", "activation"}))
NRL_ENUM(OffloadModule, (norm, activation, gather, core_attn, mlp, moe, qkv, input),
         ("norm", "activation", "gather", "core_attn", "mlp", "moe", "qkv", "input"),
         (, {"layernorm", "norm"}, {"moe_act", "activation"}))
NRL_ENUM(OptimizerName, (adamw, adam_l2, sgd, muon), ("adamw", "adam_l2", "sgd", "muon"),
         (, {"torch.optim.AdamW", "adamw"}, {"AdamW", "adamw"}, {"adam", "adamw"},
          {"torch.optim.Adam", "adam_l2"}))
NRL_ENUM(LrScalingRule, (none, linear, sqrt), ("none", "linear", "sqrt"), ())
NRL_ENUM(LrDecayStyle, (constant, linear, cosine, wsd, inverse_square_root),
         ("constant", "linear", "cosine", "WSD", "inverse-square-root"),
         (, {"wsd", "WSD"}, {"inverse_square_root", "inverse-square-root"}, {"cosine_annealing", "cosine"}))
NRL_ENUM(ScheduleUnit, (optimizer_steps, samples), ("optimizer_steps", "samples"), ())
NRL_ENUM(OnNonfinite, (skip, stop), ("skip", "stop"), ())
NRL_ENUM(ResumeChange, (data, seed, sequence_length, model), ("data", "seed", "sequence_length", "model"), ())
/// policy.loss_scaling: a number, or one that adapts.
struct LossScaling {
  bool dynamic = false;
  double scale = 1;  ///< if it does not adapt
  bool operator==(const LossScaling&) const = default;
};

/// true (1), false (0) or a fraction.
struct Share {
  double value = 0;
  bool operator==(const Share&) const = default;
};

/// checkpointing.resume: one of two words, or a directory.
enum class ResumeMode { automatic, never, directory };
NRL_ENUM(OnOom, (fail, reduce_batch), ("fail", "reduce_batch"), ())
NRL_ENUM(Progress, (automatic, bar, plain, json), ("auto", "bar", "plain", "json"), ())
NRL_ENUM(IsaChoice, (automatic, baseline, avx2, avx512, avx512_bf16, avx512_amx),
         ("auto", "baseline", "avx2", "avx512", "avx512_bf16", "avx512_amx"), ())
/// The quantities that a suite of comparisons measures.
NRL_ENUM(Quantity, (step_time, speed, planned_bytes, activation_bytes, optimizer_bytes, sent_bytes),
         ("step_time", "speed", "planned_bytes", "activation_bytes", "optimizer_bytes", "sent_bytes"), ())

#undef NRL_UNWRAP
#undef NRL_ENUM

/// The YAML spelling of an enumerator.
template <class E>
requires requires {
  EnumNames<E>::names;
}
constexpr std::string_view name_of(E value) {
  return EnumNames<E>::names[static_cast<int>(value)];
}

}  // namespace nrl

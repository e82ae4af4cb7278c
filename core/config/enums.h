#pragma once
// All enumerations of the configuration, with their YAML spellings. Higher floors use these and have no
// others for the same concepts.

#include "core/base/dtype.h"
#include "core/base/isa.h"
#include "core/config/example_enums.h"
#include "core/config/objective_enums.h"

namespace nrl {

NRL_ENUM(Algorithm, (pretrain, sft, dpo, rm, grpo, distill),
         ("pretrain", "sft", "dpo", "rm", "grpo", "distill"), ())
NRL_ENUM(PackingAlgorithm,
         (modified_first_fit_decreasing, first_fit_decreasing, first_fit_shuffle, concatenative),
         ("modified_first_fit_decreasing", "first_fit_decreasing", "first_fit_shuffle", "concatenative"), ())
/// Values of model_type; apps/model/spec/family.cpp has the rules of each family.
NRL_ENUM(ModelFamily, (gpt2, llama, mistral, qwen2, qwen3, mixtral, qwen2_moe, qwen3_moe, gemma3_text),
         ("gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "gemma3_text"),
         ())
NRL_ENUM(DeviceKind, (automatic, cpu, cuda), ("auto", "cpu", "cuda"), (, {"gpu", "cuda"}))
NRL_ENUM(CommBackend, (automatic, mpi, nccl, staged), ("auto", "mpi", "nccl", "staged"), (, {"ray", "auto"}))
/// Each shards what the one before it does, and more; hsdp shards as optim_grads_params, in every copy.
NRL_ENUM(ShardStrategy, (ddp, optim, optim_grads, optim_grads_params, hsdp),
         ("ddp", "optim", "optim_grads", "optim_grads_params", "hsdp"),
         (, {"no_shard", "ddp"}, {"zero1", "optim"}, {"zero2", "optim_grads"},
          {"zero3", "optim_grads_params"}, {"fsdp", "optim_grads_params"},
          {"FULL_SHARD", "optim_grads_params"}))
NRL_ENUM(TpCommOverlap, (none, bulk, pipelined, ring), ("none", "bulk", "pipelined", "ring"),
         (, {"pipeline", "pipelined"}, {"ring_exchange", "ring"}))
NRL_ENUM(CpCommType, (p2p, all_gather, a2a, a2a_p2p), ("p2p", "all_gather", "a2a", "a2a+p2p"),
         (, {"allgather", "all_gather"}))
/// Schedules of a pipeline stage, which parallel/pipeline/schedule.cpp generates. The program chooses
/// `single` and `forward_only`; the others are configured.
NRL_ENUM(ScheduleKind, (single, forward_only, one_f_one_b, interleaved, zb_h1),
         ("single", "forward_only", "1f1b", "interleaved", "zb_h1"),
         (, {"interleaved_1f1b", "interleaved"}, {"zb-h1", "zb_h1"}))
/// A schedule that can be configured, and what it does, for help texts.
struct ScheduleText {
  ScheduleKind kind;
  std::string_view text;
};
inline constexpr ScheduleText configured_schedules[] = {
    {ScheduleKind::one_f_one_b, ""},
    {ScheduleKind::interleaved,
     "1F1B over several chunks per stage, with a smaller bubble and more messages"},
    {ScheduleKind::zb_h1, "1F1B with deferred weight gradients, which fill a part of the bubble"}};
NRL_ENUM(Precision, (automatic, float32, bfloat16, float16, fastest),
         ("auto", "float32", "bfloat16", "float16", "fastest"),
         (, {"fp32", "float32"}, {"bf16", "bfloat16"}, {"fp16", "float16"}, {"32", "float32"}))
NRL_ENUM(Fp8Format, (hybrid, e4m3), ("hybrid", "e4m3"), ())
/// The granularity of FP8 scales; fp8_recipes.h has the rules of each.
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
/// Parts of a layer, as recompute rules of slots name them (memory/layer_table.h). qkv and input can be
/// offloaded, but not recomputed.
NRL_ENUM(BlockModule, (norm, activation, gather, core_attn, mlp, moe, qkv, input),
         ("norm", "activation", "gather", "core_attn", "mlp", "moe", "qkv", "input"),
         (, {"layernorm", "norm"}, {"moe_act", "activation"}))
/// Initial numbers of the first factor of adapters.
NRL_ENUM(LoraInit, (kaiming, xavier), ("kaiming", "xavier"), ())
NRL_ENUM(OptimizerName, (adamw, adam_l2, sgd, muon), ("adamw", "adam_l2", "sgd", "muon"),
         (, {"torch.optim.AdamW", "adamw"}, {"AdamW", "adamw"}, {"adam", "adamw"},
          {"torch.optim.Adam", "adam_l2"}))
NRL_ENUM(LrScalingRule, (none, linear, sqrt), ("none", "linear", "sqrt"), ())
NRL_ENUM(LrDecayStyle, (constant, linear, cosine, wsd, inverse_square_root, step, cyclical),
         ("constant", "linear", "cosine", "WSD", "inverse-square-root", "step", "cyclical"),
         (, {"wsd", "WSD"}, {"inverse_square_root", "inverse-square-root"}, {"cosine_annealing", "cosine"}))
NRL_ENUM(ScheduleUnit, (optimizer_steps, samples), ("optimizer_steps", "samples"), ())
NRL_ENUM(OnNonfinite, (skip, stop), ("skip", "stop"), ())
/// How far the cause of a non-finite step is searched for.
NRL_ENUM(NanCheck, (off, loss, grads, all), ("off", "loss", "grads", "all"), ())
/// Watching for ranks that are lost or hang (parallel/control). `automatic`: where ranks can connect.
NRL_ENUM(ControlMode, (automatic, off, require), ("auto", "off", "require"), ())
NRL_ENUM(OnInstability, (off, warn, skip_step, rollback), ("off", "warn", "skip_step", "rollback"), ())
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
/// The format of the timelines of profiled steps.
NRL_ENUM(TraceFormat, (perfetto, chrome, none), ("perfetto", "chrome", "none"), ())
/// The quantities that a suite of comparisons measures.
NRL_ENUM(Quantity, (step_time, speed, planned_bytes, activation_bytes, optimizer_bytes, sent_bytes),
         ("step_time", "speed", "planned_bytes", "activation_bytes", "optimizer_bytes", "sent_bytes"), ())

}  // namespace nrl

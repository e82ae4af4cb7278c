// Keys that nrl-train knows and does not have: their feature is not built yet, or they are keys of another
// trainer without a counterpart. Nothing but data; add_other_keys() reads it.
#include <string>

#include "core/config/schema.h"

namespace nrl::config_detail {
namespace {

// clang-format off

/// Sections that have only keys that are not built yet.
struct Section {
  const char *path, *help;
};
constexpr Section sections[] = {
    {"policy.sequence_packing", "Packing of several sequences into one row."},
    {"policy.dynamic_batching", "Microbatches of about equal numbers of tokens."},
    {"logger.swanlab", "The run in SwanLab."},
    {"kernels.cuda_graph", "CUDA graphs; policy.cuda_graph captures whole steps."},
};

/// Only the default is accepted.
struct Planned {
  const char *path;
  const char *type;  ///< as Key::type_text() says it
  const char *fallback;  ///< the default, in canonical YAML
  const char *help;
  const char *alias = "";
  const char *feature = "";  ///< Key::feature
  const char *advice = "";  ///< what to do instead of writing true
};
constexpr Planned planned[] = {
    {"policy.sequence_packing.sequence_length_round", "integer from 1", "64",
     "Lengths are rounded up to a multiple of this."},
    {"policy.dynamic_batching.sequence_length_round", "integer from 1", "64",
     "Lengths are rounded up to a multiple of this."},
    {"policy.tokenizer.chat_template_kwargs", "text, or null", "null", "Variables of the chat template."},
    {"policy.offload_optimizer_for_logprob", "true or false", "false",
     "Optimizer state on the host while log-probabilities are computed."},
    {"data.add_bos", "true or false", "true", "A beginning token before an example; chat templates write their own."},
    {"data.add_eos", "true or false", "true", "The end token after a text or completion without a chat template."},
    {"data.add_generation_prompt", "true or false", "false", "End examples with the header of an answer."},
    {"checkpointing.metric_name", "text, or null", "null",
     "Keep the best checkpoints by this metric (\"val:loss\") instead of the newest."},
    {"checkpointing.higher_is_better", "true or false", "false", "Direction of metric_name."},
    {"checkpointing.save_hf", "every | last | never", "every",
     "Which checkpoints hold the weights under Hugging Face names; today all of them do."},
    {"logger.swanlab_enabled", "true or false", "false", "Report to SwanLab.", "", "",
     "write logger.tensorboard_enabled: true; swanlab convert reads the event files"},
    {"logger.swanlab.project", "text, or null", "null", "SwanLab project.", "", "logger.swanlab_enabled"},
    {"logger.swanlab.name", "text, or null", "null", "SwanLab run name.", "", "logger.swanlab_enabled"},
    {"kernels.cuda_graph.scope", "text, or null", "null", "Part of the step to capture."},
    {"dpo.reference", "precompute | online | worker_group", "precompute",
     "Where reference log-probabilities come from."},
    {"grpo.max_rollout_turns", "integer from 1", "1", "Turns of a generated conversation."},
    {"grpo.advantage_clip_low", "number, or null", "null", "Lower bound of advantages."},
    {"grpo.advantage_clip_high", "number, or null", "null", "Upper bound of advantages."},
    {"grpo.batch_multiplier", "number from 1", "1", "Prompts generated in excess for dynamic sampling."},
    {"grpo.val_batch_size", "integer from 1, or null", "null", "Prompts of an evaluation at a time."},
    {"grpo.val_start_at", "integer", "-1", "First step with an evaluation."},
    {"grpo.stop_at_validation_metric", "text, or null", "null", "Metric that ends the run."},
    {"grpo.stop_at_validation_threshold", "number, or null", "null", "Value of that metric."},
    {"grpo.seq_logprob_error_threshold", "number, or null", "null",
     "Leave out sequences whose generator and trainer disagree by more."},
    {"grpo.invalid_tool_call_advantage", "number, or null", "null", "Advantage of tokens of invalid tool calls."},
    {"grpo.malformed_thinking_advantage", "number, or null", "null", "Advantage of tokens of malformed thinking."},
    {"loss_fn.kl_input_clamp_value", "number above 0", "20", "Bound of log-probability differences in the divergence."},
    {"loss_fn.kl_output_clamp_value", "number above 0", "10", "Bound of the divergence of a token."},
    {"loss_fn.use_on_policy_kl_approximation", "true or false", "false",
     "Weights of importance for the divergence."},
    {"loss_fn.positive_example_nll_weight", "number from 0", "0",
     "Factor of the negative log-likelihood of tokens with a positive advantage."},
};

// Advice that several keys share.
constexpr const char* early = "remove it; all stages start to gather updated weights right after the update";
constexpr const char* one_implementation = "remove it; there is one implementation";
constexpr const char* groups =
    "separate groups of ranks are not supported yet: remove it; mpirun -n RANKS or srun starts the ranks of a run";
constexpr const char* python_class =
    "a class of Python; write algorithm: pretrain, sft, dpo, rm or grpo";
constexpr const char* ray_resources =
    "resources of Ray; start one process per GPU with mpirun -n RANKS or srun, and let cluster.gpus_per_node check "
    "their number";

constexpr const char* own_batches = "evaluations take batches of policy.train_global_batch_size; remove it";
constexpr const char* own_microbatches = "evaluations take microbatches of policy.train_micro_batch_size; remove it";
constexpr const char* rollouts_here =
    "rollouts come from files, or the policy generates them (data.train.format: prompts) and the list `reward` judges; "
    "remove it";
constexpr const char* own_generation = "the program generates rollouts itself, with the weights that it trains; remove it";
constexpr const char* teacher_files =
    "write reference.model_name: DIRECTORY, the teacher of what the student generates (algorithm: distill, "
    "data.train.format: prompts), or give rollouts with its numbers in files (topk_ids and topk_logprobs); remove it";
constexpr const char* no_logprob_batches =
    "log-probabilities are computed in the microbatches of training; remove it";
constexpr const char* fused = "a choice of kernels, which are fused here; remove it";
constexpr const char* graphs = "write policy.cuda_graph: true, or remove it";
constexpr const char* constant_decay = "weight decay is constant, policy.optimizer.weight_decay; remove it";
constexpr const char* no_draft = "prediction of several tokens is not supported; remove it";
constexpr const char* in_chunks = "logits are always computed a few rows at a time; remove it";
constexpr const char* no_moving_reference = "the reference is the model that the run starts from; remove it";
constexpr const char* only_reverse_kl = "the loss of pairs is that of the reverse KL divergence; remove it";

/// Keys and sections of other trainers, with what to do instead.
struct Other {
  const char *path, *advice;
  const char *idle = "";  ///< a value that asks for nothing
};
constexpr Other others[] = {
    {"sft.val_global_batch_size", own_batches},
    {"sft.val_micro_batch_size", own_microbatches},
    {"dpo.val_global_batch_size", own_batches},
    {"dpo.val_micro_batch_size", own_microbatches},
    {"rm.val_global_batch_size", own_batches},
    {"rm.val_micro_batch_size", own_microbatches},
    {"grpo.reward_shaping", "rollouts have their advantages; remove it"},
    {"grpo.reward_scaling", "rollouts have their advantages; remove it"},
    {"grpo.async_grpo", rollouts_here},
    {"reward_penalties", "rollouts have their advantages; remove it"},
    {"env", rollouts_here},
    {"data_plane", rollouts_here},
    {"on_policy_distillation", teacher_files},
    {"teacher", teacher_files},
    {"training.dataset_name", "datasets are not downloaded: write data.train.data_path: FILE.jsonl"},
    {"training.eval_strategy", "write the loop's val_period: STEPS", "steps"},
    {"training.rpo_alpha", "write dpo.sft_weight: ALPHA and dpo.sft_average_log_probs: true"},
    {"training.loss_weights", "write dpo.preference_weight and dpo.sft_weight"},
    {"training.precompute_ref_log_probs",
     "log-probabilities of the reference are always computed before training; remove it", "true"},
    {"training.f_divergence_type", only_reverse_kl, "reverse_kl"},
    {"training.ld_alpha", "all tokens of an answer count; remove it"},
    {"training.use_weighting", "pairs have equal weights; remove it", "false"},
    {"training.sync_ref_model", no_moving_reference, "false"},
    {"training.ref_model_mixup_alpha", no_moving_reference},
    {"training.ref_model_sync_steps", no_moving_reference},
    {"training.disable_dropout", "models with dropout are refused; set policy.model.attention_dropout: 0", "true"},
    {"training.importance_sampling_level", "sequence: write loss_fn.type: gspo, or rloo", "token"},
    {"training.use_vllm", rollouts_here, "false"},
    {"training.num_iterations", "each rollout is in one step of an epoch; write grpo.max_num_epochs", "1"},
    {"training.scale_rewards", "rollouts have their advantages; remove it"},
    {"data.train.prompt_key", "write data.input_key for rollouts; the prompt of a preference is under \"prompt\"", "prompt"},
    {"data.default.prompt_key", "write data.input_key for rollouts; the prompt of a preference is under \"prompt\"", "prompt"},
    {"data.default.chosen_key", "the key is \"chosen\"; remove it", "chosen"},
    {"data.default.rejected_key", "the key is \"rejected\"; remove it", "rejected"},
    {"data.default.dataset_name", "records are read by data.train.format; remove it"},
    {"data.default.processor", "records are read by data.train.format; remove it"},
    {"data.default.env_name", rollouts_here},
    {"data.train.seed", "write data.seed"},
    {"data.train.split_validation_size", "give data.validation.data_path"},
    {"data.use_multiple_dataloader", "data.train.data_path may be a list; remove it", "false"},
    {"cluster.master_port_range_low", "ports are those of mpirun or srun; remove it"},
    {"cluster.master_port_range_high", "ports are those of mpirun or srun; remove it"},
    {"logger.num_val_samples_to_print", "write logger.sample_period, for samples of text", "0"},
    {"data.train.dataset_name", "datasets are not downloaded: write data.train.data_path: FILE.jsonl"},
    {"data.validation.dataset_name", "datasets are not downloaded: write data.validation.data_path: FILE.jsonl"},
    {"data.train.split", "datasets are not downloaded: write data.train.data_path: FILE.jsonl"},
    {"data.validation.split", "datasets are not downloaded: write data.validation.data_path: FILE.jsonl"},
    {"include", "use 'defaults: base.yaml' to inherit from another file"},
    {"model.config", "write the model's keys under policy.model"},
    {"distributed.align_param_gather", early},
    {"policy.megatron_cfg.distributed_data_parallel_config.align_param_gather", early},
    {"model.backend", one_implementation},
    {"policy.dtensor_cfg._v2", one_implementation, "true"},
    {"policy.dtensor_cfg.automodel_kwargs", "keyword arguments of Python; remove it"},
    {"policy.dtensor_cfg.env_vars", "set environment variables in the launcher"},
    {"policy.megatron_cfg.env_vars", "set environment variables in the launcher"},
    {"policy.megatron_cfg.checkpoint", "checkpoints are always Hugging Face directories; remove it"},
    {"policy.megatron_cfg.apply_rope_fusion", fused, "true"},
    {"policy.megatron_cfg.bias_activation_fusion", fused, "true"},
    {"policy.megatron_cfg.moe_permute_fusion", fused, "true"},
    {"policy.megatron_cfg.gradient_accumulation_fusion", fused, "false"},
    {"policy.megatron_cfg.use_fused_weighted_squared_relu", fused, "false"},
    {"policy.megatron_cfg.use_fused_linear_logprobs", in_chunks, "false"},
    {"policy.megatron_cfg.fused_linear_logprobs_chunk_size", in_chunks, "256"},
    {"policy.megatron_cfg.defer_fp32_logits", in_chunks, "false"},
    {"policy.megatron_cfg.cuda_graph_impl", graphs, "none"},
    {"policy.megatron_cfg.cuda_graph_modules", graphs},
    {"policy.megatron_cfg.cuda_graph_warmup_steps", graphs, "3"},
    {"policy.megatron_cfg.force_reconvert_from_hf", "weights are read from policy.model_name; remove it", "false"},
    {"policy.megatron_cfg.freeze_moe_router", "write policy.freeze: [gate]", "false"},
    {"policy.megatron_cfg.model_overrides", "write the model's keys under policy.model"},
    {"policy.megatron_cfg.moe_enable_deepep", "write policy.model.moe_token_dispatcher_type", "false"},
    {"policy.megatron_cfg.moe_per_layer_logging", "remove it; the step line has the load of experts", "false"},
    {"policy.megatron_cfg.moe_router_dtype", "routers compute in fp32; remove it"},
    {"policy.megatron_cfg.moe_shared_expert_overlap", one_implementation, "false"},
    {"policy.megatron_cfg.mtp_num_layers", no_draft, "0"},
    {"policy.megatron_cfg.mtp_loss_scaling_factor", no_draft, "0.0"},
    {"policy.megatron_cfg.mtp_use_repeated_layer", no_draft, "false"},
    {"policy.megatron_cfg.mtp_detach_heads", no_draft, "false"},
    {"policy.megatron_cfg.peft", "write policy.lora"},
    {"policy.megatron_cfg.pipeline_dtype", "messages have the type of policy.precision; remove it",
     "${policy.precision}"},
    {"policy.megatron_cfg.use_gloo_process_groups", one_implementation, "false"},
    {"policy.megatron_cfg.optimizer.params_dtype", "master weights are fp32; remove it", "float32"},
    {"policy.megatron_cfg.optimizer.sgd_momentum", "of an optimizer that is not supported; remove it", "0.9"},
    {"policy.megatron_cfg.optimizer.overlap_cpu_optimizer_d2h_h2d", "copies always overlap; remove it", "false"},
    {"policy.megatron_cfg.distributed_data_parallel_config.use_custom_fsdp", "write distributed.shard_strategy",
     "false"},
    {"policy.megatron_cfg.scheduler.start_weight_decay", constant_decay,
     "${policy.megatron_cfg.optimizer.weight_decay}"},
    {"policy.megatron_cfg.scheduler.end_weight_decay", constant_decay,
     "${policy.megatron_cfg.optimizer.weight_decay}"},
    {"policy.megatron_cfg.scheduler.weight_decay_incr_style", constant_decay, "constant"},
    {"policy.draft", "drafts for generation are not supported; remove it"},
    {"policy.tokenizer.use_fastokens", one_implementation, "false"},
    {"policy.logprob_chunk_size", in_chunks},
    {"policy.megatron_cfg.optimizer.adam_beta1", "write policy.optimizer.betas: [beta1, beta2]"},
    {"policy.megatron_cfg.optimizer.adam_beta2", "write policy.optimizer.betas: [beta1, beta2]"},
    {"policy.megatron_cfg.optimizer.optimizer_offload_fraction",
     "write the fraction as policy.offload_optimizer: 0.5 (0: false)"},
    {"policy.megatron_cfg.scheduler.lr_warmup_init", "the warm-up starts at 0; remove it"},
    {"policy.optimizer.kwargs.foreach", "a switch of PyTorch; remove it", "false"},
    {"policy.optimizer.kwargs.fused", "a switch of PyTorch; remove it", "false"},
    {"policy.dtensor_cfg.lora_cfg.dropout_position", "dropout applies to the adapter's input (pre); remove it"},
    {"policy.dtensor_cfg.lora_cfg.match_all_linear", "write policy.lora.target_modules: all-linear (true), or a list"},
    {"policy.dtensor_cfg.lora_cfg.use_triton", one_implementation, "true"},
    {"policy.generation_batch_size", rollouts_here},
    {"policy.generation.backend", own_generation},
    {"policy.generation.colocated", own_generation},
    {"policy.generation.vllm_cfg", own_generation},
    {"policy.generation.vllm_kwargs", own_generation},
    {"policy.generation.mcore_generation_config", own_generation},
    {"policy.generation.top_p", "rollouts are sampled from all tokens; remove it", "1.0"},
    {"policy.generation.top_k", "rollouts are sampled from all tokens; remove it", "null"},
    {"policy.generation.stop_token_ids", "answers end with the tokenizer's end tokens; remove it", "null"},
    {"policy.generation.stop_strings", "answers end with the tokenizer's end tokens; remove it", "null"},
    {"policy.logprob_batch_size", no_logprob_batches},
    {"policy.make_sequence_length_divisible_by", "lengths are padded as the grid needs; remove it",
     "${policy.dtensor_cfg.tensor_parallel_size}"},
    {"policy.sequence_packing.microbatch_order", "microbatches have the packer's order; remove it", "packer"},
    {"policy.sequence_packing.logprob_mb_tokens", no_logprob_batches},
    {"policy.dynamic_batching.logprob_mb_tokens", no_logprob_batches},
    {"logger.wandb.log_nemo_gym_full_result_tables", rollouts_here, "false"},
    {"policy.reward_model_cfg", "algorithm: rm trains a scalar head with the loss of Bradley and Terry; remove it"},
    {"policy.dtensor_cfg.custom_parallel_plan", "Python code cannot be used; remove it"},
    {"policy.dtensor_cfg.clear_cache_every_n_steps", "memory is planned before the run; remove it"},
    {"policy.megatron_cfg.empty_unused_memory_level", "memory is planned before the run; remove it"},
    {"training.custom_loss", "Python code cannot be used; remove it"},
    {"training.autocast", "write policy.precision: bfloat16 or float32"},
    {"distributed.strategy", "write distributed.shard_strategy"},
    {"hardware", "describes a machine for planning, which is not supported yet; remove it"},
    {"worker_groups", groups},
    {"worker_group", groups},
    {"trainer_class", python_class},
    {"cluster.trainer_class", python_class},
    {"distributed.trainer_class", python_class},
    {"training.trainer_class", python_class},
    {"policy.trainer_class", python_class},
    {"resources_per_worker", ray_resources},
    {"cluster.resources_per_worker", ray_resources},
    {"distributed.resources_per_worker", ray_resources},
    {"training.resources_per_worker", ray_resources},
    {"policy.resources_per_worker", ray_resources},
    {"checkpointing.model_save_format", "checkpoints are always safetensors; remove it"},
    {"checkpointing.save_scheduler", "the position in the schedule is always saved; remove it"},
    {"checkpointing.save_consolidated", "checkpoints are always Hugging Face directories; remove it"},
    {"policy.fusions.masked_softmax", "attention never stores its scores; remove it", "true"},
    {"policy.fusions.cross_entropy", "one kernel computes the loss and its gradient; remove it", "true"},
    {"policy.fusions.grad_accum", "GEMMs add to the gradients; remove it", "true"},
    {"policy.fusions.bias_dropout", "the norm drops out and adds; remove it", "true"},
    {"policy.fusions.rope", "one kernel rotates queries and keys; remove it", "true"},
    {"monitoring.metrics", "all metrics are always recorded; remove it"},
    {"monitoring.visualization.grafana",
     "Grafana draws what Prometheus reads: write monitoring.visualization.prometheus: true", "false"},
    {"monitoring.otlp",
     "collectors of OpenTelemetry read Prometheus: write monitoring.visualization.prometheus: true"},
    {"profiling.record_shapes", "ranges have the FLOPs and bytes of each call instead of shapes; remove it", "false"},
    {"profiling.with_stack", "ranges are named by layer and operation instead of a stack; remove it", "false"},
    {"profiling.profile_memory", "a window always has its memory (profile.json); remove it", "true"},
    {"training.manual_gc", "there is no garbage collector; remove it"},
    {"env_vars", "set environment variables in the launcher"},
    {"policy.hf_config", "write the keys under policy.model"},
};

// clang-format on

}  // namespace

void add_other_keys(Table& t) {
  for (const Section& s : sections) t.section(s.path, s.help);
  for (const Planned& p : planned) {
    KeyBuilder key = t.planned(p.path, p.type, p.fallback).help(p.help);
    if (*p.alias) key.alias(p.alias);
    if (*p.feature) key.feature(p.feature);
    if (*p.advice) key.advice("true", p.advice);
  }
  for (const Other& o : others) t.foreign(o.path, o.advice, o.idle);
}

}  // namespace nrl::config_detail

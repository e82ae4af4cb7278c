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
    {"logger.tensorboard", "TensorBoard event files."},
    {"logger.wandb", "The run at Weights & Biases."},
    {"logger.gpu_monitoring", "Sampling of the GPUs by logger.monitor_gpus."},
    {"kernels.cuda_graph", "CUDA graphs; policy.cuda_graph captures whole steps."},
    {"monitoring.stability", "Instability of the loss."},
    {"monitoring.visualization", "Live views of the metrics."},
    {"monitoring.alerting", "Alerts when a metric crosses a threshold."},
    {"monitoring.alerting.thresholds", "The thresholds of alerts."},
    {"monitoring.analysis", "Statistical rules over the metrics."},
    {"profiling.nsys", "Nsight Systems, started and stopped by the run."},
};

/// Only the default is accepted.
struct Planned {
  const char *path;
  const char *type;  ///< as Key::type_text() says it
  const char *fallback;  ///< the default, in canonical YAML
  const char *help;
  const char *alias = "";
};
constexpr Planned planned[] = {
    {"policy.optimizer.main_params_dtype", "fp32 | fp16", "fp32",
     "Type of the master weights.", "policy.megatron_cfg.optimizer.main_params_dtype"},
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
    {"checkpointing.is_async", "true or false", "false", "Write checkpoints during training."},
    {"checkpointing.metric_name", "text, or null", "null",
     "Keep the best checkpoints by this metric (\"val:loss\") instead of the newest."},
    {"checkpointing.higher_is_better", "true or false", "false", "Direction of metric_name."},
    {"checkpointing.checkpoint_must_save_by", "text, or null", "null",
     "Time (DD:HH:MM:SS) after which to save and stop."},
    {"checkpointing.save_hf", "every | last | never", "every",
     "Which checkpoints hold the weights under Hugging Face names; today all of them do."},
    {"logger.tensorboard_enabled", "true or false", "false", "Write TensorBoard event files."},
    {"logger.wandb_enabled", "true or false", "false", "Write a Weights & Biases run."},
    {"logger.mlflow_enabled", "true or false", "false", "Report to MLflow."},
    {"logger.swanlab_enabled", "true or false", "false", "Report to SwanLab."},
    {"logger.monitor_gpus", "true or false", "false", "Sample utilization and memory of the GPUs."},
    {"logger.tensorboard.log_dir", "text, or null", "null", "Directory of the TensorBoard files."},
    {"logger.wandb.project", "text, or null", "null", "Weights & Biases project."},
    {"logger.wandb.name", "text, or null", "null", "Weights & Biases run name."},
    {"logger.gpu_monitoring.collection_interval", "number above 0", "10", "Seconds between samples."},
    {"logger.gpu_monitoring.flush_interval", "number above 0", "10", "Seconds between writes."},
    {"kernels.cpu_binding", "text", "none", "Cores of the threads: auto, none, or a list."},
    {"kernels.cuda_graph.scope", "text, or null", "null", "Part of the step to capture."},
    {"monitoring.interval", "number above 0", "30", "Seconds between evaluations of the rules."},
    {"monitoring.metrics", "list of texts, or one alone", "[]", "Metrics to watch."},
    {"monitoring.nan_check", "off | loss | grads | all", "loss",
     "Name the first tensor with a NaN; the loss and the gradient norm are always checked (pretrain.on_nonfinite)."},
    {"monitoring.stability.window", "integer from 2", "100", "Length of the window, in steps."},
    {"monitoring.stability.cv_threshold", "number above 0", "0.1",
     "Coefficient of variation of the loss that counts as unstable."},
    {"monitoring.stability.spike_factor", "number above 1", "10", "Largest over smallest loss."},
    {"monitoring.stability.on_instability", "off | warn | skip_step | rollback", "off", "What to do on instability."},
    {"monitoring.stability.lr_factor", "number above 0 to 1", "0.5", "Factor of lr after a rollback."},
    {"monitoring.stability.max_recoveries", "integer from 0", "3", "Rollbacks before giving up."},
    {"monitoring.visualization.tensorboard", "true or false", "false", "A live view."},
    {"monitoring.visualization.dashboard", "true or false", "false", "A live view."},
    {"monitoring.visualization.prometheus", "true or false", "false", "A live view."},
    {"monitoring.visualization.grafana", "true or false", "false", "A live view."},
    {"monitoring.visualization.port", "integer from 1 to 65535", "8000", "Port of the Prometheus endpoint."},
    {"monitoring.alerting.enabled", "true or false", "false", "Evaluate the thresholds."},
    {"monitoring.alerting.email_notifications", "true or false", "false", "Mail an alert."},
    {"monitoring.alerting.slack_notifications", "true or false", "false", "Post an alert."},
    {"monitoring.alerting.command", "text, or null", "null", "Command run with every alert."},
    {"monitoring.alerting.thresholds.loss_increase", "number above 0", "0.1", "Relative increase."},
    {"monitoring.alerting.thresholds.gpu_memory", "number above 0 to 1", "0.9", "Fraction."},
    {"monitoring.alerting.thresholds.cpu_usage", "number above 0 to 1", "0.95", "Fraction."},
    {"monitoring.alerting.thresholds.training_speed", "number above 0 to 1", "0.5", "Fraction of the baseline."},
    {"monitoring.analysis.trend_analysis", "true or false", "false", "A statistical rule."},
    {"monitoring.analysis.anomaly_detection", "true or false", "false", "A statistical rule."},
    {"monitoring.analysis.performance_regression", "true or false", "false", "A statistical rule."},
    {"profiling.trace", "chrome", "chrome", "Format of the trace."},
    {"profiling.record_shapes", "true or false", "false", "Record shapes of operands."},
    {"profiling.profile_memory", "true or false", "false", "Record memory of every operation."},
    {"profiling.memory_snapshot", "true or false", "false", "Record every allocation with its lifetime."},
    {"profiling.nsys.steps", "text, or null", "null", "Steps between profiler start and stop."},
    {"profiling.nsys.workers", "list of texts, or one alone", "[]", "Names of the workers to profile."},
    {"dpo.max_num_epochs", "integer from 1", "1", "Passes over the data."},
    {"dpo.max_num_steps", "integer from 1", "150", "Optimizer steps."},
    {"dpo.reference_policy_kl_penalty", "number above 0", "0.05",
     "Strength of the KL penalty (beta).", "training.beta"},
    {"dpo.loss_type", "sigmoid | ipo | hinge | cdpo | sigmoid_norm", "sigmoid",
     "Preference loss.", "training.loss_type"},
    {"dpo.preference_average_log_probs", "true or false", "false", "Mean instead of sum over tokens."},
    {"dpo.preference_loss_weight", "number from 0", "1", "Weight of the preference loss."},
    {"dpo.sft_loss_weight", "number from 0", "0", "Weight of the likelihood of the chosen answer."},
    {"dpo.reference", "precompute | online | worker_group", "precompute",
     "Where reference log-probabilities come from."},
    {"dpo.val_period", "integer from 0", "25", "Steps between evaluations."},
};

// Advice that several keys share.
constexpr const char* early = "remove it; all stages start to gather updated weights right after the update";
constexpr const char* one_implementation = "remove it; there is one implementation";
constexpr const char* groups =
    "separate groups of ranks are not supported yet: remove it; mpirun -n RANKS or srun starts the ranks of a run";
constexpr const char* python_class =
    "a class of Python; write algorithm: pretrain or sft";
constexpr const char* ray_resources =
    "resources of Ray; start one process per GPU with mpirun -n RANKS or srun, and let cluster.gpus_per_node check "
    "their number";

/// Keys and sections of other trainers, with what to do instead.
struct Other {
  const char *path, *advice;
};
constexpr Other others[] = {
    {"sft.val_global_batch_size", "evaluations take batches of policy.train_global_batch_size; remove it"},
    {"sft.val_micro_batch_size", "evaluations take microbatches of policy.train_micro_batch_size; remove it"},
    {"data.default.processor", "records are read by data.train.format; remove it"},
    {"data.train.dataset_name", "datasets are not downloaded: write data.train.data_path: FILE.jsonl"},
    {"data.validation.dataset_name", "datasets are not downloaded: write data.validation.data_path: FILE.jsonl"},
    {"data.train.split", "datasets are not downloaded: write data.train.data_path: FILE.jsonl"},
    {"data.validation.split", "datasets are not downloaded: write data.validation.data_path: FILE.jsonl"},
    {"rm", "the section of another algorithm (rm); this version trains with algorithm: pretrain or sft"},
    {"grpo", "the section of another algorithm (grpo); this version trains with algorithm: pretrain or sft"},
    {"distill", "the section of another algorithm (distill); this version trains with algorithm: pretrain or sft"},
    {"loss_fn", "the section of another algorithm (loss_fn); this version trains with algorithm: pretrain or sft"},
    {"include", "use 'defaults: base.yaml' to inherit from another file"},
    {"model.config", "write the model's keys under policy.model"},
    {"distributed.align_param_gather", early},
    {"policy.megatron_cfg.distributed_data_parallel_config.align_param_gather", early},
    {"model.backend", one_implementation},
    {"policy.dtensor_cfg.enabled", one_implementation},
    {"policy.megatron_cfg.enabled", one_implementation},
    {"policy.megatron_cfg.optimizer.adam_beta1", "write policy.optimizer.betas: [beta1, beta2]"},
    {"policy.megatron_cfg.optimizer.adam_beta2", "write policy.optimizer.betas: [beta1, beta2]"},
    {"policy.megatron_cfg.optimizer.optimizer_offload_fraction",
     "write the fraction as policy.offload_optimizer: 0.5 (0: false)"},
    {"policy.megatron_cfg.scheduler.lr_warmup_init", "the warm-up starts at 0; remove it"},
    {"policy.optimizer.kwargs.foreach", "a switch of PyTorch; remove it"},
    {"policy.optimizer.kwargs.fused", "a switch of PyTorch; remove it"},
    {"policy.dtensor_cfg.lora_cfg.dropout_position", "dropout applies to the adapter's input (pre); remove it"},
    {"policy.dtensor_cfg.lora_cfg.match_all_linear", "write policy.lora.target_modules: all-linear (true), or a list"},
    {"policy.dtensor_cfg.lora_cfg.use_triton", one_implementation},
    {"policy.generation_batch_size", "there is no generation during training; remove it"},
    {"policy.generation", "there is no generation during training; remove it"},
    {"policy.logprob_batch_size", "there is no separate log-probability pass; remove it"},
    {"policy.make_sequence_length_divisible_by", "lengths are padded as the grid needs; remove it"},
    {"policy.reward_model_cfg", "belongs to algorithm rm, which is not supported yet"},
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
    {"env_vars", "set environment variables in the launcher"},
    {"policy.hf_config", "write the keys under policy.model"},
};

// clang-format on

}  // namespace

void add_other_keys(Table& t) {
  for (const Section& s : sections) t.section(s.path, s.help);
  t.section("dpo", "The loop of algorithm dpo.", {Algorithm::dpo});
  for (const Planned& p : planned) {
    KeyBuilder key = t.planned(p.path, p.type, p.fallback).help(p.help);
    if (*p.alias) key.alias(p.alias);
  }
  for (const Other& o : others) t.foreign(o.path, o.advice);
}

}  // namespace nrl::config_detail

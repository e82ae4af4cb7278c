#pragma once
// For every key of the schema: two values of it and what differs between them. A key that does nothing has no
// place in the schema.

#include <string>
#include <vector>

namespace nrl::test {

enum class Observed {
  rows,       ///< losses, norms, learning rates and texts in metrics.jsonl, and their steps
  plan,       ///< batch, parameters, memory and buckets of the plan for two ranks
  exit,       ///< whether the run is refused, which it is with one of the values
  refused,    ///< that it is, with any value
  files,      ///< which files the run leaves
  config,     ///< config.json of the checkpoint
  lines,      ///< standard output, numbers left out
  banner,     ///< the line "device" of standard output, or that there is none
  elsewhere,  ///< `a` names the test, `b` its file
  nothing,    ///< `a` says why
};

/// `context`: keys that both runs have, separated by blanks, behind the name of the model.
struct Effect {
  const char* key;
  Observed observed;
  const char* a;
  const char* b;
  const char* context = "llama";
};

/// The keys of a rotary scaling, without their section, which has two names.
inline const Effect rope_effects[] = {
    {"rope_type", Observed::rows, "linear", "yarn", "qwen3 @.factor=2"},
    {"factor", Observed::rows, "2", "4", "qwen3 @.rope_type=linear"},
    {"low_freq_factor", Observed::rows, "1", "2",
     "qwen3 @.rope_type=llama3 @.factor=4 @.high_freq_factor=4 @.original_max_position_embeddings=64"},
    {"high_freq_factor", Observed::rows, "4", "8",
     "qwen3 @.rope_type=llama3 @.factor=4 @.low_freq_factor=1 @.original_max_position_embeddings=64"},
    {"original_max_position_embeddings", Observed::rows, "64", "16",
     "qwen3 @.rope_type=llama3 @.factor=4 @.low_freq_factor=1 @.high_freq_factor=4"},
    {"attention_factor", Observed::rows, "1", "2", "qwen3 @.rope_type=yarn @.factor=2"},
    {"beta_fast", Observed::rows, "8", "1.5", "qwen3 @.rope_type=yarn @.factor=2"},
    {"beta_slow", Observed::rows, "1", "0.25", "qwen3 @.rope_type=yarn @.factor=2"},
    {"truncate", Observed::rows, "true", "false", "qwen3 @.rope_type=yarn @.factor=2"},
    {"mscale", Observed::rows, "1", "2", "qwen3 @.rope_type=yarn @.factor=2 @.mscale_all_dim=1"},
    {"mscale_all_dim", Observed::rows, "1", "2", "qwen3 @.rope_type=yarn @.factor=2 @.mscale=1"},
    {"short_factor", Observed::exit, "[]", "[1]", "qwen3 @.rope_type=yarn @.factor=2"},
    {"long_factor", Observed::exit, "[]", "[1]", "qwen3 @.rope_type=yarn @.factor=2"},
};

inline const Effect model_effects[] = {
    {"model_type", Observed::plan, "llama", "qwen2"},
    {"vocab_size", Observed::plan, "272", "280"},
    {"hidden_size", Observed::plan, "16", "32"},
    {"intermediate_size", Observed::plan, "24", "32"},
    {"num_hidden_layers", Observed::plan, "2", "3"},
    {"num_attention_heads", Observed::plan, "4", "2", "qwen3"},
    {"num_key_value_heads", Observed::plan, "2", "4"},
    {"head_dim", Observed::plan, "4", "8"},
    {"hidden_act", Observed::rows, "silu", "gelu"},
    {"max_position_embeddings", Observed::config, "64", "128"},
    {"initializer_range", Observed::rows, "0.02", "0.04"},
    {"rms_norm_eps", Observed::rows, "1e-6", "1e-3"},
    {"layer_norm_epsilon", Observed::rows, "1e-5", "1e-3", "gpt2"},
    {"tie_word_embeddings", Observed::plan, "false", "true"},
    {"rope_theta", Observed::rows, "10000", "100"},
    {"partial_rotary_factor", Observed::rows, "1", "0.5"},
    {"attention_bias", Observed::plan, "false", "true"},
    {"mlp_bias", Observed::plan, "false", "true"},
    {"attention_dropout", Observed::rows, "0", "0.5"},
    {"sliding_window", Observed::rows, "2", "4", "mistral"},
    {"use_sliding_window", Observed::exit, "false", "true", "qwen3 =sliding_window=4 =max_window_layers=1"},
    {"max_window_layers", Observed::exit, "2", "1", "qwen3 =sliding_window=4 =use_sliding_window=true"},
    {"n_embd", Observed::plan, "16", "32", "gpt2"},
    {"n_layer", Observed::plan, "2", "3", "gpt2"},
    {"n_head", Observed::rows, "4", "2", "gpt2"},
    {"n_inner", Observed::plan, "64", "32", "gpt2"},
    {"n_positions", Observed::plan, "64", "32", "gpt2"},
    {"n_ctx", Observed::exit, "64", "32", "gpt2"},
    {"activation_function", Observed::rows, "gelu_new", "gelu", "gpt2"},
    {"resid_pdrop", Observed::rows, "0", "0.5", "gpt2"},
    {"embd_pdrop", Observed::rows, "0", "0.5", "gpt2"},
    {"attn_pdrop", Observed::rows, "0", "0.5", "gpt2"},
    {"scale_attn_weights", Observed::exit, "true", "false", "gpt2"},
    {"scale_attn_by_inverse_layer_idx", Observed::exit, "false", "true", "gpt2"},
    {"reorder_and_upcast_attn", Observed::exit, "false", "true", "gpt2"},
    // Of families that do not exist yet, or of none: refused unless they ask for nothing.
    {"hidden_dropout", Observed::exit, "0", "0.1"},
    {"hidden_activation", Observed::exit, "null", "silu"},
    {"layer_norm_eps", Observed::refused, "1e-5", "1e-3"},
    {"layer_types", Observed::exit, "null", "[sliding_attention, full_attention]"},
    {"num_local_experts", Observed::refused, "8", "4"},
    {"num_experts", Observed::refused, "8", "4"},
    {"num_experts_per_tok", Observed::refused, "2", "4"},
    {"moe_intermediate_size", Observed::refused, "8", "4"},
    {"router_aux_loss_coef", Observed::exit, "0", "0.1"},
    {"norm_topk_prob", Observed::exit, "false", "true"},
    {"decoder_sparse_step", Observed::refused, "1", "2"},
    {"mlp_only_layers", Observed::exit, "[]", "[0]"},
    {"query_pre_attn_scalar", Observed::refused, "8", "4"},
    {"attn_logit_softcapping", Observed::exit, "null", "50"},
    {"final_logit_softcapping", Observed::exit, "null", "30"},
    // Carried into the config.json of checkpoints, for programs that read them.
    {"use_cache", Observed::config, "false", "true"},
    {"pretraining_tp", Observed::config, "1", "2"},
    {"bos_token_id", Observed::config, "1", "2"},
    {"eos_token_id", Observed::config, "1", "[1, 2]"},
    {"pad_token_id", Observed::config, "1", "2"},
    {"transformers_version", Observed::config, "a", "b"},
    {"architectures", Observed::nothing, "follows from model_type", ""},
    {"torch_dtype", Observed::nothing, "follows from policy.precision", ""},
    {"dtype", Observed::nothing, "follows from policy.precision", ""},
    {"rope_scaling", Observed::nothing, "a section; null stands for none", ""},
    {"rope_parameters", Observed::nothing, "a section; null stands for none", ""},
    {"rope_parameters.rope_theta", Observed::rows, "10000", "100"},
};

inline const Effect effects[] = {
    {"device", Observed::banner, "cpu", "cuda"},
    {"cluster.num_nodes", Observed::exit, "1", "2"},
    {"cluster.world_size", Observed::exit, "1", "2"},
    {"cluster.gpus_per_node", Observed::exit, "1", "2"},
    {"cluster.segment_size", Observed::exit, "1", "2"},
    {"distributed.backend", Observed::exit, "mpi", "nccl"},
    {"distributed.data_parallel_size", Observed::exit, "1", "2"},
    {"distributed.tensor_parallel_size", Observed::plan, "1", "2"},
    {"distributed.sequence_parallel", Observed::plan, "true", "false",
     "llama distributed.tensor_parallel_size=2"},
    {"distributed.shard_strategy", Observed::plan, "ddp", "optim"},
    {"distributed.bucket_size_mb", Observed::plan, "40", "0.001"},
    {"distributed.overlap_grad_reduce", Observed::nothing, "speed only", ""},
    {"distributed.overlap_param_gather", Observed::nothing, "speed only", ""},
    {"distributed.dp_replicate_size", Observed::exit, "1", "2", "llama distributed.shard_strategy=optim"},
    {"distributed.grad_reduce_dtype", Observed::elsewhere,
     "distributed.grad_reduce_dtype=", "engine/sharding_test.cpp"},
    {"distributed.grad_reduce_fp32_accumulation", Observed::elsewhere,
     "distributed.grad_reduce_fp32_accumulation=", "engine/sharding_test.cpp"},
    {"policy.model_name", Observed::elsewhere, "initial)", "cli/run.sh"},
    {"policy.tokenizer.name", Observed::exit, "null", "bytes", "llama logger.sample_period=1"},
    {"policy.precision", Observed::plan, "float32", "bfloat16"},
    {"policy.logits_dtype", Observed::rows, "float32", "bfloat16", "llama policy.precision=bfloat16"},
    {"policy.train_global_batch_size", Observed::plan, "4", "8"},
    {"policy.train_micro_batch_size", Observed::plan, "1", "2"},
    {"policy.gradient_accumulation_steps", Observed::plan, "1", "2",
     "llama policy.train_micro_batch_size=auto"},
    {"policy.max_total_sequence_length", Observed::plan, "8", "16"},
    {"policy.max_grad_norm", Observed::rows, "null", "0.01"},
    {"policy.attention.type", Observed::nothing, "auto takes the only kernel there is", ""},
    {"policy.attention.memory_efficient", Observed::exit, "true", "false"},
    {"policy.cuda_graph", Observed::exit, "false", "true"},
    {"policy.recompute.granularity", Observed::plan, "selective", "none"},
    {"policy.recompute.modules", Observed::plan, "[norm]", "[norm, activation]"},
    {"policy.optimizer.lr", Observed::rows, "1e-3", "1e-2"},
    {"policy.optimizer.weight_decay", Observed::rows, "0", "1"},
    {"policy.optimizer.betas", Observed::rows, "[0.9, 0.95]", "[0.8, 0.95]"},
    {"policy.optimizer.eps", Observed::rows, "1e-8", "1e-3"},
    {"policy.optimizer.lr_scaling.rule", Observed::rows, "none", "linear"},
    {"policy.optimizer.lr_scaling.base_batch_size", Observed::rows, "2", "8",
     "llama policy.optimizer.lr_scaling.rule=sqrt"},
    {"policy.scheduler.lr_decay_style", Observed::rows, "linear", "cosine"},
    {"policy.scheduler.lr_warmup_iters", Observed::rows, "0", "2"},
    {"policy.scheduler.warmup_ratio", Observed::rows, "0", "0.5"},
    {"policy.scheduler.lr_decay_iters", Observed::rows, "4", "8",
     "llama policy.scheduler.lr_decay_style=linear"},
    {"policy.scheduler.lr_wsd_decay_iters", Observed::rows, "2", "3",
     "llama policy.scheduler.lr_decay_style=WSD"},
    {"policy.scheduler.min_lr", Observed::rows, "0", "0.001", "llama policy.scheduler.lr_decay_style=linear"},
    {"data.train.data_path", Observed::rows, "DIR/corpus", "DIR/other"},
    {"data.train.weights", Observed::rows, "[1, 1]", "[1, 3]",
     "llama data.train.data_path=[DIR/corpus,DIR/other]"},
    {"data.validation.data_path", Observed::rows, "DIR/corpus", "DIR/other", "llama pretrain.val_period=1"},
    {"data.validation.weights", Observed::rows, "[1, 1]", "[1, 3]",
     "llama pretrain.val_period=1 pretrain.val_batches=4 data.validation.data_path=[DIR/corpus,DIR/other]"},
    {"data.split", Observed::rows, "[1, 1, 0]", "[3, 1, 0]", "llama pretrain.val_period=1"},
    {"data.seed", Observed::rows, "1", "2"},
    {"data.reset_position_ids", Observed::rows, "false", "true",
     "llama policy.tokenizer.name=bytes data.train.data_path=DIR/documents"},
    {"data.reset_attention_mask", Observed::rows, "false", "true",
     "llama policy.tokenizer.name=bytes data.train.data_path=DIR/documents"},
    {"data.eod_mask_loss", Observed::rows, "false", "true",
     "llama policy.tokenizer.name=bytes data.train.data_path=DIR/documents"},
    {"data.num_workers", Observed::nothing, "speed only", ""},
    {"data.prefetch_batches", Observed::nothing, "speed and memory of the host only", ""},
    {"pretrain.max_num_steps", Observed::rows, "3", "4"},
    {"pretrain.max_num_epochs", Observed::rows, "1", "2",
     "llama pretrain.max_num_steps=null policy.train_global_batch_size=64"},
    {"pretrain.val_period", Observed::rows, "2", "3", "llama data.split=[1,1,0]"},
    {"pretrain.val_batches", Observed::rows, "1", "2", "llama data.split=[1,1,0] pretrain.val_at_end=true"},
    {"pretrain.val_at_start", Observed::rows, "false", "true", "llama data.split=[1,1,0]"},
    {"pretrain.val_at_end", Observed::rows, "false", "true", "llama data.split=[1,1,0]"},
    {"pretrain.seed", Observed::rows, "1", "2", "llama data.seed=1"},
    {"pretrain.on_nonfinite", Observed::elsewhere, "pretrain.on_nonfinite=stop", "train/nonfinite_test.cpp"},
    {"pretrain.max_nonfinite_steps", Observed::elsewhere, "pretrain.max_nonfinite_steps=2",
     "train/nonfinite_test.cpp"},
    {"checkpointing.enabled", Observed::files, "true", "false"},
    {"checkpointing.checkpoint_dir", Observed::files, "DIR/run/c", "DIR/run/d"},
    {"checkpointing.save_period", Observed::files, "1", "2", "llama checkpointing.keep_latest_k=null"},
    {"checkpointing.keep_latest_k", Observed::files, "1", "2", "llama checkpointing.save_period=1"},
    {"checkpointing.resume", Observed::elsewhere, "checkpointing.resume=", "train/events_test.cpp"},
    {"checkpointing.allow_changes", Observed::elsewhere, "changes that need a word", "train/resume_test.cpp"},
    {"checkpointing.save_optimizer", Observed::files, "true", "false"},
    {"logger.log_dir", Observed::files, "DIR/run/l", "DIR/run/m"},
    {"logger.log_interval", Observed::lines, "1", "3"},
    {"logger.progress", Observed::lines, "plain", "json"},
    {"logger.sample_period", Observed::rows, "2", "3",
     "llama policy.tokenizer.name=bytes logger.sample_tokens=2"},
    {"logger.sample_prompt", Observed::rows, "a", "b",
     "llama policy.tokenizer.name=bytes logger.sample_tokens=2 logger.sample_period=4"},
    {"logger.sample_tokens", Observed::rows, "2", "9",
     "llama policy.tokenizer.name=bytes logger.sample_period=4 logger.sample_prompt=a"},
    {"logger.sample_temperature", Observed::rows, "0", "50",
     "llama policy.tokenizer.name=bytes logger.sample_period=4 logger.sample_prompt=a "
     "logger.sample_tokens=16"},
    {"kernels.num_threads", Observed::banner, "1", "2"},
    {"kernels.isa", Observed::banner, "baseline", "avx2"},
    {"kernels.share_device", Observed::exit, "false", "true"},
    {"kernels.autotune", Observed::exit, "false", "true"},
    {"kernels.gemm_tuning", Observed::exit, "null", "configs"},
    {"kernels.tf32", Observed::exit, "false", "true"},
    {"kernels.deterministic", Observed::nothing, "of a GPU; a CPU always is", ""},
    {"profiling.enabled", Observed::files, "false", "true"},
    {"profiling.steps", Observed::elsewhere, "profiling.steps=4:7", "train/events_test.cpp"},
};

}  // namespace nrl::test

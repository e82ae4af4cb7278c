// Keys of the data, the sections of other algorithms, and keys of other programs.
#include "core/config/schema.h"

namespace nrl::config_detail {
namespace {

constexpr std::string_view reordered = "the sample order changes: some samples may repeat or be missed";

}  // namespace

void add_data_keys(Table& t) {
  t.section("data", "Training and validation data.");
  t.section("data.train", "The token files to train on.");
  NRL_KEY(t, data.train.data_path)
      .resume(OnResume::unrelated)
      .alias("data.data_path")
      .alias("data.train_files")
      .alias("data.train_dataset")
      .help("Token file prefix (PREFIX.bin and PREFIX.idx), or a list of them (a blend).");
  NRL_KEY(t, data.train.weights)
      .resume(ResumeChange::data, reordered)
      .above(0)
      .help(
          "Shares of the blend, one per path, on any scale; null: in proportion to the samples of each "
          "path.");
  t.planned("data.train.format", Kind::choice, "tokens")
      .one_of({"tokens", "text", "messages", "instruction", "preference", "rollouts"})
      .help("Content of the files; `nrl-train prepare` makes token files from text.");
  t.section("data.validation", "The token files of evaluations.");
  t.resume("data.validation", OnResume::unrelated);
  NRL_KEY(t, data.validation.data_path)
      .alias("data.val_files")
      .alias("data.eval_dataset")
      .help("Token files for evaluation, instead of a share of data.split.")
      .only_with(evaluates());
  NRL_KEY(t, data.validation.weights).above(0).help("Shares of the validation blend.").only_with(evaluates());
  NRL_KEY(t, data.split)
      .resume(ResumeChange::data, reordered)
      .comma()
      .at_least(0)
      .help(
          "Shares of data.train for training, validation and test, on any scale (\"969,30,1\"); null: all "
          "of it for training.");
  NRL_KEY(t, data.seed)
      .resume(ResumeChange::seed, reordered)
      .at_least(0)
      .help("Seed of the data order; null: pretrain.seed.");
  NRL_KEY(t, data.shuffle)
      .resume(OnResume::unrelated)
      .not_built()
      .help("Visit the sequences in random order.");
  NRL_KEY(t, data.num_workers)
      .resume(OnResume::unrelated)
      .at_least(0)
      .at_most(256)
      .help("Threads that read ahead; 0: read on demand.");
  NRL_KEY(t, data.prefetch_batches)
      .resume(OnResume::unrelated)
      .at_least(1)
      .at_most(1024)
      .help("Batches read ahead.")
      .only_with({is_not("data.num_workers", "0", "above 0")});
  NRL_KEY(t, data.pin_memory)
      .resume(OnResume::unrelated)
      .help(
          "Page-locked host buffers of batches. GPU runs always have them: false is refused there, and true "
          "has no effect on a CPU.");
  NRL_KEY(t, data.reset_position_ids)
      .resume(OnResume::reported)
      .help(
          "Positions restart after the end token of every document of a sample (docs/data.md), as in "
          "Megatron-LM.");
  NRL_KEY(t, data.reset_attention_mask)
      .resume(OnResume::reported)
      .help("A token attends to its own document only; the end token belongs to the document that it ends.");
  NRL_KEY(t, data.eod_mask_loss)
      .resume(OnResume::reported)
      .help("No loss where the input is an end token, which would predict how the next document begins.");
}

void add_other_algorithms(Table& t) {
  t.section("dpo", "The loop of algorithm dpo.", {Algorithm::dpo});
  t.planned("dpo.max_num_epochs", Kind::integer, "1").at_least(1).help("Passes over the data.");
  t.planned("dpo.max_num_steps", Kind::integer, "150").at_least(1).help("Optimizer steps.");
  t.planned("dpo.reference_policy_kl_penalty", Kind::number, "0.05")
      .above(0)
      .alias("training.beta")
      .help("Strength of the KL penalty (beta).");
  t.planned("dpo.loss_type", Kind::choice, "sigmoid")
      .one_of({"sigmoid", "ipo", "hinge", "cdpo", "sigmoid_norm"})
      .alias("training.loss_type")
      .help("Preference loss.");
  t.planned("dpo.preference_average_log_probs", Kind::boolean, "false")
      .help("Mean instead of sum over tokens.");
  t.planned("dpo.preference_loss_weight", Kind::number, "1")
      .at_least(0)
      .help("Weight of the preference loss.");
  t.planned("dpo.sft_loss_weight", Kind::number, "0")
      .at_least(0)
      .help("Weight of the likelihood of the chosen answer.");
  t.planned("dpo.reference", Kind::choice, "precompute")
      .one_of({"precompute", "online", "worker_group"})
      .help("Where reference log-probabilities come from.");
  t.planned("dpo.val_period", Kind::integer, "25").at_least(0).help("Steps between evaluations.");
  for (const char* other : {"sft", "rm", "grpo", "distill", "loss_fn"})
    t.foreign(other, std::string("the section of another algorithm (") + other +
                         "); this version trains with algorithm: pretrain only");
}

void add_foreign_keys(Table& t) {
  t.foreign("include", "use 'defaults: base.yaml' to inherit from another file");
  t.foreign("model.config", "write the model's keys under policy.model");
  for (const char* align : {"distributed.align_param_gather",
                            "policy.megatron_cfg.distributed_data_parallel_config.align_param_gather"})
    t.foreign(align, "remove it; all stages start to gather updated weights right after the update");
  t.foreign("model.backend", "remove it; there is one implementation");
  t.foreign("policy.dtensor_cfg.enabled", "remove it; there is one implementation");
  t.foreign("policy.megatron_cfg.enabled", "remove it; there is one implementation");
  t.foreign("policy.megatron_cfg.optimizer.adam_beta1", "write policy.optimizer.betas: [beta1, beta2]");
  t.foreign("policy.megatron_cfg.optimizer.adam_beta2", "write policy.optimizer.betas: [beta1, beta2]");
  t.foreign("policy.megatron_cfg.optimizer.optimizer_offload_fraction",
            "write the fraction as policy.offload_optimizer: 0.5 (0: false)");
  t.foreign("policy.megatron_cfg.scheduler.lr_warmup_init", "the warm-up starts at 0; remove it");
  t.foreign("policy.optimizer.kwargs.foreach", "a switch of PyTorch; remove it");
  t.foreign("policy.optimizer.kwargs.fused", "a switch of PyTorch; remove it");
  t.foreign("policy.generation_batch_size", "there is no generation during training; remove it");
  t.foreign("policy.generation", "there is no generation during training; remove it");
  t.foreign("policy.logprob_batch_size", "there is no separate log-probability pass; remove it");
  t.foreign("policy.make_sequence_length_divisible_by", "lengths are padded as the grid needs; remove it");
  t.foreign("policy.reward_model_cfg", "belongs to algorithm rm, which is not supported yet");
  t.foreign("policy.dtensor_cfg.custom_parallel_plan", "Python code cannot be used; remove it");
  t.foreign("policy.dtensor_cfg.clear_cache_every_n_steps", "memory is planned before the run; remove it");
  t.foreign("policy.megatron_cfg.empty_unused_memory_level", "memory is planned before the run; remove it");
  t.foreign("training.custom_loss", "Python code cannot be used; remove it");
  t.foreign("training.autocast", "write policy.precision: bfloat16 or float32");
  t.foreign("distributed.strategy", "write distributed.shard_strategy");
  t.foreign("hardware", "describes a machine for planning, which is not supported yet; remove it");
  for (const char* groups : {"worker_groups", "worker_group"})
    t.foreign(groups,
              "separate groups of ranks are not supported yet: remove it; mpirun -n RANKS or srun starts the "
              "ranks of a run");
  for (const char* section : {"", "cluster.", "distributed.", "training.", "policy."}) {
    t.foreign(std::string(section) + "trainer_class",
              "a class of Python; write algorithm: pretrain, the only algorithm that is supported yet");
    t.foreign(std::string(section) + "resources_per_worker",
              "resources of Ray; start one process per GPU with mpirun -n RANKS or srun, and let "
              "cluster.gpus_per_node check their number");
  }
  t.foreign("checkpointing.model_save_format", "checkpoints are always safetensors; remove it");
  t.foreign("checkpointing.save_scheduler", "the position in the schedule is always saved; remove it");
  t.foreign("checkpointing.save_consolidated", "checkpoints are always Hugging Face directories; remove it");
  t.foreign("env_vars", "set environment variables in the launcher");
  t.foreign("policy.hf_config", "write the keys under policy.model");
}

}  // namespace nrl::config_detail
